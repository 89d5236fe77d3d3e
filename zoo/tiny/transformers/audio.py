"""Tiny transformers of sound, beside those of `zoo.tiny.transformers.registry`. Their lengths are frames × height ×
width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zoo.tiny.base import TinyModel, noise, valid


def ace_step_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    length = frames * height * width // 2
    return {
        "hidden_states": noise(2, length, 4),
        "timestep": torch.tensor([0.6, 0.6]),
        "timestep_r": torch.tensor([0.4, 0.4]),
        "encoder_hidden_states": noise(2, 9, 24),
        "context_latents": noise(2, length, 8, seed=1),
    }


def stable_audio_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    length = frames * height * width // 4
    angles = noise(length + 1, 8)
    return {
        "hidden_states": noise(2, 4, length),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": noise(2, 9, 24),
        "global_hidden_states": noise(2, 1, 20),
        "rotary_embedding": (angles.cos(), angles.sin()),
        "attention_mask": valid((length, (length + 1) // 2), length) if masked else None,
        "encoder_attention_mask": valid((9, 4), 9) if masked else None,
    }


STABLE_AUDIO: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_attention_heads": 2,
    "cross_attention_dim": 32,
    "time_proj_dim": 16,
    "global_states_input_dim": 20,
    "cross_attention_input_dim": 24,
}


def stable_audio3_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Short, or what its attention takes the difference of would hardly depend on other tokens."""
    return {
        "hidden_states": noise(2, 4, max(frames * height * width // 12, 1)),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": noise(2, 9, 24),
        "global_hidden_states": noise(2, 20),
        "encoder_attention_mask": valid((9, 4), 9, torch.int64),
    }


def longcat_audio_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    length = frames * height * width // 4
    return {
        "hidden_states": noise(2, length, 4),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 4), 9),
        "timestep": torch.tensor([0.6, 0.6]),
        "attention_mask": valid((length, (length + 1) // 2), length) if masked else None,
        "latent_cond": noise(2, length, 4, seed=1),
    }


LONGCAT_AUDIO: dict[str, Any] = {
    "dit_dim": 48,
    "dit_depth": 2,
    "dit_heads": 3,
    "dit_text_dim": 24,
    "latent_dim": 4,
    "ff_mult": 2.0,
}


def minimax_music_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    length = frames * height * width // 4
    return {
        "hidden_states": noise(2, 4, length),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": noise(2, length, 24),
    }


AUDIO_MODELS = {
    "ace-step": TinyModel(
        "AceStepTransformer1DModel",
        ace_step_inputs,
        {
            "hidden_size": 48,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "sliding_window": 3,
            "encoder_hidden_size": 24,
        },
    ),
    "stable audio": TinyModel("StableAudioDiTModel", stable_audio_inputs, STABLE_AUDIO),
    "stable audio, masked": TinyModel("StableAudioDiTModel", partial(stable_audio_inputs, masked=True), STABLE_AUDIO),
    "stable audio 3": TinyModel(
        "StableAudio3DiTModel",
        stable_audio3_inputs,
        {
            "io_channels": 4,
            "embed_dim": 48,
            "depth": 2,
            "num_heads": 3,
            "cond_token_dim": 24,
            "global_cond_dim": 20,
            "local_add_cond_dim": 5,
            "timestep_features_dim": 16,
            "ff_mult": 2.0,
            "num_memory_tokens": 3,
        },
    ),
    "longcat-audio": TinyModel("LongCatAudioDiTTransformer", longcat_audio_inputs, LONGCAT_AUDIO),
    "longcat-audio, masked": TinyModel(
        "LongCatAudioDiTTransformer", partial(longcat_audio_inputs, masked=True), LONGCAT_AUDIO
    ),
    "minimax-music": TinyModel(
        "MiniMaxMusic3Transformer1DModel",
        minimax_music_inputs,
        {
            "in_channels": 4,
            "condition_dim": 24,
            "num_layers": 2,
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "ff_inner_dim": 32,
            "rotary_dim": 8,
            "fourier_embedding_dim": 16,
        },
    ),
}
