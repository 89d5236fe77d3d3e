"""Tiny transformers of video, and of sound, whose lengths follow from frames × height × width."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor

from zoo.tiny import base
from zoo.tiny.base import (
    HEAD_DIM,
    IMAGE_WIDTH,
    TEXT_WIDTH,
    WIDTH,
    TinyModel,
    grid,
    inputs,
    noise,
    num_patches,
    residuals,
    rotary,
    samples,
    valid,
    video,
)

# -- Kandinsky: channels last.

_MASK = valid((9, 4), dtype=torch.int64)


def channels_last(frames: int, height: int, width: int) -> Tensor:
    return noise(2, frames, height, width, 4)


def kandinsky_positions(frames: int, height: int, width: int) -> list[Tensor]:
    return [torch.arange(size) for size in (frames, height // 2, width // 2)]


def kandinsky6_sr_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return inputs whose rows and columns are multiples of 8."""
    size = 8 * -(-height // 8), 8 * -(-width // 8)
    return {"hidden_states": noise(2, frames, *size, 9), "timestep": torch.tensor([600.0, 600.0])}


kandinsky_inputs = partial(inputs, channels_last, 600.0, pooled_projections=noise(2, IMAGE_WIDTH))

# -- Cosmos.

cosmos_inputs = partial(inputs, video, fps=16)


def cosmos_timestep(frames: int, height: int, width: int) -> Tensor:
    """Return a time step for each frame. The first frame is given."""
    timestep = torch.full((2, 1, frames, 1, 1), 0.6)
    timestep[:, :, 0] = 0.1
    return timestep


# Resizing a mask of padding needs torchvision.
COSMOS = {"mlp_ratio": 2.0, "max_size": (16, 32, 32), "concat_padding_mask": False}


def cosmos3_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return text, then video. The first of several frames is given."""
    shape = (frames, height // 2, width // 2)
    text, patches = 7, num_patches(frames, height, width)
    noisy = torch.arange(1 if frames > 1 else 0, frames)
    positions = torch.arange(patches).view(frames, -1)[noisy].flatten() + text
    return {
        "input_ids": torch.arange(text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(text)[:, None].expand(-1, 3), grid(*shape).long() + text]).T,
        "und_len": text,
        "sequence_length": text + patches,
        "vision_tokens": [noise(1, 4, frames, height, width)],
        "vision_token_shapes": [shape],
        "vision_sequence_indexes": torch.arange(text, text + patches),
        "vision_mse_loss_indexes": positions,
        "vision_timesteps": torch.full((len(positions),), 600.0),
        "vision_noisy_frame_indexes": [noisy],
    }


# -- AnyFlow.


def anyflow_timestep(frames: int, height: int, width: int) -> Tensor:
    return torch.linspace(900, 500, frames).expand(2, -1)


anyflow_inputs = partial(
    inputs, base.video_by_frame, anyflow_timestep, r_timestep=lambda *sizes: anyflow_timestep(*sizes) - 100.0
)

# -- Wan Animate 2.


def wan_animate_2_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return the inputs of the reference pass of one sample, which stores keys for the following steps."""
    return {
        "hidden_states": [noise(4, frames, height, width)],
        "condition_latents": [noise(4, frames, height, width, seed=1)],
        "timestep": torch.tensor([600.0]),
        "encoder_hidden_states": [noise(9, TEXT_WIDTH)],
        "encoder_hidden_states_image": noise(1, 5, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": num_patches(frames, height, width),
        "offset_grid_sizes": torch.tensor([[frames, height // 2, width // 2]]),
    }


# Three axes share the channels of a head evenly.
ALLEGRO = {"attention_head_dim": 3 * HEAD_DIM, "cross_attention_dim": 9 * HEAD_DIM}


def allegro_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return four times the tokens of other models, because this model fails on a single token."""
    height, width = 4 * height, 2 * width
    shape = (frames, height // 2, width // 2)
    angles = [noise(size, ALLEGRO["attention_head_dim"] // 3) for size in shape]
    mask = torch.ones(2, frames, height, width)
    mask[1, :, : height // 2] = 0.0
    positions = tuple(axis[None] for axis in grid(*shape).long().T)
    rotations = (tuple((a.cos(), a.sin()) for a in angles), positions)
    masks = {"attention_mask": mask, "encoder_attention_mask": _MASK}
    return samples(video(frames, height, width), **masks, image_rotary_emb=rotations)


def sana_given_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return twice as many frames. A time step for each token says that the first ones are given."""
    timestep = torch.full((2, 1, 2 * frames, height // 2, width // 2), 600.0)
    timestep[:, :, 0] = 0
    return samples(video(2 * frames, height, width), timestep, encoder_attention_mask=_MASK)


motif_inputs = partial(inputs, lambda *sizes: noise(2, 6, *sizes), encoder_attention_mask=valid((9, 4)))
MOTIF = {"in_channels": 6, "num_single_layers": 3, "mlp_ratio": 2.0}

_TEXT_AND_IMAGE = (noise(2, 9, TEXT_WIDTH), noise(2, 5, IMAGE_WIDTH))
_FACE = {"id_cond": noise(2, IMAGE_WIDTH), "id_vit_hidden": [noise(2, 5, IMAGE_WIDTH, seed=i) for i in range(2)]}
_cosmos = partial(TinyModel, "CosmosTransformer3DModel", **COSMOS)
_kandinsky6 = partial(TinyModel, "Kandinsky6Transformer3DModel", visual_cond=False)
_sana_video = partial(TinyModel, "SanaVideoTransformer3DModel", mlp_ratio=2.0, rope_max_seq_len=1024)
_motif = partial(TinyModel, "MotifVideoTransformer3DModel", **MOTIF)

VIDEO_MODELS = {
    "kandinsky 5": TinyModel(
        "Kandinsky5Transformer3DModel",
        kandinsky_inputs(visual_rope_pos=kandinsky_positions, text_rope_pos=torch.arange(9)),
    ),
    "cosmos": _cosmos(cosmos_inputs(timestep=0.6)),
    "cosmos, given frames": _cosmos(
        cosmos_inputs(cosmos_timestep, condition_mask=lambda *sizes: noise(2, 1, *sizes, seed=1)), in_channels=5
    ),
    # There are text, tokens of an image, and residuals of a ControlNet.
    "cosmos 2.5, transfer": _cosmos(
        cosmos_inputs(0.6, encoder_hidden_states=_TEXT_AND_IMAGE, block_controlnet_hidden_states=residuals(2, WIDTH)),
        {"img_context_dim_in": IMAGE_WIDTH, "img_context_num_tokens": 5, "img_context_dim_out": WIDTH},
        {"extra_pos_embed_type": None, "controlnet_block_every_n": 1},
    ),
    "cosmos 3": TinyModel(
        "Cosmos3OmniTransformer",
        cosmos3_inputs,
        {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "rope_axes_dim": (4, 6, 6)},
    ),
    "easyanimate": TinyModel(
        "EasyAnimateTransformer3DModel",
        inputs(video, encoder_hidden_states_t5=noise(2, 5, IMAGE_WIDTH)),
        {"patch_size": 2, "num_layers": 3},
    ),
    "consisid": TinyModel(
        "ConsisIDTransformer3DModel",
        inputs(base.video_by_frame, image_rotary_emb=rotary, **_FACE),
        {"sample_width": 10, "sample_height": 6, "max_text_seq_length": 9, "is_train_face": True},
        use_rotary_positional_embeddings=True,
    ),
    "anyflow": TinyModel("AnyFlowTransformer3DModel", anyflow_inputs()),
    # There is a chunk for each frame. Chunks before the last two are compressed.
    "anyflow far": TinyModel(
        "AnyFlowFARTransformer3DModel",
        anyflow_inputs(chunk_partition=lambda frames, height, width: [1] * frames),
        {"num_attention_heads": 4},
    ),
    "wan animate 2": TinyModel(
        "WanAnimate2Transformer3DModel", wan_animate_2_inputs, text_len=12, num_heads=4, dim=128
    ),
    "kandinsky 6 sr": TinyModel(
        "Kandinsky6SRTransformer3DModel",
        kandinsky6_sr_inputs,
        {"model_dim": 128, "nabla_threshold": 0.3, "nabla_window": (1, 1, 1)},
    ),
    "allegro": TinyModel("AllegroTransformer3DModel", allegro_inputs, ALLEGRO),
    "kandinsky 6": _kandinsky6(kandinsky_inputs()),
    "kandinsky 6, with sound": _kandinsky6(kandinsky_inputs(audio_hidden_states=noise(2, 7, 8)), ca_rope=True),
    "sana video": _sana_video(inputs(video, encoder_attention_mask=_MASK)),
    "sana video, image": _sana_video(sana_given_inputs),
    "motif": _motif(motif_inputs(), num_decoder_layers=2, image_embed_dim=None),
    "motif, image": _motif(
        motif_inputs(image_embeds=noise(2, 5, IMAGE_WIDTH)),
        dict.fromkeys(("enable_text_cross_attention_dual", "enable_text_cross_attention_single"), True),
        num_decoder_layers=1,
    ),
    # There are always three frames, because the model has positions for them. Each is as high as all frames together.
    "latte": TinyModel(
        "LatteTransformer3DModel",
        inputs(lambda frames, height, width: noise(2, 4, 3, frames * height, width)),
        {"out_channels": 8, "sample_size": 8, "patch_size": 2, "attention_bias": True},
        {"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6},
        activation_fn="gelu-approximate",
    ),
}


def ace_step_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    length = frames * height * width // 2
    latents = {"hidden_states": noise(2, length, 4), "context_latents": noise(2, length, 8, seed=1)}
    return samples(timestep=0.6, timestep_r=torch.tensor([0.4, 0.4]), **latents)


def stable_audio_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    length = frames * height * width // 4
    angles = noise(length + 1, HEAD_DIM // 2)
    masks = {"attention_mask": _half(length), "encoder_attention_mask": valid((9, 4))} if masked else {}
    rotations = angles.cos(), angles.sin()
    latents, states = noise(2, 4, length), noise(2, 1, IMAGE_WIDTH)
    return samples(latents, 0.6, global_hidden_states=states, rotary_embedding=rotations, **masks)


def _half(length: int) -> Tensor:
    """Return a mask in which half of the second sample is valid."""
    return valid((length, (length + 1) // 2), length)


def stable_audio3_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return a short sequence, because over a long one the difference of attention hardly depends on other tokens."""
    latents = noise(2, 4, max(frames * height * width // 12, 1))
    return samples(latents, 0.6, global_hidden_states=noise(2, IMAGE_WIDTH), encoder_attention_mask=_MASK)


def longcat_audio_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    length = frames * height * width // 4
    latents = {"hidden_states": noise(2, length, 4), "latent_cond": noise(2, length, 4, seed=1)}
    masks = {"encoder_attention_mask": valid((9, 4)), "attention_mask": _half(length) if masked else None}
    return samples(timestep=0.6, **latents, **masks)


def minimax_music_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    length = frames * height * width // 4
    return samples(noise(2, 4, length), 0.6, encoder_hidden_states=noise(2, length, TEXT_WIDTH))


STABLE_AUDIO = {"sample_size": 1024, "num_attention_heads": 4, "cross_attention_dim": 2 * HEAD_DIM}
_longcat = partial(TinyModel, "LongCatAudioDiTTransformer")

AUDIO_MODELS = {
    "ace-step": TinyModel("AceStepTransformer1DModel", ace_step_inputs, num_attention_heads=4, in_channels=12),
    "stable audio": TinyModel("StableAudioDiTModel", stable_audio_inputs, STABLE_AUDIO),
    "stable audio, masked": TinyModel("StableAudioDiTModel", partial(stable_audio_inputs, masked=True), STABLE_AUDIO),
    "stable audio 3": TinyModel("StableAudio3DiTModel", stable_audio3_inputs, local_add_cond_dim=5),
    "longcat-audio": _longcat(longcat_audio_inputs),
    "longcat-audio, masked": _longcat(partial(longcat_audio_inputs, masked=True)),
    "minimax-music": TinyModel("MiniMaxMusic3Transformer1DModel", minimax_music_inputs, condition_dim=TEXT_WIDTH),
}
