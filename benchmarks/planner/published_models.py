"""Configs and sizes of the published models whose counts are stored, and their modules without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.inspect.guidance import number_of_heads
from para_core.adapters.planner import count
from para_core.adapters.planner.work import GenerationSizes, Workload
from para_core.adapters.registry import plan_for
from para_core.fleet.without_weights import on_meta


@dataclass(frozen=True)
class PublishedModel:
    """A published pipeline in bfloat16.

    Args:
        transformer, vae (`str`): Classes of the transformer and of the autoencoder in diffusers.
        sizes, steps (`GenerationSizes`, `int`): Sizes and denoising steps of a generation, if the user gives none.
        encoder (`Callable[[], nn.Module]`): Creates the largest text encoder. Call it inside :func:`on_meta`.
        config, vae_config (`Mapping[str, Any]`): Arguments that differ from the defaults of these classes.
        branches (`int`): Number of CFG branches per step.
        transformers (`int`): Number of transformers, each of which runs a part of the schedule.
        repository (`str`): Repository on the Hub.
    """

    transformer: str
    sizes: GenerationSizes
    steps: int
    vae: str
    encoder: Callable[[], nn.Module]
    config: Mapping[str, Any] = field(default_factory=dict)
    vae_config: Mapping[str, Any] = field(default_factory=dict)
    branches: int = 1
    transformers: int = 1
    repository: str = ""


def _encoder(model: str, config: str, **options: Any) -> nn.Module:
    """Return an instance of transformers' class ``model``, whose ``config`` class gets ``options``."""
    import transformers

    encoder: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return encoder


# fmt: off
_t5_xxl = partial(
    _encoder, d_model=4096, d_ff=10240, num_layers=24, num_heads=64, d_kv=64, feed_forward_proj="gated-gelu",
)
# The encoder of T5 v1.1 XXL, for example in FLUX.1.
_T5 = partial(_t5_xxl, "T5EncoderModel", "T5Config", vocab_size=32128)
_UMT5 = partial(_t5_xxl, "UMT5EncoderModel", "UMT5Config", vocab_size=256384)
# Llama 3 8B without its language-model head, as in llava-llama-3-8b of HunyuanVideo.
_LLAMA = partial(
    _encoder, "LlamaModel", "LlamaConfig", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128320,
)
# The language model of Mistral Small 3, the text encoder of FLUX.2.
_MISTRAL = partial(
    _encoder, "MistralForCausalLM", "MistralConfig", hidden_size=5120, intermediate_size=32768, num_hidden_layers=40,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=131072, tie_word_embeddings=False,
)
# Qwen2.5-VL 7B, the text encoder of Qwen-Image.
_QWEN = partial(
    _encoder, "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
    text_config={
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    vision_config={
        "hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    },
)

_KL_F8: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2, "latent_channels": 16,
    "use_quant_conv": False, "use_post_quant_conv": False,
}
_COGVIDEOX: dict[str, Any] = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
_WAN_5B: dict[str, Any] = {
    "num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 30,
}
_WAN_5B_VAE: dict[str, Any] = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16,
}
_WAN_1_3B: dict[str, Any] = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_WAN = PublishedModel(
    "WanTransformer3DModel", GenerationSizes(720, 1280, 81, 512), 50, "AutoencoderKLWan", _UMT5, branches=2,
)
PUBLISHED: Mapping[str, PublishedModel] = {
    "FLUX.1-dev": PublishedModel(
        "FluxTransformer2DModel", GenerationSizes(1024, 1024, 1, 512), 28, "AutoencoderKL", _T5,
        config={"guidance_embeds": True}, vae_config=_KL_F8, repository="black-forest-labs/FLUX.1-dev",
    ),
    "FLUX.2-dev": PublishedModel(
        "Flux2Transformer2DModel", GenerationSizes(1024, 1024, 1, 512), 50, "AutoencoderKLFlux2", _MISTRAL,
        repository="black-forest-labs/FLUX.2-dev",
    ),
    "HunyuanVideo": PublishedModel(
        "HunyuanVideoTransformer3DModel", GenerationSizes(720, 1280, 129, 256), 50, "AutoencoderKLHunyuanVideo",
        _LLAMA, repository="hunyuanvideo-community/HunyuanVideo",
    ),
    "CogVideoX-5B": PublishedModel(
        "CogVideoXTransformer3DModel", GenerationSizes(480, 720, 49, 226), 50, "AutoencoderKLCogVideoX", _T5,
        config=_COGVIDEOX, branches=2, repository="zai-org/CogVideoX-5b",
    ),
    "Mochi 1": PublishedModel(
        "MochiTransformer3DModel", GenerationSizes(480, 848, 79, 256, temporal=6), 64, "AutoencoderKLMochi",
        _T5, branches=2, repository="genmo/mochi-1-preview",
    ),
    "Wan 2.1 1.3B": replace(
        _WAN, sizes=GenerationSizes(480, 832, 81, 512), config=_WAN_1_3B,
        repository="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    ),
    "Wan 2.1 14B": replace(_WAN, repository="Wan-AI/Wan2.1-T2V-14B-Diffusers"),
    "Wan 2.2 A14B": replace(_WAN, steps=40, transformers=2, repository="Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
    "Wan 2.2 TI2V 5B": replace(
        _WAN, sizes=GenerationSizes(704, 1280, 121, 512, spatial=16), config=_WAN_5B, vae_config=_WAN_5B_VAE,
        repository="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    ),
    "Qwen-Image": PublishedModel(
        "QwenImageTransformer2DModel", GenerationSizes(1328, 1328, 1, 128), 50, "AutoencoderKLQwenImage", _QWEN,
        branches=2, repository="Qwen/Qwen-Image",
    ),
}
# fmt: on


@dataclass(frozen=True)
class PublishedModules:
    """The modules of a published model without weights."""

    transformer: Any
    vae: Any
    encoder: nn.Module


def published_modules(name: str) -> PublishedModules:
    """Create the transformer, the autoencoder and the largest text encoder of a published model on the meta device."""
    import diffusers

    model = PUBLISHED[name]
    with on_meta():
        transformer = getattr(diffusers, model.transformer)(**model.config).eval()
        vae = getattr(diffusers, model.vae)(**model.vae_config).eval()
        return PublishedModules(transformer, vae, model.encoder())


def counted_workload(name: str, sizes: GenerationSizes, steps: int, modules: PublishedModules) -> Workload:
    """Return the work of one generation with a published model, counted on its ``modules``."""
    model = PUBLISHED[name]
    with count.without_data():
        call = count.count_call(modules.transformer, sizes)
    plan = plan_for(modules.transformer)
    return Workload(
        name=f"{name}, {sizes}",
        sizes=sizes,
        steps=steps,
        weights=count.count_weights(
            modules.transformer,
            [modules.encoder],
            vae=count.bytes_of(modules.vae),
            other=0.0,
            transformers=model.transformers,
        ),
        call=call,
        branches=model.branches,
        batched=plan is not None and bool(plan.batched) and model.branches > 1,
        heads=number_of_heads(modules.transformer) or 0,
    )
