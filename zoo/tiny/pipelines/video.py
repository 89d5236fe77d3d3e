"""Tiny pipelines of the video families."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import CogVideoXDDIMScheduler, UniPCMultistepScheduler
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from torch import nn

from zoo.flux.models import CLIP_WIDTH, SHIFT, T5_WIDTH
from zoo.tiny.pipelines.parts import (
    DECODER,
    IMAGE_WIDTH,
    ROPE,
    TEXT_WIDTH,
    clip_images,
    clip_vision,
    llama_and_clip,
    llava,
    random_model,
    siglip,
    siglip_images,
    t5,
    umt5_and_tokenizer,
    whole_pipe,
    word_tokenizer,
)
from zoo.tiny.random_weights import fill

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
    return random_model("AutoencoderKLHunyuanVideo", 2, latent_channels=4, **sizes)


def hunyuan_video(cls: str = "HunyuanVideoPipeline", **components: Any) -> Any:
    transformer = random_model("HunyuanVideoTransformer3DModel", 1, **_HUNYUAN)
    return whole_pipe(cls, **{"transformer": transformer, "vae": _hunyuan_vae(), **llama_and_clip(), **components})


def hunyuan_video_image(condition: str) -> Any:
    """``condition``: how the model is given the image."""
    # Noise, the given image, and its mask; or its tokens in place of the first.
    in_channels = 9 if condition == "latent_concat" else 4
    config = {**_HUNYUAN, "in_channels": in_channels, "image_condition_type": condition}
    return hunyuan_video(
        "HunyuanVideoImageToVideoPipeline",
        transformer=random_model("HunyuanVideoTransformer3DModel", 1, **config),
        image_processor=clip_images(),
        text_encoder=llava(),
    )


def hunyuan_video_skyreels() -> Any:
    transformer = random_model("HunyuanVideoTransformer3DModel", 1, **{**_HUNYUAN, "in_channels": 8})
    return hunyuan_video("HunyuanSkyreelsImageToVideoPipeline", transformer=transformer)


def framepack() -> Any:
    config = {"has_image_proj": True, "image_proj_dim": IMAGE_WIDTH, "has_clean_x_embedder": True}
    return whole_pipe(
        "HunyuanVideoFramepackPipeline",
        transformer=random_model("HunyuanVideoFramepackTransformer3DModel", 1, **_HUNYUAN, **config),
        vae=_hunyuan_vae(),
        image_encoder=siglip(),
        feature_extractor=siglip_images(),
        **llama_and_clip(),
    )


# -- Mochi


def mochi() -> Any:
    transformer = random_model(
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
    vae = random_model("AutoencoderKLMochi", 2, layers_per_block=(1,) * 5, **sizes)
    return whole_pipe("MochiPipeline", transformer=transformer, vae=vae, **t5())


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
    return whole_pipe(
        cls,
        transformer=random_model("CogVideoXTransformer3DModel", 1, **{**_COGVIDEOX, **config}),
        vae=random_model("AutoencoderKLCogVideoX", 2, latent_channels=4, **sizes),
        scheduler=CogVideoXDDIMScheduler(),
        **t5(),
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
    return random_model("AutoencoderKLWan", 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **config)


def wan(cls: str = "WanPipeline", *, model: str = "WanTransformer3DModel", two: bool = False, **config: Any) -> Any:
    """``two``: a transformer for each half of the steps, as in Wan 2.2."""
    config = {**_WAN, **config}
    parts: dict[str, Any] = {"expand_timesteps": True} if config.pop("expand_timesteps", False) else {}
    parts |= {"transformer": random_model(model, 1, **config)}
    if two:
        parts |= {"transformer_2": random_model(model, 11, **config), "boundary_ratio": 0.9}
    if "image_dim" in config:
        parts |= {"image_encoder": clip_vision(), "image_processor": clip_images()}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return whole_pipe(cls, vae=_wan_vae(), scheduler=scheduler, **umt5_and_tokenizer(), **parts)


def wan_animate() -> Any:
    return wan(
        "WanAnimatePipeline",
        model="WanAnimateTransformer3DModel",
        in_channels=36,
        image_dim=IMAGE_WIDTH,
        added_kv_proj_dim=36,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
        motion_encoder_channel_sizes=dict.fromkeys(("4", "8", "16"), 4),
        motion_encoder_size=16,
        motion_encoder_dim=8,
        motion_style_dim=8,
        motion_dim=4,
    )


# -- HunyuanVideo 1.5


def hunyuan_video_15(cls: str = "HunyuanVideo15Pipeline", **components: Any) -> Any:
    tokens = len(word_tokenizer())
    decoder = transformers.Qwen2_5_VLTextConfig(vocab_size=tokens, rope_parameters=ROPE, **DECODER)
    glyphs = transformers.T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipe = whole_pipe(
        cls,
        text_encoder=fill(transformers.Qwen2_5_VLTextModel(decoder), seed=5),
        tokenizer=word_tokenizer(),
        text_encoder_2=fill(transformers.T5EncoderModel(glyphs), seed=6),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=random_model(
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
        vae=random_model(
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
    parts = {"image_encoder": siglip(), "feature_extractor": siglip_images()}
    return hunyuan_video_15("HunyuanVideo15ImageToVideoPipeline", **parts)


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


def ltx(cls: str = "LTXPipeline", **components: Any) -> Any:
    sizes = {f"{part}block_out_channels": (8,) * 4 for part in ("", "decoder_")}
    sizes |= {f"{part}layers_per_block": (1,) * 5 for part in ("", "decoder_")}
    return whole_pipe(
        cls,
        transformer=random_model("LTXVideoTransformer3DModel", 1, **_LTX),
        vae=random_model("AutoencoderKLLTXVideo", 2, latent_channels=8, **sizes),
        **t5(),
        **components,
    )


def ltx2(cls: str = "LTX2Pipeline", **config: Any) -> Any:
    sizes: dict[str, Any] = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8, 16, 32)}
    sizes |= {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    connector = {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 13}
    connectors = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in connector.items()}
    decoder = transformers.Gemma3TextConfig(vocab_size=len(word_tokenizer()), head_dim=12, **DECODER)
    return whole_pipe(
        cls,
        transformer=random_model(
            "LTX2VideoTransformer3DModel",
            1,
            **{**_LTX, "caption_channels": TEXT_WIDTH},
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=3,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=12,
            **config,
        ),
        vae=random_model("AutoencoderKLLTX2Video", 2, latent_channels=8, **sizes, **ratios),
        audio_vae=random_model(
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
                caption_channels=TEXT_WIDTH, text_proj_in_factor=1 + DECODER["num_hidden_layers"], **connectors
            ),
            seed=12,
        ),
        text_encoder=fill(transformers.Gemma3TextModel(decoder), seed=5),
        tokenizer=word_tokenizer(),
    )


# -- Helios


def helios(cls: str = "HeliosPipeline", **schedule: Any) -> Any:
    return whole_pipe(
        cls,
        transformer=random_model("HeliosTransformer3DModel", 1, **_HELIOS),
        vae=_wan_vae(),
        scheduler=diffusers.HeliosScheduler(**schedule),
        **umt5_and_tokenizer(),
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
