"""Tiny pipelines of video: HunyuanVideo, Mochi, CogVideoX, Wan, SkyReels, LTX-Video, Helios."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import transformers
from diffusers import CogVideoXDDIMScheduler, UniPCMultistepScheduler
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import (
    DEFAULT_PROMPT_TEMPLATE as LLAVA_TEMPLATE,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

from zoo.flux.models import CLIP_WIDTH, SHIFT, T5_WIDTH
from zoo.tiny.base import fill
from zoo.tiny.pipelines.components import (
    DECODER,
    FRAMES,
    IMAGE,
    IMAGE_TOKENS,
    IMAGE_WIDTH,
    PROMPT,
    ROPE,
    SIZE,
    TEXT_WIDTH,
    VIDEO,
    TinyPipeline,
    clip_images,
    clip_vision,
    decoder,
    embeddings,
    from_transformers,
    kl_vae,
    llama_and_clip,
    llava,
    random_image,
    random_model,
    random_video,
    siglip,
    t5,
    tiny_pipe,
    umt5,
)
from zoo.tiny.transformers.registry import MODELS

# -- HunyuanVideo


def hunyuan_video(
    cls: str = "HunyuanVideoPipeline", model: str = "hunyuan", *, config: dict[str, Any] | None = None, **parts: Any
) -> Any:
    config = {"pooled_projection_dim": CLIP_WIDTH, **(config or {})}
    vae = kl_vae("AutoencoderKLHunyuanVideo")
    return tiny_pipe(cls, model, config=config, vae=vae, **{**llama_and_clip(), **parts})


def hunyuan_video_image(condition: str, in_channels: int) -> Any:
    """Build the pipeline from an image, which the model gets as ``condition``."""
    return hunyuan_video(
        "HunyuanVideoImageToVideoPipeline",
        config={"in_channels": in_channels, "image_condition_type": condition},
        image_processor=clip_images(),
        text_encoder=llava(),
    )


def hunyuan_video_15(cls: str = "HunyuanVideo15Pipeline", **components: Any) -> Any:
    qwen = decoder("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", rope_parameters=ROPE)
    glyphs = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    pipe = tiny_pipe(
        cls,
        "hunyuan 1.5",
        # Channels of noise, of the given image, and of its mask.
        config={"in_channels": 9, "target_size": 64},
        **qwen,
        text_encoder_2=from_transformers("T5EncoderModel", "T5Config", 6, vocab_size=384, **glyphs),
        tokenizer_2=transformers.ByT5Tokenizer(),
        vae=random_model(
            "AutoencoderKLHunyuanVideo15", 2, latent_channels=4, block_out_channels=(16,) * 5, layers_per_block=1
        ),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
        **components,
    )
    # Shorter texts. The template of the chat has fewer tokens here than with the trained tokenizer.
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 24, 12, 4
    pipe.prompt_template_encode_start_idx = 98
    return pipe


# -- Mochi, CogVideoX


def mochi() -> Any:
    sizes = {f"{part}_block_out_channels": (32,) * 4 for part in ("encoder", "decoder")}
    vae = random_model("AutoencoderKLMochi", 2, layers_per_block=(1,) * 5, **sizes)
    config = {"in_channels": 12, "out_channels": 12, "text_embed_dim": T5_WIDTH, "max_sequence_length": 16}
    return tiny_pipe("MochiPipeline", "mochi", config=config, vae=vae, **t5())


def cogvideox(cls: str = "CogVideoXPipeline", model: str = "cogvideox", **config: Any) -> Any:
    config = {"text_embed_dim": T5_WIDTH, "max_text_seq_length": 13, **config}
    vae = kl_vae("AutoencoderKLCogVideoX")
    return tiny_pipe(cls, model, config=config, vae=vae, scheduler=CogVideoXDDIMScheduler(), **t5())


# -- Wan


def wan(
    cls: str = "WanPipeline", model: str = "wan", *, two: bool = False, expand_timesteps: bool = False, **config: Any
) -> Any:
    """Build a pipeline of Wan.

    Args:
        two: Whether there is a transformer for each half of the steps, as in Wan 2.2.
        expand_timesteps: Whether each token has a time step.
    """
    config = {"in_channels": 16, "out_channels": 16, **config}
    parts: dict[str, Any] = {"expand_timesteps": True} if expand_timesteps else {}
    if two:
        parts |= {"transformer_2": MODELS[model].build(11, **config), "boundary_ratio": 0.9}
    if "image_dim" in MODELS[model].config | config:
        parts |= {"image_encoder": clip_vision(), "image_processor": clip_images()}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return tiny_pipe(cls, model, config=config, vae=_wan_vae(), scheduler=scheduler, **umt5(), **parts)


def _wan_vae() -> Any:
    return random_model("AutoencoderKLWan", 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1)


def wan_animate() -> Any:
    channels = dict.fromkeys(("4", "8", "16"), 4)
    sizes = {"latent_channels": 16, "motion_encoder_channel_sizes": channels, "motion_encoder_size": 16}
    return wan("WanAnimatePipeline", "wan animate", in_channels=36, **sizes)


def skyreels(cls: str, model: str = "skyreels v2", **config: Any) -> Any:
    return wan(cls, model, **{"inject_sample_info": False, **config})


# -- LTX-Video


def ltx(cls: str = "LTXPipeline", **components: Any) -> Any:
    sizes = {f"{part}block_out_channels": (8,) * 4 for part in ("", "decoder_")}
    sizes |= {f"{part}layers_per_block": (1,) * 5 for part in ("", "decoder_")}
    vae = random_model("AutoencoderKLLTXVideo", 2, latent_channels=8, **sizes)
    return tiny_pipe(cls, "ltx", config={"caption_channels": T5_WIDTH}, vae=vae, **t5(), **components)


def ltx2(cls: str = "LTX2Pipeline", **config: Any) -> Any:
    sizes: dict[str, Any] = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8, 16, 32)}
    sizes |= {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    sound = {"base_channels": 4, "ch_mult": (1, 1, 1), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 8}
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
    )
    connector = {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 13}
    connectors = LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=1 + DECODER["num_hidden_layers"],
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in connector.items()},
    )
    return tiny_pipe(
        cls,
        "ltx2",
        config={"audio_in_channels": 4, "audio_out_channels": 4, **config},
        vae=random_model("AutoencoderKLLTX2Video", 2, latent_channels=8, **sizes, **ratios),
        audio_vae=random_model("AutoencoderKLLTX2Audio", 9, **sound),
        vocoder=fill(vocoder, seed=10),
        connectors=fill(connectors, seed=12),
        **decoder("Gemma3TextModel", "Gemma3TextConfig", head_dim=12),
    )


def helios(cls: str = "HeliosPipeline", **schedule: Any) -> Any:
    config = {"in_channels": 16, "out_channels": 16}
    scheduler = diffusers.HeliosScheduler(**schedule)
    return tiny_pipe(cls, "helios", config=config, vae=_wan_vae(), scheduler=scheduler, **umt5())


_SHORT_TEXT = {"max_sequence_length": 13}
_TEXT = {**VIDEO, **_SHORT_TEXT}
_EMBEDDINGS = embeddings(13, TEXT_WIDTH)
# With an image context the model takes the last 512 tokens of its context for text.
_CONTEXT = embeddings(512, TEXT_WIDTH)
_IMAGE = {"image": IMAGE}
_COGVIDEOX15 = {"patch_size_t": 2, "patch_bias": False}
_LLAVA_TEMPLATE = {**LLAVA_TEMPLATE, "image_emb_end": LLAVA_TEMPLATE["image_emb_start"] + 4, "image_emb_len": 4}
_FROM_IMAGE = {**_TEXT, **_IMAGE, "prompt_template": _LLAVA_TEMPLATE}
_IMAGE_CONTEXT = {"in_channels": 36, "image_dim": IMAGE_WIDTH, "added_kv_proj_dim": 36}
_WAN_IMAGE = partial(wan, "WanImageToVideoPipeline", **_IMAGE_CONTEXT)
_FORCING = "SkyReelsV2DiffusionForcing"
_ANIMATE = {**SIZE, **_IMAGE, "segment_frame_length": 9, **_CONTEXT}
_HELIOS = {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1], **_EMBEDDINGS}
# 3 × 3 × 5 video tokens of 32 × 32 pixels in 8 frames.
_LTX_SIZE = {"height": 96, "width": 160, "num_frames": 17, **_SHORT_TEXT}
_LTX_IMAGE = random_image(96, 160)
_LTX2 = {**_LTX_SIZE, "spatio_temporal_guidance_blocks": [1], "frame_rate": 25.0}
_LTX2_CONDITIONS = [
    LTX2VideoCondition(_LTX_IMAGE, crf=0),
    LTX2VideoCondition(random_video(9, 96, 160), index=8, strength=0.8),
]

VIDEO_PIPELINES: dict[str, TinyPipeline] = {
    # 3 × 3 × 5 video tokens.
    "hunyuan": TinyPipeline(hunyuan_video, _TEXT),
    "mochi": TinyPipeline(mochi, VIDEO, num_frames=13, max_sequence_length=16),
    "cogvideox": TinyPipeline(cogvideox, _TEXT),
    "cogvideox, rotary": TinyPipeline(lambda: cogvideox(model="cogvideox, rotary"), _TEXT),
    "cogvideox 1.5": TinyPipeline(lambda: cogvideox(model="cogvideox, rotary", **_COGVIDEOX15), _TEXT),
    "cogvideox, image": TinyPipeline(
        lambda: cogvideox("CogVideoXImageToVideoPipeline", "cogvideox, rotary", in_channels=8), _TEXT, _IMAGE
    ),
    "cogvideox 1.5, image": TinyPipeline(
        lambda: cogvideox(
            "CogVideoXImageToVideoPipeline", "cogvideox, rotary", in_channels=8, ofs_embed_dim=8, **_COGVIDEOX15
        ),
        {**_TEXT, **_IMAGE},
    ),
    "cogvideox, video": TinyPipeline(
        lambda: cogvideox("CogVideoXVideoToVideoPipeline"), SIZE, _SHORT_TEXT, video=FRAMES, strength=0.9
    ),
    "cogvideox, control": TinyPipeline(
        lambda: cogvideox("CogVideoXFunControlPipeline", in_channels=8), SIZE, _SHORT_TEXT, control_video=FRAMES
    ),
    "wan": TinyPipeline(wan, _TEXT),
    "wan 2.2": TinyPipeline(lambda: wan(two=True), _TEXT),
    "wan, a time step for each token": TinyPipeline(lambda: wan(expand_timesteps=True), _TEXT),
    "wan, image": TinyPipeline(_WAN_IMAGE, VIDEO, _IMAGE, _CONTEXT),
    "wan, first and last image": TinyPipeline(
        lambda: _WAN_IMAGE(pos_embed_seq_len=2 * IMAGE_TOKENS),
        {**VIDEO, **_IMAGE, "last_image": random_image(48, 80, seed=3), **_CONTEXT},
    ),
    "wan 2.2, image": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", two=True, in_channels=36), VIDEO, _IMAGE, _EMBEDDINGS
    ),
    "wan, image by time steps": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", expand_timesteps=True), VIDEO, _IMAGE, _EMBEDDINGS
    ),
    "chronoedit": TinyPipeline(
        lambda: wan("ChronoEditPipeline", "chronoedit", **_IMAGE_CONTEXT), VIDEO, _IMAGE, _CONTEXT
    ),
    "lucy": TinyPipeline(lambda: wan("LucyEditPipeline", in_channels=32), VIDEO, _EMBEDDINGS, video=FRAMES),
    "wan, video": TinyPipeline(lambda: wan("WanVideoToVideoPipeline"), SIZE, _EMBEDDINGS, video=FRAMES, strength=0.9),
    "wan vace": TinyPipeline(
        lambda: wan("WanVACEPipeline", "wan vace", vace_in_channels=96), VIDEO, _EMBEDDINGS, video=FRAMES
    ),
    # Two segments, the second with the end of the first as its condition.
    "wan animate": TinyPipeline(
        wan_animate,
        _ANIMATE,
        pose_video=random_video(12, 48, 80),
        face_video=random_video(12, 16, 16),
        guidance_scale=3.0,
    ),
    "wan animate, replacing": TinyPipeline(
        wan_animate,
        _ANIMATE,
        dict.fromkeys(("pose_video", "background_video", "mask_video"), FRAMES),
        face_video=random_video(9, 16, 16),
        mode="replace",
    ),
    "skyreels v2": TinyPipeline(lambda: skyreels("SkyReelsV2Pipeline"), VIDEO, _EMBEDDINGS),
    "skyreels v2, image": TinyPipeline(
        lambda: skyreels("SkyReelsV2ImageToVideoPipeline", **_IMAGE_CONTEXT), VIDEO, _IMAGE, _CONTEXT
    ),
    # Each frame has its own noise level; the pipeline denoises them one after another, in windows.
    "skyreels v2, forcing": TinyPipeline(
        lambda: skyreels(f"{_FORCING}Pipeline", inject_sample_info=True),
        {**VIDEO, **_EMBEDDINGS, "num_frames": 13, "overlap_history": 5, "base_num_frames": 9},
    ),
    "skyreels v2, forcing from an image": TinyPipeline(
        lambda: skyreels(f"{_FORCING}ImageToVideoPipeline", num_frame_per_block=3),
        {**VIDEO, **_IMAGE, **_EMBEDDINGS, "ar_step": 1, "causal_block_size": 3},
    ),
    "skyreels v2, forcing from a video": TinyPipeline(
        lambda: skyreels(f"{_FORCING}VideoToVideoPipeline"),
        {**VIDEO, **_EMBEDDINGS, "num_frames": 17, "video": FRAMES, "overlap_history": 5, "base_num_frames": 9},
    ),
    # The model gets noise, the given image, and its mask.
    "hunyuan, image": TinyPipeline(lambda: hunyuan_video_image("latent_concat", 9), _FROM_IMAGE),
    # The tokens of the given image replace the first ones of the noise.
    "hunyuan, image by token replacement": TinyPipeline(lambda: hunyuan_video_image("token_replace", 4), _FROM_IMAGE),
    "skyreels, image": TinyPipeline(
        lambda: hunyuan_video("HunyuanSkyreelsImageToVideoPipeline", config={"in_channels": 8}), _TEXT, _IMAGE
    ),
    "framepack": TinyPipeline(
        lambda: hunyuan_video("HunyuanVideoFramepackPipeline", "framepack", **siglip()),
        {**_TEXT, **_IMAGE, "latent_window_size": 3},
    ),
    "hunyuan 1.5": TinyPipeline(hunyuan_video_15, VIDEO, prompt=f'{PROMPT}, with the text "red"'),
    "hunyuan 1.5, image": TinyPipeline(
        lambda: hunyuan_video_15("HunyuanVideo15ImageToVideoPipeline", **siglip()), _IMAGE, num_frames=9
    ),
    "ltx": TinyPipeline(ltx, _LTX_SIZE),
    "ltx, image": TinyPipeline(lambda: ltx("LTXImageToVideoPipeline"), _LTX_SIZE, image=_LTX_IMAGE),
    "ltx, condition": TinyPipeline(lambda: ltx("LTXConditionPipeline"), _LTX_SIZE, image=_LTX_IMAGE),
    "ltx, long": TinyPipeline(
        lambda: ltx("LTXI2VLongMultiPromptPipeline", scheduler=diffusers.LTXEulerAncestralRFScheduler()),
        _LTX_SIZE,
        num_frames=25,
        prompt="a red circle|a green square",
        guidance_scale=3.0,
        cond_image=_LTX_IMAGE,
        temporal_tile_size=16,
        temporal_overlap=8,
    ),
    "ltx2": TinyPipeline(ltx2, _LTX2),
    "ltx2, image": TinyPipeline(lambda: ltx2("LTX2ImageToVideoPipeline"), _LTX2, image=_LTX_IMAGE, image_crf=0),
    "ltx2, condition": TinyPipeline(lambda: ltx2("LTX2ConditionPipeline"), _LTX2, conditions=_LTX2_CONDITIONS),
    "ltx2, in context": TinyPipeline(
        lambda: ltx2("LTX2InContextPipeline"),
        _LTX2,
        conditions=_LTX2_CONDITIONS[:1],
        reference_conditions=LTX2ReferenceCondition(random_video(9, 96, 160)),
        conditioning_attention_strength=0.7,
    ),
    "ltx2, dfr": TinyPipeline(
        lambda: ltx2("LTX2DFRPipeline", use_keyframes_abs_pos_embedding=True),
        {**_LTX_SIZE, "frame_rate": 25.0, "sigmas": [1.0, 0.8, 0.4]},
        without=("num_inference_steps",),
    ),
    "ltx2, hdr": TinyPipeline(
        lambda: ltx2("LTX2HDRPipeline"),
        {**_LTX_SIZE, "frame_rate": 25.0, "reference_conditions": LTX2HDRReferenceCondition(random_video(9, 96, 160))},
    ),
    # Two chunks of frames, the second with the first as its history.
    "helios": TinyPipeline(lambda: helios(stages=1, stage_range=[0, 1]), VIDEO, _HELIOS),
    "helios, pyramid": TinyPipeline(
        lambda: helios("HeliosPyramidPipeline", stages=2, stage_range=[0, 0.5, 1], gamma=0.3),
        {**_HELIOS, "height": 64, "width": 96, "num_frames": 9, "pyramid_num_inference_steps_list": [2, 2]},
        without=("num_inference_steps",),
    ),
}
