"""Tiny pipelines of sound, on the transformers of `zoo.tiny.transformers.audio`: latents of 27 tokens come back, of
Stable Audio 3 ten.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from diffusers import EDMDPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder
from torch import nn

from zoo.tiny.pipelines.parts import (
    DECODER,
    TEXT_WIDTH,
    TinyPipeline,
    embeddings,
    random_model,
    umt5_and_tokenizer,
    whole_pipe,
    word_tokenizer,
)
from zoo.tiny.random_weights import fill
from zoo.tiny.transformers.audio import AUDIO_MODELS


def _vae(cls: str, **config: Any) -> nn.Module:
    """Of 8 samples of sound for each latent."""
    with warnings.catch_warnings():
        # diffusers' own use of what torch calls deprecated.
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        return random_model(cls, 2, **config)


def _oobleck() -> nn.Module:
    return _vae(
        "AutoencoderOobleck",
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
        sampling_rate=16,
    )


def stable_audio() -> Any:
    model = AUDIO_MODELS["stable audio"]
    # The projection gives start and end beside each other.
    config = {**model.config, "global_states_input_dim": 2 * TEXT_WIDTH, "sample_size": 27}
    seconds = StableAudioProjectionModel(
        text_encoder_dim=TEXT_WIDTH, conditioning_dim=TEXT_WIDTH, min_value=0, max_value=32
    )
    return whole_pipe(
        "StableAudioPipeline",
        transformer=random_model(model.cls, 1, **config),
        vae=_oobleck(),
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


def ace_step() -> Any:
    model, tokenizer = AUDIO_MODELS["ace-step"], word_tokenizer()
    conditions = AceStepConditionEncoder(
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        text_hidden_dim=TEXT_WIDTH,
        timbre_hidden_dim=4,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        sliding_window=3,
    )
    decoder = transformers.Qwen3Config(vocab_size=len(tokenizer), head_dim=12, **DECODER)
    return whole_pipe(
        "AceStepPipeline",
        transformer=random_model(model.cls, 1, **model.config),
        vae=_oobleck(),
        condition_encoder=fill(conditions, 3),
        text_encoder=fill(transformers.Qwen3Model(decoder), 5),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


def stable_audio3(cls: str = "StableAudio3Pipeline") -> Any:
    model = AUDIO_MODELS["stable audio 3"]
    vae = _vae(
        "AutoencoderSAME",
        patch_size=2,
        encoder_channels=8,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=4,
        dim_heads=8,
        ff_mult=1,
        sampling_rate=16,
    )
    return whole_pipe(
        cls,
        # The duration is a token of text, too.
        transformer=random_model(model.cls, 1, **{**model.config, "global_cond_dim": TEXT_WIDTH}),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        duration_embedder=fill(StableAudio3DurationEmbedder(output_dim=TEXT_WIDTH, fourier_dim=16), 3),
    )


_TEXT = embeddings(9, TEXT_WIDTH)
_VALID = (torch.arange(9) < torch.tensor([[9], [5]])).long()
# Short, or what its attention takes the difference of would hardly depend on other tokens.
_SHORT = {
    "prompt": None,
    "duration": 2.5,
    "prompt_embeds": _TEXT["prompt_embeds"],
    "encoder_attention_mask": _VALID[:1],
}

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
    "ace-step": TinyPipeline(ace_step, {"audio_duration": 13.5, "lyrics": "a small green square"}),
    "stable audio 3": TinyPipeline(
        stable_audio3,
        {
            **_SHORT,
            "guidance_scale": 3.0,
            "negative_prompt_embeds": _TEXT["negative_prompt_embeds"],
            "negative_encoder_attention_mask": _VALID[1:],
        },
    ),
    "stable audio 3, sound": TinyPipeline(
        lambda: stable_audio3("StableAudio3AudioToAudioPipeline"),
        {**_SHORT, "audio": torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(3)), "init_noise_level": 0.9},
    ),
}
