"""Tiny pipelines of sound, on the transformers of `benchmarks.tiny_audio_models`: latents of 27 tokens come back."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers import EDMDPMSolverMultistepScheduler
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import nn

from benchmarks.random_weights import fill
from benchmarks.tiny_audio_models import AUDIO_MODELS
from benchmarks.tiny_parts import (
    TEXT_WIDTH,
    TinyPipeline,
    embeddings,
    random_model,
    umt5_and_tokenizer,
    whole_pipe,
)


def _vae(cls: str, **config: Any) -> nn.Module:
    """Of 8 samples of sound for each latent."""
    with warnings.catch_warnings():
        # diffusers' own use of what torch calls deprecated.
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        return random_model(cls, 2, **config)


def stable_audio() -> Any:
    model = AUDIO_MODELS["stable audio"]
    # The projection gives start and end beside each other.
    config = {**model.config, "global_states_input_dim": 2 * TEXT_WIDTH, "sample_size": 27}
    vae = _vae(
        "AutoencoderOobleck",
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
        sampling_rate=16,
    )
    seconds = StableAudioProjectionModel(
        text_encoder_dim=TEXT_WIDTH, conditioning_dim=TEXT_WIDTH, min_value=0, max_value=32
    )
    return whole_pipe(
        "StableAudioPipeline",
        transformer=random_model(model.cls, 1, **config),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        projection_model=fill(seconds, 3),
        scheduler=EDMDPMSolverMultistepScheduler(solver_order=2),
    )


def longcat_audio() -> Any:
    model = AUDIO_MODELS["longcat-audio"]
    vae = _vae(
        "LongCatAudioDiTVae",
        channels=8,
        c_mults=[1, 2],
        strides=[2, 4],
        latent_dim=4,
        encoder_latent_dim=8,
        sample_rate=16,
        downsampling_ratio=8,
    )
    transformer = random_model(model.cls, 1, **model.config)
    return whole_pipe("LongCatAudioDiTPipeline", transformer=transformer, vae=vae, **umt5_and_tokenizer())


AUDIO_PIPELINES: dict[str, TinyPipeline] = {
    "stable audio": TinyPipeline(
        stable_audio,
        {
            **embeddings(9, TEXT_WIDTH),
            "attention_mask": torch.ones(1, 9).long(),
            "negative_attention_mask": torch.ones(1, 9).long(),
        },
    ),
    "longcat-audio": TinyPipeline(longcat_audio, {"audio_duration_s": 13.5, "negative_prompt": "a blue square"}),
}
