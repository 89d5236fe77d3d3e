"""Inputs of one call of a transformer by class (``INPUTS``, which :mod:`.count` reads), and the sizes of a
generation with default arguments. For diffusers 0.42.

Inputs are empty tensors: only their shapes count. After a change, run
``python -m benchmarks.planner.counts``, which writes ``counts.json``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from para_core.adapters.planner.work import GenerationSizes
from para_core.instance.private_class import original_class

MakeInputs = Callable[[Any, GenerationSizes], dict[str, Any]]


def _common(
    sizes: GenerationSizes, hidden: tuple[int, ...], text_dim: int, samples: int = 1
) -> dict[str, Any]:
    """Return the arguments that all transformers take.
    ``hidden`` is the shape of one sample of the hidden states. ``samples`` is 2 if a pipeline passes both branches of
    guidance in one call.
    """
    return {
        "hidden_states": sizes.empty(samples, *hidden),
        "encoder_hidden_states": sizes.empty(samples, sizes.text, text_dim),
        "timestep": sizes.empty(samples),
    }


def _make_guidance(config: Any, sizes: GenerationSizes) -> Tensor | None:
    """Return the guidance scale that a distilled model takes as an input; None for other models."""
    if not config.guidance_embeds:
        return None
    return sizes.empty(1)


def _make_rotary(config: Any, sizes: GenerationSizes) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine of CogVideoX's rotary embedding; None for a model that learned its positions."""
    if not config.use_rotary_positional_embeddings:
        return None
    rotary = sizes.empty(sizes.latents[0] * sizes.tokens, config.attention_head_dim)
    return rotary, rotary


# Functions that return the inputs of a transformer, from its config and the sizes, by class.
INPUTS: Mapping[str, MakeInputs] = {
    "FluxTransformer2DModel": lambda config, sizes: {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "guidance": _make_guidance(config, sizes),
        "img_ids": sizes.empty(sizes.tokens, 3),
        "txt_ids": sizes.empty(sizes.text, 3),
    },
    "Flux2Transformer2DModel": lambda config, sizes: {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "guidance": _make_guidance(config, sizes),
        "img_ids": sizes.empty(1, sizes.tokens, 4),
        "txt_ids": sizes.empty(1, sizes.text, 4),
    },
    "QwenImageTransformer2DModel": lambda config, sizes: {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "img_shapes": [[(1, sizes.latents[1] // 2, sizes.latents[2] // 2)]],
    },
    "HunyuanVideoTransformer3DModel": lambda config, sizes: {
        **_common(sizes, (config.in_channels, *sizes.latents), config.text_embed_dim),
        "encoder_attention_mask": sizes.empty(1, sizes.text, dtype=torch.int64),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "guidance": _make_guidance(config, sizes),
    },
    "WanTransformer3DModel": lambda config, sizes: _common(
        sizes, (config.in_channels, *sizes.latents), config.text_dim
    ),
    "CogVideoXTransformer3DModel": lambda config, sizes: {
        **_common(
            sizes,
            (sizes.latents[0], config.in_channels, *sizes.latents[1:]),
            config.text_embed_dim,
            samples=2,
        ),
        "image_rotary_emb": _make_rotary(config, sizes),
    },
    "MochiTransformer3DModel": lambda config, sizes: {
        **_common(sizes, (config.in_channels, *sizes.latents), config.text_embed_dim, samples=2),
        "encoder_attention_mask": sizes.empty(2, sizes.text, dtype=torch.bool),
    },
    "ChronoEditTransformer3DModel": lambda config, sizes: _common(
        sizes, (config.in_channels, *sizes.latents), config.text_dim
    ),
    "ChromaTransformer2DModel": lambda config, sizes: {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "img_ids": sizes.empty(sizes.tokens, 3),
        "txt_ids": sizes.empty(sizes.text, 3),
        "attention_mask": sizes.empty(1, sizes.text + sizes.tokens),
    },
    "LTXVideoTransformer3DModel": lambda config, sizes: {
        **_common(sizes, (prod(sizes.latents), config.in_channels), config.caption_channels, samples=2),
        "encoder_attention_mask": sizes.empty(2, sizes.text, dtype=torch.bool),
        **dict(zip(("num_frames", "height", "width"), sizes.latents, strict=True)),
    },
    "AuraFlowTransformer2DModel": lambda config, sizes: _common(
        sizes, (config.in_channels, *sizes.latents[1:]), config.joint_attention_dim, samples=2
    ),
    "PixArtTransformer2DModel": lambda config, sizes: {
        **_common(
            sizes,
            (config.in_channels, *sizes.latents[1:]),
            config.caption_channels or config.cross_attention_dim,
            samples=2,
        ),
        "encoder_attention_mask": sizes.empty(2, sizes.text, dtype=torch.bool),
        "added_cond_kwargs": {"resolution": sizes.empty(2, 2), "aspect_ratio": sizes.empty(2, 1)},
    },
    "CogView4Transformer2DModel": lambda config, sizes: {
        **_common(sizes, (config.in_channels, *sizes.latents[1:]), config.text_embed_dim),
        **{name: sizes.empty(1, 2) for name in ("original_size", "target_size", "crop_coords")},
    },
    "SD3Transformer2DModel": lambda config, sizes: {
        **_common(sizes, (config.in_channels, *sizes.latents[1:]), config.joint_attention_dim, samples=2),
        "pooled_projections": sizes.empty(2, config.pooled_projection_dim),
    },
}


# Attributes of pipelines that hold the pixels along a side of a latent pixel, and the frames of a latent
# frame.
_SPATIAL = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_scale_factor",
    "vae_spatial_compression_ratio",
)
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_scale_factor", "vae_temporal_compression_ratio")


def default_sizes(pipe: Any, transformer: Any, changed: dict[str, Any]) -> tuple[GenerationSizes, int]:
    """Return the sizes and the number of steps of a call of ``pipe`` with default arguments, except for ``changed``."""
    parameters = inspect.signature(original_class(pipe).__call__).parameters

    def default(name: str, otherwise: int) -> int:
        if name not in parameters:
            return otherwise
        return _int(parameters[name].default) or otherwise

    def of_pipe(names: tuple[str, ...], otherwise: int) -> int:
        return next((value for name in names if (value := _int(getattr(pipe, name, None)))), otherwise)

    spatial = of_pipe(_SPATIAL, 8)
    temporal = of_pipe(_TEMPORAL, 4)
    side = (
        of_pipe(("default_sample_size",), 0) or _int(getattr(transformer.config, "sample_size", None)) or 128
    )
    frames = 1
    if "CogVideoX" in type(transformer).__name__:
        frames = 49
    sizes = GenerationSizes(
        height=default(
            "height", _int(getattr(transformer.config, "sample_height", None)) * spatial or side * spatial
        ),
        width=default(
            "width", _int(getattr(transformer.config, "sample_width", None)) * spatial or side * spatial
        ),
        frames=default("num_frames", frames),
        text=default("max_sequence_length", 512),
        spatial=spatial,
        temporal=temporal,
    )
    return replace(sizes, **changed), default("num_inference_steps", 50)


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return 0
