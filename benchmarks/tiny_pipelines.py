"""Tiny diffusers pipelines of every video family, and of the picture families beside FLUX.1: random weights, nothing to load.

Each is whole: text encoders and tokenizers (but FLUX.2 [dev]), VAE, scheduler. What they draw means nothing, but every part of the input matters
to it, so it shows what parallel runs get wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import (
    DEFAULT_PROMPT_TEMPLATE as LLAVA_TEMPLATE,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from benchmarks.random_weights import fill
from benchmarks.tiny_flux import grammar
from benchmarks.tiny_flux.models import (
    CLIP_WIDTH,
    SHIFT,
    T5_WIDTH,
    Denoiser,
    Tokenizers,
    build_tokenizers,
    build_vae,
)

# Of the encoders that are made here.
TEXT_WIDTH, IMAGE_WIDTH = 24, 20
IMAGE_TOKENS = 5  # of 8 × 8 pixels each, and one for all
PROMPT = "a large red circle at the top left, on white"


@dataclass(frozen=True)
class TinyPipeline:
    """How to build a pipeline, and what a short call of it is given in addition to a prompt."""

    build: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, **options: Any) -> dict[str, Any]:
        """Arguments of a short call that gives latents: few tokens, an odd number of them, three steps, a seed.

        What is None is left out.
        """
        defaults = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "latent", **self.options}
        defaults["generator"] = torch.Generator().manual_seed(7)
        return {name: value for name, value in {**defaults, **options}.items() if value is not None}


# -- tokenizers and encoders


@cache
def _tokenizers() -> Tokenizers:
    return build_tokenizers()


@cache
def _flux_encoders() -> dict[str, nn.Module]:
    denoiser = Denoiser(_tokenizers())
    return {"clip": fill(denoiser.text_encoder, seed=3), "t5": fill(denoiser.text_encoder_2, seed=4)}


_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{{ message['content'][0]['text'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def _word_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the grammar, punctuation, line ends, and the marks of chat templates are one token each.

    Cut this way, the templates of the pipelines have about as many tokens as the pipelines cut off: the prompt is left.
    Each pipeline has its own: LTX-2 turns its padding to the left.
    """
    marks = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    marks += [f"<|{name}|>" for name in ("start_header_id", "end_header_id", "eot_id", "im_start", "im_end")]
    vocab = {word: index for index, word in enumerate([*marks, *dict.fromkeys(grammar.words())])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\s]"), "removed", invert=True)
    tokenizer.add_special_tokens(marks)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=_CHAT,
        padding_side="right",
        model_max_length=512,
    )


_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
# Of a decoder that encodes text. Of its hidden states pipelines take the third from the end: after one layer.
_DECODER = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 2 * TEXT_WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": IMAGE_WIDTH,
    "intermediate_size": 2 * IMAGE_WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=len(_word_tokenizer()), **_DECODER)
    return fill(transformers.LlamaModel(config), seed=5)


