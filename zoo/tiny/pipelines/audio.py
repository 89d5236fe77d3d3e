"""Tiny pipelines of sound. They return latents of 27 tokens, and Stable Audio 3 of ten."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline, EDMDPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder
from torch import nn

from zoo.tiny.base import TEXT_WIDTH, fill
from zoo.tiny.pipelines import encoders
from zoo.tiny.pipelines.components import TinyPipeline, random_model, tiny_pipe
from zoo.tiny.pipelines.options import TEXT, masks, of_both, random_tensor


def _vae(cls: str, **config: Any) -> nn.Module:
    """Return a VAE with 8 samples of sound per latent."""
    with warnings.catch_warnings():
        # diffusers itself calls a function that torch has deprecated.
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        return random_model(cls, 2, **config)


def _oobleck() -> nn.Module:
    encoder = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]}
    return _vae("AutoencoderOobleck", decoder_channels=8, decoder_input_channels=4, sampling_rate=16, **encoder)


def stable_audio(cls: str) -> DiffusionPipeline:
    widths = dict.fromkeys(("text_encoder_dim", "conditioning_dim"), TEXT_WIDTH)
    return tiny_pipe(
        cls,
        "stable audio",
        # The projection concatenates start and end.
        config={"global_states_input_dim": 2 * TEXT_WIDTH, "sample_size": 27},
        vae=_oobleck(),
        projection_model=fill(StableAudioProjectionModel(**widths, min_value=0, max_value=32), 3),
        scheduler=EDMDPMSolverMultistepScheduler(solver_order=2),
    )


def longcat_audio(cls: str) -> DiffusionPipeline:
    sizes = {"channels": 8, "c_mults": [1, 2], "strides": [2, 4], "latent_dim": 4, "encoder_latent_dim": 8}
    vae = _vae("LongCatAudioDiTVae", sample_rate=16, downsampling_ratio=8, **sizes)
    return tiny_pipe(cls, "longcat-audio", vae=vae, **encoders.umt5())


def ace_step(cls: str) -> DiffusionPipeline:
    widths = {"hidden_size": TEXT_WIDTH, "text_hidden_dim": TEXT_WIDTH, "intermediate_size": 32, "timbre_hidden_dim": 4}
    layers = dict.fromkeys(("num_lyric_encoder_hidden_layers", "num_timbre_encoder_hidden_layers"), 1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 3}
    return tiny_pipe(
        cls,
        "ace-step",
        vae=_oobleck(),
        condition_encoder=fill(AceStepConditionEncoder(**widths, **layers, **heads), 3),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        **encoders.decoder("Qwen3Model", head_dim=32),
    )


def stable_audio3(cls: str) -> DiffusionPipeline:
    encoder = {"channels": 8, "c_mults": (2,), "strides": (2,), "transformer_depths": (1,)}
    sizes = {"patch_size": 2, "latent_dim": 4, "dim_heads": 8, "ff_mult": 1, "sampling_rate": 16}
    vae = _vae("AutoencoderSAME", **sizes, **{f"encoder_{name}": value for name, value in encoder.items()})
    duration = StableAudio3DurationEmbedder(output_dim=TEXT_WIDTH, fourier_dim=16)
    # The duration is also a token of the text.
    config = {"global_cond_dim": TEXT_WIDTH}
    return tiny_pipe(cls, "stable audio 3", config=config, vae=vae, duration_embedder=fill(duration, 3))


_MASKS = masks("mask", torch.int64)
# The sequence is short, because over a long one the difference of its attention hardly depends on other tokens.
_SHORT = {"prompt_embeds": TEXT["prompt_embeds"], "encoder_attention_mask": _MASKS["prompt_mask"]}
_short = partial(TinyPipeline, stable_audio3, prompt=None, duration=2.5, **_SHORT)

AUDIO_PIPELINES: dict[str, TinyPipeline] = {
    "stable audio": TinyPipeline(
        stable_audio, "StableAudioPipeline", TEXT, of_both(attention_mask=lambda _: torch.ones(1, 9).long())
    ),
    "longcat-audio": TinyPipeline(
        longcat_audio, "LongCatAudioDiTPipeline", audio_duration_s=13.5, negative_prompt="a blue square"
    ),
    "ace-step": TinyPipeline(ace_step, "AceStepPipeline", audio_duration=13.5, lyrics="a small green square"),
    "stable audio 3": _short(
        "StableAudio3Pipeline",
        guidance_scale=3.0,
        negative_prompt_embeds=TEXT["negative_prompt_embeds"],
        negative_encoder_attention_mask=_MASKS["negative_prompt_mask"],
    ),
    "stable audio 3, sound": _short(
        "StableAudio3AudioToAudioPipeline", audio=random_tensor(1, 2, 40, seed=3), init_noise_level=0.9
    ),
}
