"""Tiny pipelines of the picture families beside FLUX.1."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from torch import nn

from benchmarks.random_weights import fill
from benchmarks.tiny_flux.models import T5_WIDTH, build_vae
from benchmarks.tiny_parts import DECODER, IMAGE_WIDTH, ROPE, TEXT_WIDTH, random_model, t5, whole_pipe, word_tokenizer

# -- Qwen-Image

_QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 6, 6),
}


def qwen_image(cls: str = "QwenImagePipeline", **components: Any) -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={"vocab_size": len(word_tokenizer()), "rope_parameters": ROPE, **DECODER},
        vision_config={
            "depth": 1,
            "hidden_size": IMAGE_WIDTH,
            "intermediate_size": IMAGE_WIDTH,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
        },
    )
    latents = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.2, 0.9, 1.1, 1.0]}
    return whole_pipe(
        cls,
        transformer=random_model("QwenImageTransformer2DModel", 1, **_QWEN),
        vae=random_model("AutoencoderKLQwenImage", 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **latents),
        text_encoder=fill(transformers.Qwen2_5_VLForConditionalGeneration(config), seed=5),
        tokenizer=word_tokenizer(),
        **components,
    )


def qwen_controlnet() -> nn.Module:
    return random_model("QwenImageControlNetModel", 8, **{**_QWEN, "num_layers": 1})


# -- pictures of two or three text encoders, of one, and of a causal one: their embeddings are given


def _picture_pipe(cls: str, transformer: nn.Module, **components: Any) -> Any:
    vae = fill(build_vae(), seed=2)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return whole_pipe(cls, transformer=transformer, vae=vae, **components)


def stable_diffusion_3() -> Any:
    transformer = random_model(
        "SD3Transformer2DModel",
        1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=48,
        pooled_projection_dim=IMAGE_WIDTH,
        pos_embed_max_size=32,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    encoders = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]
    return _picture_pipe("StableDiffusion3Pipeline", transformer, **dict.fromkeys(encoders))


def auraflow() -> Any:
    transformer = random_model(
        "AuraFlowTransformer2DModel",
        1,
        sample_size=16,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=48,
    )
    return _picture_pipe("AuraFlowPipeline", transformer, text_encoder=None, tokenizer=None)


def pixart() -> Any:
    transformer = random_model(
        "PixArtTransformer2DModel",
        1,
        num_attention_heads=3,
        attention_head_dim=16,
        num_layers=2,
        cross_attention_dim=48,
        caption_channels=T5_WIDTH,
        sample_size=64,
    )
    return _picture_pipe("PixArtSigmaPipeline", transformer, scheduler=diffusers.DDIMScheduler(), **t5())


def lumina2() -> Any:
    transformer = random_model(
        "Lumina2Transformer2DModel",
        1,
        in_channels=4,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(64, 64, 64),
        cap_feat_dim=TEXT_WIDTH,
    )
    return _picture_pipe("Lumina2Pipeline", transformer, text_encoder=None, tokenizer=None)


# -- FLUX.2


def flux2(cls: str) -> Any:
    decoder = transformers.Qwen3Config(vocab_size=len(word_tokenizer()), head_dim=12, **DECODER)
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    text = {"text_encoder": fill(transformers.Qwen3ForCausalLM(decoder), seed=5), "tokenizer": word_tokenizer()}
    return whole_pipe(
        cls,
        # FLUX.2 [dev]'s encoder, Mistral 3, and its processor cannot be made small in process.
        **(text if cls == "Flux2KleinPipeline" else dict.fromkeys(text)),
        transformer=random_model(
            "Flux2Transformer2DModel",
            1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=3 * TEXT_WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=cls == "Flux2Pipeline",
        ),
        vae=random_model("AutoencoderKLFlux2", 2, **sizes),
    )
