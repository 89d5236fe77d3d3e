"""Tiny pipelines of the image families beside FLUX.1."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers.image_processor import VaeImageProcessor
from torch import nn
from torch.nn import functional

from zoo.flux.models import CLIP_WIDTH, T5_WIDTH
from zoo.tiny.pipelines.parts import (
    DECODER,
    IMAGE_WIDTH,
    LATENT_CHANNELS,
    ROPE,
    TEXT_WIDTH,
    build_vae,
    flux_encoders,
    random_model,
    t5,
    tokenizers,
    whole_pipe,
    word_tokenizer,
)
from zoo.tiny.random_weights import fill

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


def qwen_image(cls: str = "QwenImagePipeline", *, layers: bool = False, **components: Any) -> Any:
    """``layers``: an image with transparency is taken apart."""
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
    channels = 8 if layers else 4
    latents = {"latents_mean": [0.1, -0.2, 0.3, 0.0] * (channels // 4), "latents_std": [1.2, 0.9] * (channels // 2)}
    config_of_layers = {"use_additional_t_cond": True, "use_layer3d_rope": True, "in_channels": 32, "out_channels": 8}
    return whole_pipe(
        cls,
        transformer=random_model("QwenImageTransformer2DModel", 1, **{**_QWEN, **(config_of_layers if layers else {})}),
        vae=random_model(
            "AutoencoderKLQwenImage",
            2,
            base_dim=4,
            dim_mult=[1] * 4,
            num_res_blocks=1,
            # Colours, and transparency.
            input_channels=4 if layers else 3,
            z_dim=channels,
            **latents,
        ),
        text_encoder=fill(transformers.Qwen2_5_VLForConditionalGeneration(config), seed=5),
        tokenizer=word_tokenizer(),
        **components,
    )


def qwen_image_edit(cls: str, *, layers: bool = False) -> Any:
    """These scale what they are given to a megapixel. Here the VAE sees a sixteenth of the height and of the width."""
    pipe = qwen_image(cls, layers=layers, processor=None)
    encode = pipe.vae.encode
    pipe.vae.encode = lambda pixels: encode(functional.avg_pool3d(pixels, (1, 16, 16)))
    pipe.vae_scale_factor *= 16
    pipe.image_processor = VaeImageProcessor(vae_scale_factor=2 * pipe.vae_scale_factor)
    return pipe


def qwen_controlnet(mask_channels: int = 0) -> nn.Module:
    config = {**_QWEN, "num_layers": 1, "extra_condition_channels": mask_channels}
    return random_model("QwenImageControlNetModel", 8, **config)


# -- images of two or three text encoders, of one, and of a causal one: their embeddings are given


def _image_pipe(cls: str, transformer: nn.Module, **components: Any) -> Any:
    vae = fill(build_vae(transformer.config.in_channels), seed=2)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return whole_pipe(cls, transformer=transformer, vae=vae, **components)


_SD3 = {
    "sample_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": TEXT_WIDTH,
    "caption_projection_dim": 48,
    "pooled_projection_dim": IMAGE_WIDTH,
    "pos_embed_max_size": 32,
    "qk_norm": "rms_norm",
}


def stable_diffusion_3(cls: str = "StableDiffusion3Pipeline", *, mask_channels: int = 0) -> Any:
    """3.5 medium; with a ControlNet where the class takes one."""
    encoders = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]
    parts: dict[str, Any] = dict.fromkeys(encoders)
    if "ControlNet" in cls:
        config = {**_SD3, "num_layers": 2, "extra_conditioning_channels": mask_channels}
        parts["controlnet"] = random_model("SD3ControlNetModel", 8, **config)
    # Inpainting takes no other number.
    channels = dict.fromkeys(("in_channels", "out_channels"), 16 if "Inpaint" in cls and "ControlNet" not in cls else 4)
    config = {**_SD3, **channels, "dual_attention_layers": (0, 1)}
    transformer = random_model("SD3Transformer2DModel", 1, **config)
    return _image_pipe(cls, transformer, **parts)


def hidream() -> Any:
    transformer = random_model(
        "HiDreamImageTransformer2DModel",
        1,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        caption_channels=[TEXT_WIDTH, TEXT_WIDTH],
        text_emb_dim=IMAGE_WIDTH,
        axes_dims_rope=(4, 6, 6),
        max_resolution=(32, 32),
        llama_layers=[0, 1, 2, 3],
        force_inference_output=True,
    )
    encoders = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3", "_4")]
    pipe = _image_pipe("HiDreamImagePipeline", transformer, **dict.fromkeys(encoders))
    # Of the area to which it scales what it is asked.
    pipe.default_sample_size = 8
    return pipe


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
    return _image_pipe("AuraFlowPipeline", transformer, text_encoder=None, tokenizer=None)


def pixart(cls: str = "PixArtSigmaPipeline", **components: Any) -> Any:
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
    return _image_pipe(cls, transformer, scheduler=diffusers.DDIMScheduler(), **t5(), **components)


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
    return _image_pipe("Lumina2Pipeline", transformer, text_encoder=None, tokenizer=None)


# -- VisualCloze: FLUX.1 [Fill]


def visual_cloze(cls: str) -> Any:
    encoders = flux_encoders()
    channels = 4 * LATENT_CHANNELS
    transformer = random_model(
        "FluxTransformer2DModel",
        1,
        # Noise, the images with what is asked for left out, and the mask of that: 8 × 8 pixels of a token.
        in_channels=2 * channels + 64,
        out_channels=channels,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    vae = fill(build_vae(), seed=2)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return whole_pipe(
        cls,
        transformer=transformer,
        vae=vae,
        text_encoder=encoders["clip"],
        tokenizer=tokenizers().clip,
        text_encoder_2=encoders["t5"],
        tokenizer_2=tokenizers().t5,
        resolution=48,
    )


# -- FLUX.2


def flux2(cls: str) -> Any:
    decoder = transformers.Qwen3Config(vocab_size=len(word_tokenizer()), head_dim=12, **DECODER)
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    text = {"text_encoder": fill(transformers.Qwen3ForCausalLM(decoder), seed=5), "tokenizer": word_tokenizer()}
    return whole_pipe(
        cls,
        # FLUX.2 [dev]'s encoder, Mistral 3, and its processor cannot be made small in process.
        **(dict.fromkeys(text) if cls == "Flux2Pipeline" else text),
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
