"""Tiny transformers of every family, with random parameters, and inputs for one call of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.tiny import base
from zoo.tiny.base import (
    HEAD_DIM,
    IMAGE_WIDTH,
    TEXT_WIDTH,
    WIDTH,
    TinyModel,
    grid,
    image,
    inputs,
    noise,
    residuals,
    rotary,
    samples,
    tokens,
    valid,
    video,
)
from zoo.tiny.transformers.image import GLYPHS, IMAGE_MODELS, STREAM_MODELS
from zoo.tiny.transformers.video import AUDIO_MODELS, VIDEO_MODELS

# -- Wan.

# The attention processor takes the last 512 tokens of the context for text.
_IMAGE_CONTEXT = {
    "encoder_hidden_states": noise(2, 512, TEXT_WIDTH),
    "encoder_hidden_states_image": noise(2, 5, IMAGE_WIDTH),
}


def first_frame_given(frames: int, height: int, width: int) -> Tensor:
    """Return a time step for each token, 0 for those of the first frame."""
    timestep = torch.full((2, frames, base.num_patches(1, height, width)), 600.0)
    timestep[:, 0] = 0
    return timestep.flatten(1)


def animate_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return inputs whose first frame is the given image. Each further frame has four frames of a face."""
    return samples(
        noise(2, 12, frames + 1, height, width),
        pose_hidden_states=noise(2, 4, frames, height, width, seed=1),
        face_pixel_values=noise(2, 3, 4 * frames - 3, 8, 8, seed=2),
        **_IMAGE_CONTEXT,
    )


def skyreels_forcing_inputs(frames: int, height: int, width: int, *, block: int = 1) -> dict[str, Any]:
    """Return a time step for each of ``block`` × as many frames. There is one sample, because diffusers accepts no more
    with ``fps``.
    """
    frames *= block
    both = samples(video(frames, height, width), torch.linspace(900, 500, frames).long().expand(2, -1))
    return {**{name: value[:1] for name, value in both.items()}, "fps": [0], "enable_diffusion_forcing": True}


# -- Models of packed tokens.


def image_shapes(frames: int, height: int, width: int) -> list[list[tuple[int, int, int]]]:
    """Return one image per frame. With zeroed time steps (editing) the first one is generated, and the others are
    given.
    """
    return [[(1, height, width)] * frames] * 2


qwen_inputs = partial(inputs, tokens(16), 0.6, img_shapes=image_shapes)
_GUIDANCE = {"guidance": torch.tensor([3.5, 3.5])}


