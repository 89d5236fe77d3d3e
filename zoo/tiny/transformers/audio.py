"""Tiny transformers of sound. Their lengths follow from frames × height × width."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zoo.tiny.base import TinyModel, inputs, noise, valid


def ace_step_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    length = frames * height * width // 2
    make = inputs(
        noise(2, length, 4), 0.6, timestep_r=torch.tensor([0.4, 0.4]), context_latents=noise(2, length, 8, seed=1)
    )
    return make(frames, height, width)


def stable_audio_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    length = frames * height * width // 4
    angles = noise(length + 1, 8)
    masks = {"attention_mask": _half(length), "encoder_attention_mask": valid((9, 4))} if masked else {}
    make = inputs(
        noise(2, 4, length),
        0.6,
        global_hidden_states=noise(2, 1, 20),
        rotary_embedding=(angles.cos(), angles.sin()),
        **masks,
    )
    return make(frames, height, width)


def _half(length: int) -> torch.Tensor:
    """Return a mask in which half of the second sample is valid."""
    return valid((length, (length + 1) // 2), length)


STABLE_AUDIO = {"sample_size": 1024, "num_attention_heads": 4, "cross_attention_dim": 32}


def stable_audio3_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return a short sequence: over a long one the difference that this attention takes hardly depends on
    other tokens.
    """
    latents = noise(2, 4, max(frames * height * width // 12, 1))
    mask = valid((9, 4), dtype=torch.int64)
    return inputs(latents, 0.6, global_hidden_states=noise(2, 20), encoder_attention_mask=mask)(frames, height, width)


def longcat_audio_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    length = frames * height * width // 4
    make = inputs(
        noise(2, length, 4),
        0.6,
        encoder_attention_mask=valid((9, 4)),
        attention_mask=_half(length) if masked else None,
        latent_cond=noise(2, length, 4, seed=1),
    )
    return make(frames, height, width)


def minimax_music_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    length = frames * height * width // 4
    return inputs(noise(2, 4, length), 0.6, encoder_hidden_states=noise(2, length, 24))(frames, height, width)


LONGCAT_AUDIO = {"dit_dim": 48}

AUDIO_MODELS = {
    "ace-step": TinyModel("AceStepTransformer1DModel", ace_step_inputs, num_attention_heads=4, in_channels=12),
    "stable audio": TinyModel("StableAudioDiTModel", stable_audio_inputs, **STABLE_AUDIO),
    "stable audio, masked": TinyModel("StableAudioDiTModel", partial(stable_audio_inputs, masked=True), **STABLE_AUDIO),
    "stable audio 3": TinyModel("StableAudio3DiTModel", stable_audio3_inputs, local_add_cond_dim=5),
    "longcat-audio": TinyModel("LongCatAudioDiTTransformer", longcat_audio_inputs, **LONGCAT_AUDIO),
    "longcat-audio, masked": TinyModel(
        "LongCatAudioDiTTransformer", partial(longcat_audio_inputs, masked=True), **LONGCAT_AUDIO
    ),
    "minimax-music": TinyModel("MiniMaxMusic3Transformer1DModel", minimax_music_inputs, condition_dim=24),
}