def _llava() -> nn.Module:
    """Sees pictures of 4 tokens."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=len(_word_tokenizer()), **_DECODER),
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        image_token_index=_word_tokenizer().convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        vision_feature_layer=-1,
    )
    return fill(transformers.LlavaForConditionalGeneration(config), seed=5)


def _umt5() -> nn.Module:
    vocab_size = len(_tokenizers().t5)
    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return fill(transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=vocab_size, **sizes)), seed=6)


def _clip_vision() -> nn.Module:
    return fill(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_VISION)), seed=7)


def _clip_images() -> Any:
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)


def _siglip() -> nn.Module:
    return fill(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_VISION)), seed=7)


def _siglip_images() -> Any:
    return transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})


def _llama_and_clip() -> dict[str, Any]:
    return {
        "text_encoder": _llama(),
        "tokenizer": _word_tokenizer(),
        "text_encoder_2": _flux_encoders()["clip"],
        "tokenizer_2": _tokenizers().clip,
    }


def _t5() -> dict[str, Any]:
    return {"text_encoder": _flux_encoders()["t5"], "tokenizer": _tokenizers().t5}


def _umt5_and_tokenizer() -> dict[str, Any]:
    return {"text_encoder": _umt5(), "tokenizer": _tokenizers().t5}


# -- all families


def _random(cls: str, seed: int, **config: Any) -> nn.Module:
    return fill(getattr(diffusers, cls)(**config), seed)


def _pipe(cls: str, **components: Any) -> Any:
    components.setdefault("scheduler", FlowMatchEulerDiscreteScheduler(shift=SHIFT))
    pipe = getattr(diffusers, cls)(**components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def film(frames: int, height: int, width: int) -> list[Image.Image]:
    """Noise."""
    return [picture(height, width, seed) for seed in range(frames)]


# -- HunyuanVideo

_HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": TEXT_WIDTH,
    "pooled_projection_dim": CLIP_WIDTH,
    "rope_axes_dim": (4, 4, 4),
}


def _hunyuan_vae() -> nn.Module:
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return _random("AutoencoderKLHunyuanVideo", 2, latent_channels=4, **sizes)


def hunyuan_video(cls: str = "HunyuanVideoPipeline", **components: Any) -> Any:
    transformer = _random("HunyuanVideoTransformer3DModel", 1, **_HUNYUAN)
    return _pipe(cls, **{"transformer": transformer, "vae": _hunyuan_vae(), **_llama_and_clip(), **components})


def hunyuan_video_image(condition: str) -> Any:
    """``condition``: how the model is given the image."""
    # Noise, the given image, and its mask; or its tokens in place of the first.
    in_channels = 9 if condition == "latent_concat" else 4
    config = {**_HUNYUAN, "in_channels": in_channels, "image_condition_type": condition}
    return hunyuan_video(
        "HunyuanVideoImageToVideoPipeline",
        transformer=_random("HunyuanVideoTransformer3DModel", 1, **config),
        image_processor=_clip_images(),
        text_encoder=_llava(),
    )


def framepack() -> Any:
    config = {"has_image_proj": True, "image_proj_dim": IMAGE_WIDTH, "has_clean_x_embedder": True}
    return _pipe(
        "HunyuanVideoFramepackPipeline",
        transformer=_random("HunyuanVideoFramepackTransformer3DModel", 1, **_HUNYUAN, **config),
        vae=_hunyuan_vae(),
        image_encoder=_siglip(),
        feature_extractor=_siglip_images(),
        **_llama_and_clip(),
    )


# -- Mochi


def mochi() -> Any:
    transformer = _random(
        "MochiTransformer3DModel",
        1,
        patch_size=2,
        num_attention_heads=3,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=T5_WIDTH,
        time_embed_dim=8,
        max_sequence_length=16,
    )
    sizes = {f"{part}_block_out_channels": (32,) * 4 for part in ("encoder", "decoder")}
    vae = _random("AutoencoderKLMochi", 2, layers_per_block=(1,) * 5, **sizes)
    return _pipe("MochiPipeline", transformer=transformer, vae=vae, **_t5())


# -- CogVideoX

_COGVIDEOX = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": T5_WIDTH,
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 13,
}


def cogvideox(cls: str = "CogVideoXPipeline", **config: Any) -> Any:
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return _pipe(
        cls,
        transformer=_random("CogVideoXTransformer3DModel", 1, **{**_COGVIDEOX, **config}),
        vae=_random("AutoencoderKLCogVideoX", 2, latent_channels=4, **sizes),
        scheduler=CogVideoXDDIMScheduler(),
        **_t5(),
    )


# -- Wan

_WAN = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def _wan_vae(**config: Any) -> nn.Module:
    return _random("AutoencoderKLWan", 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **config)


def wan(cls: str = "WanPipeline", *, model: str = "WanTransformer3DModel", two: bool = False, **config: Any) -> Any:
    """``two``: a transformer for each half of the steps, as in Wan 2.2."""
    config = {**_WAN, **config}
    parts: dict[str, Any] = {"expand_timesteps": True} if config.pop("expand_timesteps", False) else {}
    parts |= {"transformer": _random(model, 1, **config)}
    if two:
        parts |= {"transformer_2": _random(model, 11, **config), "boundary_ratio": 0.9}
    if "image_dim" in config:
        parts |= {"image_encoder": _clip_vision(), "image_processor": _clip_images()}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return _pipe(cls, vae=_wan_vae(), scheduler=scheduler, **_umt5_and_tokenizer(), **parts)


# -- HunyuanVideo 1.5


def hunyuan_video_15(cls: str = "HunyuanVideo15Pipeline", **components: Any) -> Any:
    tokens = len(_word_tokenizer())
    decoder = transformers.Qwen2_5_VLTextConfig(vocab_size=tokens, rope_parameters=_ROPE, **_DECODER)
    glyphs = transformers.T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipe = _pipe(
        cls,
        text_encoder=fill(transformers.Qwen2_5_VLTextModel(decoder), seed=5),
        tokenizer=_word_tokenizer(),
        text_encoder_2=fill(transformers.T5EncoderModel(glyphs), seed=6),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=_random(
            "HunyuanVideo15Transformer3DModel",
            1,
            # Noise, the given image, and its mask.
            in_channels=9,
            out_channels=4,
            num_attention_heads=3,
            attention_head_dim=12,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=TEXT_WIDTH,
            text_embed_2_dim=16,
            image_embed_dim=IMAGE_WIDTH,
            rope_axes_dim=(4, 4, 4),
            target_size=64,
        ),
        vae=_random(
            "AutoencoderKLHunyuanVideo15", 2, latent_channels=4, block_out_channels=(16,) * 5, layers_per_block=1
        ),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
        **components,
    )
    # Shorter texts. The template of the chat has fewer tokens here than in the trained tokenizer.
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 24, 12, 4
    pipe.prompt_template_encode_start_idx = 98
    return pipe


def hunyuan_video_15_image() -> Any:
    parts = {"image_encoder": _siglip(), "feature_extractor": _siglip_images()}
    return hunyuan_video_15("HunyuanVideo15ImageToVideoPipeline", **parts)


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
        text_config={"vocab_size": len(_word_tokenizer()), "rope_parameters": _ROPE, **_DECODER},
        vision_config={
            "depth": 1,
            "hidden_size": IMAGE_WIDTH,
            "intermediate_size": IMAGE_WIDTH,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
        },
    )
    latents = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.2, 0.9, 1.1, 1.0]}
    return _pipe(
        cls,
        transformer=_random("QwenImageTransformer2DModel", 1, **_QWEN),
        vae=_random("AutoencoderKLQwenImage", 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **latents),
        text_encoder=fill(transformers.Qwen2_5_VLForConditionalGeneration(config), seed=5),
        tokenizer=_word_tokenizer(),
        **components,
    )


def qwen_controlnet() -> nn.Module:
    return _random("QwenImageControlNetModel", 8, **{**_QWEN, "num_layers": 1})


# -- pictures of two or three text encoders, of one, and of a causal one: their embeddings are given


def _picture_pipe(cls: str, transformer: nn.Module, **components: Any) -> Any:
    vae = fill(build_vae(), seed=2)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return _pipe(cls, transformer=transformer, vae=vae, **components)


def stable_diffusion_3() -> Any:
    transformer = _random(
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
    transformer = _random(
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
    transformer = _random(
        "PixArtTransformer2DModel",
        1,
        num_attention_heads=3,
        attention_head_dim=16,
        num_layers=2,
        cross_attention_dim=48,
        caption_channels=T5_WIDTH,
        sample_size=64,
    )
    return _picture_pipe("PixArtSigmaPipeline", transformer, scheduler=diffusers.DDIMScheduler(), **_t5())


def lumina2() -> Any:
    transformer = _random(
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


# -- LTX-Video

_LTX = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "cross_attention_dim": 24,
    "num_layers": 2,
    "caption_channels": T5_WIDTH,
}


def ltx(cls: str = "LTXPipeline") -> Any:
    sizes = {f"{part}block_out_channels": (8,) * 4 for part in ("", "decoder_")}
    sizes |= {f"{part}layers_per_block": (1,) * 5 for part in ("", "decoder_")}
    return _pipe(
        cls,
        transformer=_random("LTXVideoTransformer3DModel", 1, **_LTX),
        vae=_random("AutoencoderKLLTXVideo", 2, latent_channels=8, **sizes),
        **_t5(),
    )


def ltx2(cls: str = "LTX2Pipeline") -> Any:
    sizes: dict[str, Any] = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8, 16, 32)}
    sizes |= {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    connector = {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 13}
    connectors = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in connector.items()}
    decoder = transformers.Gemma3TextConfig(vocab_size=len(_word_tokenizer()), head_dim=12, **_DECODER)
    return _pipe(
        cls,
        transformer=_random(
            "LTX2VideoTransformer3DModel",
            1,
            **{**_LTX, "caption_channels": TEXT_WIDTH},
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=3,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=12,
        ),
        vae=_random("AutoencoderKLLTX2Video", 2, latent_channels=8, **sizes, **ratios),
        audio_vae=_random(
            "AutoencoderKLLTX2Audio",
            9,
            base_channels=4,
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            latent_channels=2,
            mel_bins=8,
        ),
        vocoder=fill(
            LTX2Vocoder(
                in_channels=16,
                hidden_channels=8,
                upsample_kernel_sizes=[4, 4],
                upsample_factors=[2, 2],
                resnet_kernel_sizes=[3],
                resnet_dilations=[[1, 3]],
            ),
            seed=10,
        ),
        connectors=fill(
            LTX2TextConnectors(
                caption_channels=TEXT_WIDTH, text_proj_in_factor=1 + _DECODER["num_hidden_layers"], **connectors
            ),
            seed=12,
        ),
        text_encoder=fill(transformers.Gemma3TextModel(decoder), seed=5),
        tokenizer=_word_tokenizer(),
    )


# -- FLUX.2


def flux2(cls: str) -> Any:
    decoder = transformers.Qwen3Config(vocab_size=len(_word_tokenizer()), head_dim=12, **_DECODER)
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    text = {"text_encoder": fill(transformers.Qwen3ForCausalLM(decoder), seed=5), "tokenizer": _word_tokenizer()}
    return _pipe(
        cls,
        # FLUX.2 [dev]'s encoder, Mistral 3, and its processor cannot be made small in process.
        **(text if cls == "Flux2KleinPipeline" else dict.fromkeys(text)),
        transformer=_random(
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
        vae=_random("AutoencoderKLFlux2", 2, **sizes),
    )


# -- Helios


def helios() -> Any:
    return _pipe(
        "HeliosPipeline",
        transformer=_random("HeliosTransformer3DModel", 1, **_HELIOS),
        vae=_wan_vae(),
        scheduler=diffusers.HeliosScheduler(stages=1, stage_range=[0, 1]),
        **_umt5_and_tokenizer(),
    )


_HELIOS = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_dim": (4, 4, 4),
    "is_amplify_history": True,
}


# -- the table


def embeddings(tokens: int, width: int) -> dict[str, Any]:
    """Of a prompt and a negative one, in place of them.

    For pipelines that clean a prompt with ftfy and fail without it (Wan's from images and films, ChronoEdit, Helios).
    """
    generator = torch.Generator().manual_seed(tokens)
    given: dict[str, Any] = {"prompt": None}
    for kind in ("prompt", "negative_prompt"):
        given[f"{kind}_embeds"] = torch.randn(1, tokens, width, generator=generator)
    return given


_SIZE = {"height": 48, "width": 80, "num_frames": 9}
_TEXT = {"max_sequence_length": 13}
_IMAGE = {"image": picture(48, 80)}
_WAN_SIZE = {**_SIZE, **_TEXT}
_QWEN_SIZE = {"height": 48, "width": 80, "negative_prompt": "a blue square"}
# 3 × 5 image tokens of 8 × 8 pixels; of 13 text tokens nine are valid, and five of the negative ones.
_PICTURE = {"height": 24, "width": 40, **embeddings(13, TEXT_WIDTH)}
_VALID = {
    f"{kind}_attention_mask": (torch.arange(13) < number)[None]
    for kind, number in (("prompt", 9), ("negative_prompt", 5))
}
# 3 × 3 × 5 video tokens of 32 × 32 pixels in 8 frames.
_LTX_SIZE = {"height": 96, "width": 160, "num_frames": 17, **_TEXT}
_LLAVA_TEMPLATE = {
    **LLAVA_TEMPLATE,
    "image_emb_end": LLAVA_TEMPLATE["image_emb_start"] + 4,
    "image_emb_len": 4,
}

PIPELINES: dict[str, TinyPipeline] = {
    # 3 × 3 × 5 video tokens.
    "hunyuan": TinyPipeline(hunyuan_video, {**_SIZE, **_TEXT}),
    "mochi": TinyPipeline(mochi, {**_SIZE, "num_frames": 13, "max_sequence_length": 16}),
    "cogvideox": TinyPipeline(cogvideox, {**_SIZE, **_TEXT}),
    "cogvideox, rotary": TinyPipeline(lambda: cogvideox(use_rotary_positional_embeddings=True), {**_SIZE, **_TEXT}),
    "cogvideox 1.5": TinyPipeline(
        lambda: cogvideox(use_rotary_positional_embeddings=True, patch_size_t=2, patch_bias=False), {**_SIZE, **_TEXT}
    ),
    "cogvideox, image": TinyPipeline(
        lambda: cogvideox("CogVideoXImageToVideoPipeline", in_channels=8, use_rotary_positional_embeddings=True),
        {**_SIZE, **_TEXT, **_IMAGE},
    ),
    "cogvideox, video": TinyPipeline(
        lambda: cogvideox("CogVideoXVideoToVideoPipeline"),
        {"height": 48, "width": 80, **_TEXT, "video": film(9, 48, 80), "strength": 0.9},
    ),
    "cogvideox, control": TinyPipeline(
        lambda: cogvideox("CogVideoXFunControlPipeline", in_channels=8),
        {"height": 48, "width": 80, **_TEXT, "control_video": film(9, 48, 80)},
    ),
    "wan": TinyPipeline(wan, _WAN_SIZE),
    "wan 2.2": TinyPipeline(lambda: wan(two=True), _WAN_SIZE),
    "wan, a time step for each token": TinyPipeline(lambda: wan(expand_timesteps=True), _WAN_SIZE),
    "wan, image": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", in_channels=36, image_dim=IMAGE_WIDTH, added_kv_proj_dim=36),
        # The model takes the last 512 tokens of its context for text.
        {**_SIZE, **_IMAGE, **embeddings(512, TEXT_WIDTH)},
    ),
    "wan 2.2, image": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", two=True, in_channels=36),
        {**_SIZE, **_IMAGE, **embeddings(13, TEXT_WIDTH)},
    ),
    "wan, image by time steps": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", expand_timesteps=True), {**_SIZE, **_IMAGE, **embeddings(13, TEXT_WIDTH)}
    ),
    "chronoedit": TinyPipeline(
        lambda: wan(
            "ChronoEditPipeline",
            model="ChronoEditTransformer3DModel",
            in_channels=36,
            image_dim=IMAGE_WIDTH,
            added_kv_proj_dim=36,
        ),
        {**_SIZE, **_IMAGE, **embeddings(512, TEXT_WIDTH)},
    ),
    "lucy": TinyPipeline(
        lambda: wan("LucyEditPipeline", in_channels=32),
        {**_SIZE, "video": film(9, 48, 80), **embeddings(13, TEXT_WIDTH)},
    ),
    "wan, video": TinyPipeline(
        lambda: wan("WanVideoToVideoPipeline"),
        {
            "height": 48,
            "width": 80,
            "video": film(9, 48, 80),
            "strength": 0.9,
            **embeddings(13, TEXT_WIDTH),
        },
    ),
    "wan vace": TinyPipeline(
        lambda: wan("WanVACEPipeline", model="WanVACETransformer3DModel", vace_layers=[0, 1], vace_in_channels=96),
        {**_SIZE, "video": film(9, 48, 80), **embeddings(13, TEXT_WIDTH)},
    ),
    "hunyuan, image": TinyPipeline(
        lambda: hunyuan_video_image("latent_concat"), {**_SIZE, **_TEXT, **_IMAGE, "prompt_template": _LLAVA_TEMPLATE}
    ),
    "hunyuan, image by token replacement": TinyPipeline(
        lambda: hunyuan_video_image("token_replace"), {**_SIZE, **_TEXT, **_IMAGE, "prompt_template": _LLAVA_TEMPLATE}
    ),
    "skyreels, image": TinyPipeline(
        lambda: hunyuan_video(
            "HunyuanSkyreelsImageToVideoPipeline",
            transformer=_random("HunyuanVideoTransformer3DModel", 1, **{**_HUNYUAN, "in_channels": 8}),
        ),
        {**_SIZE, **_TEXT, **_IMAGE},
    ),
    "framepack": TinyPipeline(framepack, {**_SIZE, **_TEXT, **_IMAGE, "latent_window_size": 3}),
    "hunyuan 1.5": TinyPipeline(hunyuan_video_15, {**_SIZE, "prompt": f'{PROMPT}, with the text "red"'}),
    "hunyuan 1.5, image": TinyPipeline(hunyuan_video_15_image, {**_IMAGE, "num_frames": 9}),
    "qwen-image": TinyPipeline(qwen_image, _QWEN_SIZE),
    "qwen-image, image": TinyPipeline(
        lambda: qwen_image("QwenImageImg2ImgPipeline"), {**_QWEN_SIZE, **_IMAGE, "strength": 0.9}
    ),
    "qwen-image, inpainting": TinyPipeline(
        lambda: qwen_image("QwenImageInpaintPipeline"),
        {**_QWEN_SIZE, **_IMAGE, "mask_image": picture(48, 80, seed=1).convert("L"), "strength": 0.9},
    ),
    "qwen-image, controlnet": TinyPipeline(
        lambda: qwen_image("QwenImageControlNetPipeline", controlnet=qwen_controlnet()),
        {**_QWEN_SIZE, "control_image": picture(48, 80)},
    ),
    "ltx": TinyPipeline(ltx, _LTX_SIZE),
    "ltx, image": TinyPipeline(lambda: ltx("LTXImageToVideoPipeline"), {**_LTX_SIZE, "image": picture(96, 160)}),
    "ltx, condition": TinyPipeline(lambda: ltx("LTXConditionPipeline"), {**_LTX_SIZE, "image": picture(96, 160)}),
    "ltx2": TinyPipeline(
        ltx2,
        {**_LTX_SIZE, "spatio_temporal_guidance_blocks": [1], "frame_rate": 25.0},
    ),
    "ltx2, image": TinyPipeline(
        lambda: ltx2("LTX2ImageToVideoPipeline"),
        {
            **_LTX_SIZE,
            "spatio_temporal_guidance_blocks": [1],
            "frame_rate": 25.0,
            "image": picture(96, 160),
            "image_crf": 0,
        },
    ),
    "flux2": TinyPipeline(
        lambda: flux2("Flux2Pipeline"),
        {"height": 48, "width": 80, "prompt": None, "prompt_embeds": embeddings(13, 3 * TEXT_WIDTH)["prompt_embeds"]},
    ),
    "flux2 klein": TinyPipeline(
        lambda: flux2("Flux2KleinPipeline"),
        {"height": 48, "width": 80, **_TEXT, "text_encoder_out_layers": (1, 2, 3)},
    ),
    "stable diffusion 3": TinyPipeline(
        stable_diffusion_3,
        {
            **_PICTURE,
            "pooled_prompt_embeds": embeddings(1, IMAGE_WIDTH)["prompt_embeds"][:, 0],
            "negative_pooled_prompt_embeds": embeddings(1, IMAGE_WIDTH)["negative_prompt_embeds"][:, 0],
        },
    ),
    "auraflow": TinyPipeline(auraflow, {**_PICTURE, **_VALID}),
    "pixart": TinyPipeline(
        pixart, {"height": 24, "width": 40, **_TEXT, "clean_caption": False, "use_resolution_binning": False}
    ),
    "lumina2": TinyPipeline(lumina2, {**_PICTURE, **_VALID, "height": 48, "width": 80}),
    # Two chunks of frames, the second with the first as its history.
    "helios": TinyPipeline(
        helios, {**_SIZE, "num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1], **embeddings(13, TEXT_WIDTH)}
    ),
}