def qwen_masked_inputs(*size: int, text: int = 9) -> dict[str, Any]:
    return qwen_inputs(encoder_hidden_states_mask=valid((text, text // 2), text, torch.int64))(*size, text=text)


def flux_inputs(frames: int, height: int, width: int, *, text: int = 9) -> dict[str, Any]:
    """Return an image as high as all frames together."""
    positions = {"img_ids": grid(1, frames * height, width), "txt_ids": torch.zeros(text, 3)}
    values = {"pooled_projections": noise(2, IMAGE_WIDTH), **_GUIDANCE, **positions}
    return samples(tokens(16)(frames, height, width), 0.6, text=text, **values)


def flux2_inputs(*size: int, text: int = 9) -> dict[str, Any]:
    positions = {"img_ids": grid(*size, 1), "txt_ids": grid(1, 1, 1, text)}
    both = {name: ids.expand(2, -1, -1) for name, ids in positions.items()}
    return samples(tokens(16)(*size), 0.6, text=text, **_GUIDANCE, **both)


# -- LTX-Video.


def ltx_timestep(frames: int, height: int, width: int) -> Tensor:
    """Return a time step for each token, 0 for those of the first frame."""
    timestep = torch.full((2, frames, height * width), 600.0)
    timestep[:, 0] = 0
    return timestep.flatten(1)


_MASK = valid((9, 4), dtype=torch.int64)
_SIZES = {"num_frames": lambda f, h, w: f, "height": lambda f, h, w: h, "width": lambda f, h, w: w}
ltx_inputs = partial(inputs, tokens(8), encoder_attention_mask=_MASK, **_SIZES)
_SOUND = {
    "audio_hidden_states": noise(2, 7, 8, seed=1),
    "audio_encoder_hidden_states": noise(2, 9, TEXT_WIDTH, seed=1),
    "audio_timestep": torch.tensor([600.0, 600.0]),
}
ltx2_inputs = partial(ltx_inputs, ltx_timestep, **_SOUND, audio_encoder_attention_mask=_MASK, audio_num_frames=7)
LTX = {"in_channels": 8, "out_channels": 8}
# Video is wider than sound.
LTX2 = {"attention_head_dim": 2 * HEAD_DIM, "cross_attention_dim": 2 * WIDTH}


# -- Video models that see earlier frames.


def _past(frames: int, height: int, width: int) -> Tensor:
    return noise(2, 4, frames, height, width, seed=frames)


def history_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    values = {"indices_hidden_states": torch.arange(7, 7 + frames)[None].expand(2, -1)}
    for name, first, number in (("long", 0, 4), ("mid", 4, 2), ("short", 6, 1)):
        values[f"indices_latents_history_{name}"] = torch.arange(first, first + number)[None].expand(2, -1)
        values[f"latents_history_{name}"] = _past(number, height, width)
    return samples(video(frames, height, width), **values)


def framepack_inputs(frames: int, height: int, width: int, *, batch: int = 2) -> dict[str, Any]:
    values = hunyuan_inputs(frames, height, width) | {
        "image_embeds": noise(2, 3, IMAGE_WIDTH),
        "indices_latents": torch.arange(7, 7 + frames),
        "latents_clean": _past(2, height, width),
        "indices_latents_clean": torch.arange(5, 7),
        "latents_history_2x": _past(2, height, width),
        "indices_latents_history_2x": torch.arange(3, 5),
        "latents_history_4x": _past(4, height, width),
        "indices_latents_history_4x": torch.arange(4),
    }
    return {name: value if name.startswith("indices") else value[-batch:] for name, value in values.items()}


def h3_inputs(frames: int, height: int, width: int, *, text: int = 9) -> dict[str, Any]:
    """Return text, video and sound in one packed sequence."""
    patches, sound = frames * height * width, 7
    total = patches + text + sound
    tags = torch.tensor([1] * text + [0] * patches + [2] * sound)
    positions = [torch.zeros(text, 3), grid(frames, height, width), torch.arange(sound)[:, None].expand(-1, 3)]
    return {
        "hidden_states": noise(1, patches, 16),
        "audio_hidden_states": noise(1, sound, 8),
        "encoder_hidden_states": noise(1, text, TEXT_WIDTH),
        "timestep": torch.tensor([0.6, 0.0]),
        "timestep_indices": (torch.arange(total) < text + 2).long(),
        "token_tags": tags,
        "position_ids": torch.cat(positions),
        "video_indices": (tags == 0).nonzero()[:, 0],
        "audio_indices": (tags == 2).nonzero()[:, 0],
        "text_indices": (tags == 1).nonzero()[:, 0],
    }


# -- HunyuanVideo.

_FEW_VALID = {"encoder_attention_mask": valid((9, 2), dtype=torch.int64)}
hunyuan_inputs = inputs(
    video, pooled_projections=noise(2, IMAGE_WIDTH), guidance=torch.tensor([6000.0, 6000.0]), **_FEW_VALID
)
hunyuan15_inputs = partial(inputs, video, 600.0, **GLYPHS, **_FEW_VALID)
HUNYUAN = {"guidance_embeds": True}
FRAMEPACK = {**HUNYUAN, "has_image_proj": True, "has_clean_x_embedder": True}


# -- Further models.

COGVIDEOX = {"sample_width": 10, "sample_height": 6, "sample_frames": 9, "max_text_seq_length": 9, "patch_size_t": None}
ROTARY = {"use_rotary_positional_embeddings": True}


def cogvideox15_rotary(frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for tokens of two frames each."""
    return rotary(frames // 2, height, width)


sd3_inputs = partial(inputs, image, 600.0, pooled_projections=noise(2, IMAGE_WIDTH))


def hidream_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": image(frames, height, width),
        "timesteps": torch.tensor([600.0, 600.0]),
        "encoder_hidden_states_t5": noise(2, 5, TEXT_WIDTH),
        "encoder_hidden_states_llama3": noise(4, 2, 9, IMAGE_WIDTH),
        "pooled_embeds": noise(2, IMAGE_WIDTH),
    }


# torch.compile(fullgraph=True) does not capture these classes in their unmodified form either.
NO_WHOLE_GRAPH = {
    "BriaFibo2Transformer2DModel": "it asks how long its texts are",
    "HunyuanVideo15Transformer3DModel": "it asks a tensor whether an image was given",
    "Lumina2Transformer2DModel": "it asks how long its texts are",
    "HiDreamImageTransformer2DModel": "it asks which experts are taken",
    "HunyuanImageTransformer2DModel": "it orders the tokens of two texts by which are valid",
    "OmniGenTransformer2DModel": "it asks a tensor",
    "QwenImage21Transformer2DModel": "it asks which tokens are of which image",
    "StableAudioDiTModel": "it warns at each call",
    "WanAnimate2Transformer3DModel": "it asks a tensor for the size of its grid",
    "ZImageTransformer2DModel": "it enters a device's context",
}

# The default run of the tests runs each of these on one mesh only.
SHELF = {**IMAGE_MODELS, **STREAM_MODELS, **VIDEO_MODELS, **AUDIO_MODELS}

_wan = partial(TinyModel, "WanTransformer3DModel")
_skyreels = partial(TinyModel, "SkyReelsV2Transformer3DModel")
_qwen = partial(TinyModel, "QwenImageTransformer2DModel", in_channels=16)
_ltx = partial(TinyModel, "LTXVideoTransformer3DModel", **LTX)
_ltx2 = partial(TinyModel, "LTX2VideoTransformer3DModel", **LTX, **LTX2)
_helios = partial(TinyModel, "HeliosTransformer3DModel", history_inputs, is_amplify_history=True)
_hunyuan = partial(TinyModel, "HunyuanVideoTransformer3DModel", hunyuan_inputs, **HUNYUAN)
_framepack = partial(TinyModel, "HunyuanVideoFramepackTransformer3DModel", **FRAMEPACK)
_hunyuan15 = partial(TinyModel, "HunyuanVideo15Transformer3DModel")
_cogvideox = partial(TinyModel, "CogVideoXTransformer3DModel", **COGVIDEOX)
_sd3 = partial(TinyModel, "SD3Transformer2DModel", num_layers=3, sample_size=32, pos_embed_max_size=32)
_RESOLUTION = {"resolution": torch.full((2, 2), 96.0), "aspect_ratio": torch.full((2, 1), 1.5)}
_WAN_IMAGE = {"image_dim": IMAGE_WIDTH, "added_kv_proj_dim": WIDTH}

MODELS = {
    "wan": _wan(inputs(video)),
    "wan, image context": _wan(inputs(video, **_IMAGE_CONTEXT), **_WAN_IMAGE),
    "wan, a time step for each token": _wan(inputs(video, first_frame_given)),
    "wan vace": TinyModel(
        "WanVACETransformer3DModel",
        inputs(
            video,
            control_hidden_states=lambda *size: noise(2, 6, *size, seed=1),
            control_hidden_states_scale=torch.tensor([1.0, 0.5]),
        ),
        {"vace_layers": [0, 1], "vace_in_channels": 6},
    ),
    "wan animate": TinyModel(
        "WanAnimateTransformer3DModel",
        animate_inputs,
        {**_WAN_IMAGE, "in_channels": 12},
        motion_encoder_channel_sizes={"4": 4, "8": 4},
    ),
    "skyreels v2": _skyreels(inputs(video, fps=[0, 1]), inject_sample_info=True),
    "skyreels v2, a time step for each frame": _skyreels(skyreels_forcing_inputs, inject_sample_info=True),
    "skyreels v2, causal": _skyreels(partial(skyreels_forcing_inputs, block=3), num_frame_per_block=3),
    "chronoedit": TinyModel("ChronoEditTransformer3DModel", inputs(video)),
    "qwen-image": _qwen(qwen_inputs()),
    "qwen-image, masked": _qwen(qwen_masked_inputs),
    "qwen-image, controlnet": _qwen(qwen_inputs(controlnet_block_samples=residuals(2, WIDTH, patch=1))),
    "qwen-image, editing": _qwen(qwen_inputs(), zero_cond_t=True),
    "flux": TinyModel("FluxTransformer2DModel", flux_inputs, in_channels=16, out_channels=16, guidance_embeds=True),
    "flux2": TinyModel(
        "Flux2Transformer2DModel", flux2_inputs, in_channels=16, out_channels=16, axes_dims_rope=(8, 8, 8, 8)
    ),
    "ltx": _ltx(ltx_inputs(600.0)),
    "ltx, a time step for each token": _ltx(ltx_inputs(ltx_timestep)),
    "ltx2": _ltx2(ltx2_inputs()),
    "ltx2, masked, split rope": _ltx2(
        ltx2_inputs(video_self_attention_mask=lambda f, h, w: noise(2, f * h * w, f * h * w).sigmoid()),
        rope_type="split",
    ),
    "helios": _helios(),
    "helios, no guidance of text": _helios(guidance_cross_attn=False),
    "minimax-h3": TinyModel("MiniMaxH3Transformer3DModel", h3_inputs, hidden_size=32, ffn_dim=32),
    "hunyuan": _hunyuan(),
    "hunyuan, image by token replacement": _hunyuan(image_condition_type="token_replace"),
    "framepack": _framepack(framepack_inputs),
    "framepack, one sample": _framepack(partial(framepack_inputs, batch=1)),
    "hunyuan 1.5": _hunyuan15(hunyuan15_inputs(image_embeds=torch.zeros(2, 3, IMAGE_WIDTH))),
    "hunyuan 1.5, image": _hunyuan15(hunyuan15_inputs(image_embeds=noise(2, 3, IMAGE_WIDTH))),
    "mochi": TinyModel(
        "MochiTransformer3DModel",
        inputs(video, encoder_attention_mask=valid((9, 2))),
        # Feed forward layers have 8 / 3 of the width.
        pooled_projection_dim=192,
        max_sequence_length=9,
    ),
    "cogvideox": _cogvideox(inputs(base.video_by_frame)),
    "cogvideox, rotary": _cogvideox(inputs(base.video_by_frame, image_rotary_emb=rotary), **ROTARY),
    "cogvideox 1.5": _cogvideox(
        inputs(base.video_by_frame, image_rotary_emb=cogvideox15_rotary), **ROTARY, patch_size_t=2, patch_bias=False
    ),
    "sd3": _sd3(sd3_inputs()),
    "sd3.5, controlnet": _sd3(
        sd3_inputs(block_controlnet_hidden_states=residuals(2, WIDTH)), dual_attention_layers=(0, 1), qk_norm="rms_norm"
    ),
    "auraflow": TinyModel("AuraFlowTransformer2DModel", inputs(image, 0.6), sample_size=16),
    "pixart": TinyModel(
        "PixArtTransformer2DModel",
        inputs(image, encoder_attention_mask=_MASK, added_cond_kwargs=_RESOLUTION),
        {"out_channels": 8, "sample_size": 128},
    ),
    "lumina2": TinyModel(
        "Lumina2Transformer2DModel",
        inputs(image, 0.6, encoder_attention_mask=valid((9, 4))),
        {"hidden_size": 128, "num_attention_heads": 4, "axes_dim_rope": (8, 12, 12), "axes_lens": (64, 64, 64)},
    ),
    "hidream": TinyModel(
        "HiDreamImageTransformer2DModel",
        hidream_inputs,
        {
            "patch_size": 2,
            "caption_channels": [TEXT_WIDTH, IMAGE_WIDTH],
            "max_resolution": (32, 32),
            "llama_layers": [0, 1, 2, 3],
        },
        force_inference_output=True,
    ),
    **SHELF,
}
