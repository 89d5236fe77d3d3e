"""Inputs of a call of a transformer, and the sizes of a generation by default. For diffusers 0.42.

The planner makes them inside ``without_data`` of ``count.py``: shapes and dtypes count, and so do integers among
the inputs, such as ``num_frames``. After a change, run ``python -m benchmarks.planner.counts``, which writes
``counts.json``. ``tests/planner/test_default_sizes.py`` compares the shape of ``hidden_states`` and the number of
steps with those of the first call that diffusers' pipelines make; the number of text tokens it does not compare.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from para_core.adapters.planner.work import GenerationSizes
from para_core.adapters.registry import plan_for
from para_core.instance.private_class import original_class
from para_core.plans.module_matching import parameters_of

# The entries of configs that hold the number of features of a text token. The first one counts.
_TEXT_DIMS = ("joint_attention_dim", "text_embed_dim", "text_dim", "caption_channels", "cross_attention_dim")


def _tokens(config: Any, sizes: GenerationSizes) -> tuple[int, ...]:
    return sizes.tokens, config.in_channels


def _image(config: Any, sizes: GenerationSizes) -> tuple[int, ...]:
    return config.in_channels, *sizes.latents[1:]


def _video(config: Any, sizes: GenerationSizes) -> tuple[int, ...]:
    return config.in_channels, *sizes.latents


def _latent_pixels(config: Any, sizes: GenerationSizes) -> tuple[int, ...]:
    return prod(sizes.uncut_latents), config.in_channels


def _frames(config: Any, sizes: GenerationSizes) -> tuple[int, ...]:
    """Return the shape for CogVideoX. Its version 1.5 fills the last patch of frames."""
    frames_of_patch = config.patch_size_t or 1
    return -(-sizes.latents[0] // frames_of_patch) * frames_of_patch, *_image(config, sizes)


# Functions that return the shape of the hidden states of one sample, by class of the transformer.
HIDDEN_SHAPES: Mapping[str, Callable[[Any, GenerationSizes], tuple[int, ...]]] = {
    "FluxTransformer2DModel": _tokens,
    "Flux2Transformer2DModel": _tokens,
    "QwenImageTransformer2DModel": _tokens,
    "HunyuanVideoTransformer3DModel": _video,
    "WanTransformer3DModel": _video,
    "CogVideoXTransformer3DModel": _frames,
    "MochiTransformer3DModel": _video,
    "ChronoEditTransformer3DModel": _video,
    "ChromaTransformer2DModel": _tokens,
    "LTXVideoTransformer3DModel": _latent_pixels,
    "AuraFlowTransformer2DModel": _image,
    "PixArtTransformer2DModel": _image,
    "CogView4Transformer2DModel": _image,
    "SD3Transformer2DModel": _image,
}


class UnknownModelError(TypeError):
    """Error for a model whose plan, or whose inputs for a given image size, the planner does not know."""


def make_inputs(transformer: nn.Module, sizes: GenerationSizes) -> dict[str, Any]:
    """Return the inputs of a call of ``transformer``, whose class is in ``HIDDEN_SHAPES``.

    There are two samples if its pipelines pass both branches of guidance in one call, which the plan says. A
    call without guidance is counted as one with.

    Raises:
        UnknownModelError: The model generates layers, or the config does not say the features of a text token.
    """
    config: Any = transformer.config
    name = original_class(transformer).__name__
    plan = plan_for(transformer)
    samples = 1
    if plan is not None and plan.batched:
        samples = 2
    # Qwen-Image-Layered has tokens for each of its layers, whose number is an argument of the call.
    if getattr(config, "use_additional_t_cond", False):
        raise UnknownModelError(f"the number of layers that {name} generates is unknown.")
    text_dims = [getattr(config, name) for name in _TEXT_DIMS if getattr(config, name, None)]
    if not text_dims:
        raise UnknownModelError(f"the config of {name} has none of {', '.join(_TEXT_DIMS)}.")
    hidden = HIDDEN_SHAPES[name](config, sizes)
    pairs = torch.empty(samples, 2)
    inputs = {
        "hidden_states": torch.empty(samples, *hidden),
        "encoder_hidden_states": torch.empty(samples, sizes.text, text_dims[0]),
        "encoder_attention_mask": torch.empty(samples, sizes.text, dtype=torch.bool),
        "timestep": torch.empty(samples),
        "img_shapes": [[(1, sizes.latents[1] // 2, sizes.latents[2] // 2)]],
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), pairs),
        "added_cond_kwargs": {"resolution": pairs, "aspect_ratio": pairs[:, :1]},
        **dict(zip(("num_frames", "height", "width"), sizes.uncut_latents, strict=True)),  # of LTX-Video
    }
    # The scale of guidance, if the model is distilled to take it.
    if getattr(config, "guidance_embeds", False):
        inputs["guidance"] = torch.empty(1)
    if hasattr(config, "pooled_projection_dim"):
        inputs["pooled_projections"] = torch.empty(samples, config.pooled_projection_dim)
    if hasattr(config, "axes_dims_rope"):
        inputs["img_ids"] = torch.empty(sizes.tokens, len(config.axes_dims_rope))
        inputs["txt_ids"] = torch.empty(sizes.text, len(config.axes_dims_rope))
    # Models of CogVideoX without this entry have learned their positions.
    if getattr(config, "use_rotary_positional_embeddings", False):
        positions = hidden[0] // (config.patch_size_t or 1) * sizes.tokens
        inputs["image_rotary_emb"] = (torch.empty(positions, config.attention_head_dim),) * 2
    accepted = parameters_of(transformer)
    return {name: value for name, value in inputs.items() if name in accepted}


# Sizes for a pipeline that does not say its own: a user's class, and modular pipelines, whose blocks have them. They
# are FluxPipeline's, 128 × 128 latent pixels and 512 text tokens; 4 is the factor of most VAEs for videos.
_SPATIAL_FACTOR, _TEMPORAL_FACTOR, _LATENT_SIDE, _TEXT = 8, 4, 128, 512
# The default of num_inference_steps in most of diffusers' pipelines.
_STEPS = 50
# Attributes of pipelines that hold the pixels along a side of a latent pixel, and frames of a latent frame.
_SPATIAL = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_scale_factor",
    "vae_spatial_compression_ratio",
)
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_scale_factor", "vae_temporal_compression_ratio")


def default_sizes(pipe: Any, transformer: Any, changed: dict[str, Any]) -> tuple[GenerationSizes, int]:
    """Return the sizes and the number of steps of a call of ``pipe`` with default arguments.

    ``changed`` replaces fields of :class:`GenerationSizes` by name. A default is looked up where diffusers'
    pipelines have it: in the signature of the call, in an attribute of the pipeline, in the config of the
    transformer. The first of these that is a positive integer counts; else a constant above, for frames 1.
    """
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    call = SimpleNamespace(**{name: parameter.default for name, parameter in parameters.items()})
    config = getattr(transformer, "config", None)
    spatial = _first_size(*((pipe, name) for name in _SPATIAL), default=_SPATIAL_FACTOR)
    side = _first_size((pipe, "default_sample_size"), (config, "sample_size"), default=_LATENT_SIDE)

    def pixels(name: str) -> int:
        usual = spatial * _first_size((config, f"sample_{name}"), default=side)
        return _first_size((call, name), (pipe, f"default_{name}"), default=usual)

    frames = (call, "num_frames"), (pipe, "default_num_frames"), (config, "sample_frames")
    sizes = GenerationSizes(
        height=pixels("height"),
        width=pixels("width"),
        frames=_first_size(*frames, default=1),
        text=_first_size((call, "max_sequence_length"), default=_TEXT),
        spatial=spatial,
        temporal=_first_size(*((pipe, name) for name in _TEMPORAL), default=_TEMPORAL_FACTOR),
    )
    if getattr(call, "enable_temporal_reasoning", None) is False:
        sizes = replace(sizes, frames=5)  # ChronoEdit then ignores num_frames.
    return replace(sizes, **changed), _first_size((call, "num_inference_steps"), default=_STEPS)


def _first_size(*attributes: tuple[Any, str], default: int) -> int:
    """Return the first of these attributes of owners that is a positive integer; ``default`` if none is."""
    for owner, name in attributes:
        size = getattr(owner, name, None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return default
