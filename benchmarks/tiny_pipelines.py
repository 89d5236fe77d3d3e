"""Tiny diffusers pipelines of every video family, and of the picture families beside FLUX.1: random weights, nothing to load.

Each is whole: text encoders and tokenizers (but FLUX.2 [dev]), VAE, scheduler. What they draw means nothing, but every part of the input matters
to it, so it shows what parallel runs get wrong.
"""

from __future__ import annotations

import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import (
    DEFAULT_PROMPT_TEMPLATE as LLAVA_TEMPLATE,
)

from benchmarks.tiny_films import (
    cogvideox,
    framepack,
    helios,
    hunyuan_video,
    hunyuan_video_15,
    hunyuan_video_15_image,
    hunyuan_video_image,
    hunyuan_video_skyreels,
    ltx,
    ltx2,
    mochi,
    wan,
)
from benchmarks.tiny_parts import IMAGE_WIDTH, PROMPT, TEXT_WIDTH, TinyPipeline, embeddings, film, picture
from benchmarks.tiny_pictures import auraflow, flux2, lumina2, pixart, qwen_controlnet, qwen_image, stable_diffusion_3

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
    "skyreels, image": TinyPipeline(hunyuan_video_skyreels, {**_SIZE, **_TEXT, **_IMAGE}),
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
