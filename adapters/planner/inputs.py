"""Inputs of one call of a transformer by class (``INPUTS``, which :mod:`.count` reads), and the sizes of a
generation with default arguments. For diffusers 0.42.

Inputs are tensors without data: their shapes and dtypes count, and so do integers among the inputs, such as
``num_frames``. After a change, run ``python -m benchmarks.planner.counts``, which writes ``counts.json``.
``tests/planner/test_default_sizes.py`` compares the shape of ``hidden_states`` and the number of steps with those
of the first call that diffusers' pipelines make; the number of text tokens it does not compare.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
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
    """Return the arguments that all transformers take. ``hidden`` is the shape of one sample of the hidden
    states.

    ``samples`` is 2 if a pipeline passes both branches of guidance in one call. That is a matter of the class,
    because each pipeline of diffusers either concatenates the branches or makes a call for each; a call without
    guidance is counted as one with.
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


def _patches_of_frames(config: Any, sizes: GenerationSizes) -> tuple[int, int]:
    """Return the patches of latent frames that CogVideoX 1.5 makes, and the frames in each; 1 frame in
    CogVideoX 1.0.

    The pipeline adds latent frames until they fill the last patch.
    """
    frames_of_patch = config.patch_size_t or 1
    return -(-sizes.latents[0] // frames_of_patch), frames_of_patch


def _make_rotary(config: Any, sizes: GenerationSizes) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine of CogVideoX's rotary embedding; None for a model that learned its positions."""
    if not config.use_rotary_positional_embeddings:
        return None
    rotary = sizes.empty(_patches_of_frames(config, sizes)[0] * sizes.tokens, config.attention_head_dim)
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
            (prod(_patches_of_frames(config, sizes)), config.in_channels, *sizes.latents[1:]),
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


# Sizes for a pipeline that does not say its own: a user's own class, and modular pipelines, whose blocks have
# the defaults inside. They are FluxPipeline's: 1024 × 1024 pixels (default_sample_size 128 latent pixels of 8
# pixels), and 512 text tokens; 4 is the factor of most VAEs for videos.
_SPATIAL_FACTOR, _TEMPORAL_FACTOR, _LATENT_SIDE, _TEXT = 8, 4, 128, 512
# The text tokens of CLIP.
_CLIP_TEXT = 77
# The default of num_inference_steps in most of diffusers' pipelines.
_STEPS = 50
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
    """Return the sizes and the number of steps of a call of ``pipe`` with default arguments, except for
    ``changed``: fields of :class:`GenerationSizes` by name.

    A default is looked up where diffusers' pipelines have it: in the signature of the call, in an attribute
    of the pipeline, in the config of the transformer. The first of these that is a positive integer counts.
    """
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    arguments = {name: parameter.default for name, parameter in parameters.items()}
    config = transformer.config
    spatial = _first_size(pipe, _SPATIAL) or _SPATIAL_FACTOR
    temporal = _first_size(pipe, _TEMPORAL) or _TEMPORAL_FACTOR
    side = _first_size(pipe, ["default_sample_size"]) or _first_size(config, ["sample_size"]) or _LATENT_SIDE

    def pixels(name: str) -> int:
        return (
            _positive(arguments.get(name))
            or _first_size(pipe, [f"default_{name}"])
            or spatial * (_first_size(config, [f"sample_{name}"]) or side)
        )

    sizes = GenerationSizes(
        height=pixels("height"),
        width=pixels("width"),
        frames=_positive(arguments.get("num_frames"))
        or _first_size(pipe, ["default_num_frames"])
        or _first_size(config, ["sample_frames"])
        or 1,
        text=_text_tokens(pipe, transformer, arguments),
        spatial=spatial,
        temporal=temporal,
    )
    return replace(sizes, **changed), _positive(arguments.get("num_inference_steps")) or _STEPS


def _text_tokens(pipe: Any, transformer: Any, arguments: Mapping[str, Any]) -> int:
    """Return the number of text tokens of a call of ``pipe`` with these default ``arguments``."""
    tokens = _positive(arguments.get("max_sequence_length")) or _TEXT
    if original_class(transformer).__name__ == "SD3Transformer2DModel":
        # encode_prompt of diffusers' SD3 pipelines concatenates the tokens of CLIP and those of T5, and
        # max_sequence_length is the number of the latter.
        tokens += _first_size(pipe, ["tokenizer_max_length"]) or _CLIP_TEXT
    return tokens


def _first_size(owner: Any, names: Iterable[str]) -> int:
    """Return the first attribute of ``owner`` among ``names`` that is a positive integer; 0 if none is."""
    sizes = (_positive(getattr(owner, name, None)) for name in names)
    return next(filter(None, sizes), 0)


def _positive(value: Any) -> int:
    """Return ``value`` if it is a positive integer, else 0."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return 0
