"""Tiny pipelines of video: HunyuanVideo, Mochi, CogVideoX, Wan, SkyReels, LTX-Video, Helios."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import transformers
from diffusers import CogVideoXDDIMScheduler, DiffusionPipeline, UniPCMultistepScheduler
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as hunyuan_image
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from torch import nn

from zoo.flux.models import CLIP_WIDTH, SHIFT, T5_WIDTH
from zoo.tiny.base import IMAGE_WIDTH, SECOND_TEXT_WIDTH, TEXT_WIDTH, WIDTH, fill
from zoo.tiny.pipelines import encoders, options
from zoo.tiny.pipelines.components import TinyPipeline, kl_vae, random_model, tiny_pipe
from zoo.tiny.pipelines.options import FRAMES, IMAGE, MEDIUM, PROMPT, SIZE, VIDEO
from zoo.tiny.transformers.registry import MODELS

# -- HunyuanVideo.


def hunyuan_video(cls: str, model: str = "hunyuan", config: Any = None, **parts: Any) -> DiffusionPipeline:
    config = {"pooled_projection_dim": CLIP_WIDTH, **(config or {})}
    parts = {**encoders.decoder("LlamaModel"), **encoders.clip("_2"), **parts}
    return tiny_pipe(cls, model, config=config, vae=kl_vae("AutoencoderKLHunyuanVideo"), **parts)


def hunyuan_video_image(cls: str, condition: str, in_channels: int) -> DiffusionPipeline:
    """Build the pipeline that starts from an image, which the model gets as ``condition``."""
    config = {"in_channels": in_channels, "image_condition_type": condition}
    return hunyuan_video(cls, config=config, image_processor=encoders.clip_images(), text_encoder=encoders.llava())


def framepack(cls: str) -> DiffusionPipeline:
    return hunyuan_video(cls, "framepack", **encoders.siglip())


def hunyuan_video_15(cls: str) -> DiffusionPipeline:
    glyphs = {"d_model": SECOND_TEXT_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    sizes = {"latent_channels": 4, "block_out_channels": (16,) * 5, "layers_per_block": 1}
    pipe = tiny_pipe(
        cls,
        "hunyuan 1.5",
        # The channels are those of noise, of the given image, and of its mask.
        config={"in_channels": 9, "target_size": 64},
        **encoders.decoder("Qwen2_5_VLTextModel", rope_parameters=encoders.ROPE),
        text_encoder_2=encoders.from_transformers("T5EncoderModel", 6, vocab_size=384, **glyphs),
        tokenizer_2=transformers.ByT5Tokenizer(),
        vae=random_model("AutoencoderKLHunyuanVideo15", 2, **sizes),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
        **(encoders.siglip() if "Image" in cls else {}),
    )
    # The texts are shorter. The template of the chat has fewer tokens here than with the trained tokenizer.
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 24, 12, 4
    pipe.prompt_template_encode_start_idx = 98
    return pipe


# -- Mochi, CogVideoX.


def mochi(cls: str) -> DiffusionPipeline:
    sizes = {f"{part}_block_out_channels": (32,) * 4 for part in ("encoder", "decoder")}
    vae = random_model("AutoencoderKLMochi", 2, layers_per_block=(1,) * 5, **sizes)
    config = {"in_channels": 12, "out_channels": 12, "text_embed_dim": T5_WIDTH, "max_sequence_length": 16}
    return tiny_pipe(cls, "mochi", config=config, vae=vae, **encoders.t5())


def cogvideox(cls: str, model: str = "cogvideox", **config: Any) -> DiffusionPipeline:
    config |= {"text_embed_dim": T5_WIDTH, "max_text_seq_length": 13}
    if "Image" in cls or "Control" in cls:
        config["in_channels"] = 8
    vae, scheduler = kl_vae("AutoencoderKLCogVideoX"), CogVideoXDDIMScheduler()
    return tiny_pipe(cls, model, config=config, vae=vae, scheduler=scheduler, **encoders.t5())


# -- Wan, SkyReels.


def wan_vae_16() -> nn.Module:
    """Return a VAE with the 16 latent channels of Wan and their statistics."""
    return random_model("AutoencoderKLWan", 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1)


def wan(
    cls: str, model: str = "wan", *, two: bool = False, expand_timesteps: bool = False, **config: Any
) -> DiffusionPipeline:
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
        parts |= {"image_encoder": encoders.clip_vision(), "image_processor": encoders.clip_images()}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return tiny_pipe(cls, model, config=config, vae=wan_vae_16(), scheduler=scheduler, **encoders.umt5(), **parts)


def wan_animate(cls: str) -> DiffusionPipeline:
    channels = dict.fromkeys(("4", "8", "16"), 4)
    sizes = {"latent_channels": 16, "motion_encoder_channel_sizes": channels, "motion_encoder_size": 16}
    return wan(cls, "wan animate", in_channels=36, **sizes)


# -- LTX-Video, Helios.


def ltx(cls: str, **components: Any) -> DiffusionPipeline:
    sizes = {f"{part}block_out_channels": (8,) * 4 for part in ("", "decoder_")}
    sizes |= {f"{part}layers_per_block": (1,) * 5 for part in ("", "decoder_")}
    vae = random_model("AutoencoderKLLTXVideo", 2, latent_channels=8, **sizes)
    return tiny_pipe(cls, "ltx", config={"caption_channels": T5_WIDTH}, vae=vae, **encoders.t5(), **components)


def ltx2(cls: str, **config: Any) -> DiffusionPipeline:
    sizes: dict[str, Any] = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8, 16, 32)}
    sizes |= {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    sound = {"base_channels": 4, "ch_mult": (1, 1, 1), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 8}
    upsampling = {"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    convolutions = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    connector = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1, "num_learnable_registers": 13}
    connectors = LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=1 + encoders.DECODER["num_hidden_layers"],
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in connector.items()},
    )
    return tiny_pipe(
        cls,
        "ltx2",
        config={"audio_in_channels": 4, "audio_out_channels": 4, **config},
        vae=random_model("AutoencoderKLLTX2Video", 2, latent_channels=8, **sizes, **ratios),
        audio_vae=random_model("AutoencoderKLLTX2Audio", 9, **sound),
        vocoder=fill(LTX2Vocoder(in_channels=16, hidden_channels=8, **upsampling, **convolutions), seed=10),
        connectors=fill(connectors, seed=12),
        **encoders.decoder("Gemma3TextModel", head_dim=32),
    )


def helios(cls: str, **schedule: Any) -> DiffusionPipeline:
    config = {"in_channels": 16, "out_channels": 16}
    scheduler = diffusers.HeliosScheduler(**schedule)
    return tiny_pipe(cls, "helios", config=config, vae=wan_vae_16(), scheduler=scheduler, **encoders.umt5())


_SHORT_TEXT = {"max_sequence_length": 13}
_TEXT = {**VIDEO, **_SHORT_TEXT}
_EMBEDDINGS = options.instead_of_text(13, TEXT_WIDTH)
# With an image context the model takes the last 512 tokens of its context for text.
_CONTEXT = options.instead_of_text(512, TEXT_WIDTH)
_ROTARY = {"model": "cogvideox, rotary"}
_COGVIDEOX15 = {**_ROTARY, "patch_size_t": 2, "patch_bias": False}
_TEMPLATE = hunyuan_image.DEFAULT_PROMPT_TEMPLATE
_IMAGE_TOKENS = {"image_emb_end": _TEMPLATE["image_emb_start"] + 4, "image_emb_len": 4}
_LLAVA = {**_TEXT, "prompt_template": {**_TEMPLATE, **_IMAGE_TOKENS}}
_IMAGE_CONTEXT = {"in_channels": 36, "image_dim": IMAGE_WIDTH, "added_kv_proj_dim": WIDTH}
_SKYREELS = {"model": "skyreels v2", "inject_sample_info": False}
_WINDOWS = {"overlap_history": 5, "base_num_frames": 9}
# There are 3 × 3 × 5 video tokens of 32 × 32 pixels in 8 frames.
_LTX_SIZE = {"height": 96, "width": 160, "num_frames": 17, **_SHORT_TEXT}
_LTX_IMAGE, _LTX_VIDEO = options.random_image(96, 160), options.random_video(9, 96, 160)
_LTX_LONG = {"num_frames": 25, "prompt": "a red circle|a green square", "guidance_scale": 3.0, "cond_image": _LTX_IMAGE}
_LTX2_CONDITIONS = [LTX2VideoCondition(_LTX_IMAGE, crf=0), LTX2VideoCondition(_LTX_VIDEO, index=8, strength=0.8)]
_HELIOS = {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1], **_EMBEDDINGS}

_from_image = partial(TinyPipeline, image=IMAGE)
_hunyuan_image = partial(_from_image, hunyuan_video_image, "HunyuanVideoImageToVideoPipeline", _LLAVA)
_cogvideox = partial(TinyPipeline, cogvideox, **SIZE, **_SHORT_TEXT)
_wan = partial(TinyPipeline, wan)
_wan_image = partial(_from_image, wan, "WanImageToVideoPipeline", VIDEO)
_wan_animate = partial(_from_image, wan_animate, "WanAnimatePipeline", SIZE, _CONTEXT, segment_frame_length=9)
_ltx = partial(TinyPipeline, ltx, **_LTX_SIZE)
_ltx2 = partial(TinyPipeline, ltx2, **_LTX_SIZE, frame_rate=25.0)
_ltx2_guided = partial(_ltx2, spatio_temporal_guidance_blocks=[1])

VIDEO_PIPELINES: dict[str, TinyPipeline] = {
    # There are 3 × 3 × 5 video tokens.
    "hunyuan": TinyPipeline(hunyuan_video, "HunyuanVideoPipeline", _TEXT),
    "mochi": TinyPipeline(mochi, "MochiPipeline", VIDEO, num_frames=13, max_sequence_length=16),
    "cogvideox": _cogvideox("CogVideoXPipeline", VIDEO),
    "cogvideox, rotary": _cogvideox("CogVideoXPipeline", VIDEO, parts=_ROTARY),
    "cogvideox 1.5": _cogvideox("CogVideoXPipeline", VIDEO, parts=_COGVIDEOX15),
    "cogvideox, image": _cogvideox("CogVideoXImageToVideoPipeline", VIDEO, image=IMAGE, parts=_ROTARY),
    "cogvideox 1.5, image": _cogvideox(
        "CogVideoXImageToVideoPipeline", VIDEO, image=IMAGE, parts={**_COGVIDEOX15, "ofs_embed_dim": 32}
    ),
    "cogvideox, video": _cogvideox("CogVideoXVideoToVideoPipeline", video=FRAMES, strength=0.9),
    "cogvideox, control": _cogvideox("CogVideoXFunControlPipeline", control_video=FRAMES),
    "wan": _wan("WanPipeline", _TEXT),
    "wan 2.2": _wan("WanPipeline", _TEXT, parts={"two": True}),
    "wan, a time step for each token": _wan("WanPipeline", _TEXT, parts={"expand_timesteps": True}),
    "wan, image": _wan_image(_CONTEXT, parts=_IMAGE_CONTEXT),
    "wan, first and last image": _wan_image(
        {**_CONTEXT, "last_image": options.random_image(48, 80, seed=3)},
        parts={**_IMAGE_CONTEXT, "pos_embed_seq_len": 2 * options.IMAGE_TOKENS},
    ),
    "wan 2.2, image": _wan_image(_EMBEDDINGS, parts={"two": True, "in_channels": 36}),
    "wan, image by time steps": _wan_image(_EMBEDDINGS, parts={"expand_timesteps": True}),
    "chronoedit": _from_image(
        wan, "ChronoEditPipeline", VIDEO, _CONTEXT, parts={"model": "chronoedit", **_IMAGE_CONTEXT}
    ),
    "lucy": _wan("LucyEditPipeline", VIDEO, _EMBEDDINGS, video=FRAMES, parts={"in_channels": 32}),
    "wan, video": _wan("WanVideoToVideoPipeline", SIZE, _EMBEDDINGS, video=FRAMES, strength=0.9),
    "wan vace": _wan(
        "WanVACEPipeline", VIDEO, _EMBEDDINGS, video=FRAMES, parts={"model": "wan vace", "vace_in_channels": 96}
    ),
    # There are two segments. The end of the first one is the condition of the second.
    "wan animate": _wan_animate(
        pose_video=options.random_video(12, 48, 80), face_video=options.random_video(12, 16, 16), guidance_scale=3.0
    ),
    "wan animate, replacing": _wan_animate(
        dict.fromkeys(("pose_video", "background_video", "mask_video"), FRAMES),
        face_video=options.random_video(9, 16, 16),
        mode="replace",
    ),
    "skyreels v2": _wan("SkyReelsV2Pipeline", VIDEO, _EMBEDDINGS, parts=_SKYREELS),
    "skyreels v2, image": _from_image(
        wan, "SkyReelsV2ImageToVideoPipeline", VIDEO, _CONTEXT, parts=_SKYREELS | _IMAGE_CONTEXT
    ),
    # Each frame has its own noise level. The pipeline denoises them one after another, in windows.
    "skyreels v2, forcing": _wan(
        "SkyReelsV2DiffusionForcingPipeline",
        {**VIDEO, **_EMBEDDINGS, **_WINDOWS, "num_frames": 13},
        parts={"model": "skyreels v2", "inject_sample_info": True},
    ),
    "skyreels v2, forcing from an image": _wan(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        {**VIDEO, **_EMBEDDINGS, "image": IMAGE, "ar_step": 1, "causal_block_size": 3},
        parts={**_SKYREELS, "num_frame_per_block": 3},
    ),
    "skyreels v2, forcing from a video": _wan(
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        {**VIDEO, **_EMBEDDINGS, **_WINDOWS, "num_frames": 17, "video": FRAMES},
        parts=_SKYREELS,
    ),
    # The model gets noise, the given image, and its mask.
    "hunyuan, image": _hunyuan_image(parts={"condition": "latent_concat", "in_channels": 9}),
    # The tokens of the given image replace the first ones of the noise.
    "hunyuan, image by token replacement": _hunyuan_image(parts={"condition": "token_replace", "in_channels": 4}),
    "skyreels, image": _from_image(
        hunyuan_video, "HunyuanSkyreelsImageToVideoPipeline", _TEXT, parts={"config": {"in_channels": 8}}
    ),
    "framepack": _from_image(framepack, "HunyuanVideoFramepackPipeline", _TEXT, latent_window_size=3),
    "hunyuan 1.5": TinyPipeline(
        hunyuan_video_15, "HunyuanVideo15Pipeline", VIDEO, prompt=f'{PROMPT}, with the text "red"'
    ),
    "hunyuan 1.5, image": _from_image(hunyuan_video_15, "HunyuanVideo15ImageToVideoPipeline", num_frames=9),
    "ltx": _ltx("LTXPipeline"),
    "ltx, image": _ltx("LTXImageToVideoPipeline", image=_LTX_IMAGE),
    "ltx, condition": _ltx("LTXConditionPipeline", image=_LTX_IMAGE),
    "ltx, long": TinyPipeline(
        ltx,
        "LTXI2VLongMultiPromptPipeline",
        {**_LTX_SIZE, **_LTX_LONG, "temporal_tile_size": 16, "temporal_overlap": 8},
        parts={"scheduler": diffusers.LTXEulerAncestralRFScheduler},
    ),
    "ltx2": _ltx2_guided("LTX2Pipeline"),
    "ltx2, image": _ltx2_guided("LTX2ImageToVideoPipeline", image=_LTX_IMAGE, image_crf=0),
    "ltx2, condition": _ltx2_guided("LTX2ConditionPipeline", conditions=_LTX2_CONDITIONS),
    "ltx2, in context": _ltx2_guided(
        "LTX2InContextPipeline",
        conditions=_LTX2_CONDITIONS[:1],
        reference_conditions=LTX2ReferenceCondition(_LTX_VIDEO),
        conditioning_attention_strength=0.7,
    ),
    "ltx2, dfr": _ltx2(
        "LTX2DFRPipeline",
        sigmas=[1.0, 0.8, 0.4],
        parts={"use_keyframes_abs_pos_embedding": True},
        without=("num_inference_steps",),
    ),
    "ltx2, hdr": _ltx2("LTX2HDRPipeline", reference_conditions=LTX2HDRReferenceCondition(_LTX_VIDEO)),
    # There are two chunks of frames. The first one is the history of the second.
    "helios": TinyPipeline(helios, "HeliosPipeline", VIDEO, _HELIOS, parts={"stages": 1, "stage_range": [0, 1]}),
    "helios, pyramid": TinyPipeline(
        helios,
        "HeliosPyramidPipeline",
        {**_HELIOS, **MEDIUM, "num_frames": 9, "pyramid_num_inference_steps_list": [2, 2]},
        parts={"stages": 2, "stage_range": [0, 0.5, 1], "gamma": 0.3},
        without=("num_inference_steps",),
    ),
}
