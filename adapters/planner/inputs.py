"""Sizes and guidance of a pipeline by default, and inputs of its transformer, as empty tensors. For diffusers 0.42."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from para_core.adapters.planner.sizes import GenerationSizes
from para_core.instance.private_class import original_class

MakeInputs = Callable[[Any, GenerationSizes], dict[str, Any]]


def _common(sizes: GenerationSizes, hidden: tuple[int, ...], text_dim: int, samples: int = 1) -> dict[str, Any]:
    """Return the arguments that all transformers take. ``hidden`` is the shape of one sample of the hidden states."""
    return {
        "hidden_states": sizes.empty(samples, *hidden),
        "encoder_hidden_states": sizes.empty(samples, sizes.text, text_dim),
        "timestep": sizes.empty(samples),
    }


# Functions that return the inputs of a transformer, from its config and the sizes, by class.
INPUTS: Mapping[str, MakeInputs] = {
    "FluxTransformer2DModel": lambda config, sizes: {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
        "img_ids": sizes.empty(sizes.tokens, 3),
        "txt_ids": sizes.empty(sizes.text, 3),
    },
    "Flux2Transformer2DModel": lambda config, sizes: {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
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
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
    },
    "WanTransformer3DModel": lambda config, sizes: _common(
        sizes, (config.in_channels, *sizes.latents), config.text_dim
    ),
    "CogVideoXTransformer3DModel": lambda config, sizes: {
        **_common(sizes, (sizes.latents[0], config.in_channels, *sizes.latents[1:]), config.text_embed_dim, samples=2),
        "image_rotary_emb": (sizes.empty(sizes.latents[0] * sizes.tokens, config.attention_head_dim),) * 2
        if config.use_rotary_positional_embeddings
        else None,
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


def default_guidance(pipe: Any, transformer: Any) -> str | None:
    """Return why calls of ``pipe`` with default arguments use classifier-free guidance; None if they do not.

    A guider decides by the number of its conditions, else the property ``do_classifier_free_guidance``. Without both,
    guidance is used if the default scale is above 1 and (for ``true_cfg_scale``) there is a default negative prompt, or
    (for ``guidance_scale``) the pipeline takes a negative prompt and the model does not embed the scale.
    """
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        scale = getattr(guider, "guidance_scale", None)
        return f"its guider has guidance_scale {scale}" if getattr(guider, "num_conditions", 1) > 1 else None
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    # In Stable Video Diffusion the scale grows from frame to frame; use the largest.
    if "max_guidance_scale" in defaults:
        defaults["guidance_scale"] = defaults["max_guidance_scale"]
    guides = _does_guidance(pipe, defaults)
    name = "guidance_scale" if guides or "true_cfg_scale" not in defaults else "true_cfg_scale"
    scale = defaults.get(name)
    if guides is None:
        embedded = getattr(getattr(transformer, "config", None), "guidance_embeds", False)
        two_branches = "negative_prompt" in defaults and not embedded
        if name == "true_cfg_scale":
            two_branches = defaults.get("negative_prompt") is not None
        guides = two_branches and isinstance(scale, (int, float)) and scale > 1
    return f"{name} is {scale} by default" if guides else None


def _does_guidance(pipe: Any, defaults: Mapping[str, Any]) -> bool | None:
    """Return ``pipe.do_classifier_free_guidance`` as in a call with ``defaults``; None if it is missing or fails."""
    cls: Any = original_class(pipe)
    if not isinstance(inspect.getattr_static(cls, "do_classifier_free_guidance", None), property):
        return None
    # The property reads attributes in which a call stores its arguments, so set these on a copy of the pipeline.
    copy = cls.__new__(cls)
    copy.__dict__.update({**vars(pipe), **{f"_{name}": default for name, default in defaults.items()}})
    try:
        return bool(copy.do_classifier_free_guidance)
    except (AttributeError, TypeError):
        return None


# Config entries that hold the number of heads. Key heads come first, because models with grouped queries have fewer of
# them. The config of LongCat-AudioDiT also has the heads of its text encoder; those of the transformer are dit_heads.
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEADS = (*_KEY_HEADS, "num_attention_heads", "num_heads", "n_heads", "dit_heads")


def number_of_heads(transformer: Any) -> int | None:
    """Return the number of key heads of ``transformer``; None if its config does not say."""
    config = getattr(transformer, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            return heads
    # Kandinsky's config does not name the number of heads. It gives the width of a token (model_dim), and the width of
    # a head in parts, one for each rotary axis (axes_dims).
    width, axes = getattr(config, "model_dim", None), getattr(config, "axes_dims", None)
    return width // sum(axes) if isinstance(width, int) and isinstance(axes, (tuple, list)) else None


# Attributes of pipelines that hold the pixels along a side of a latent pixel, and the frames of a latent frame.
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_scale_factor", "vae_spatial_compression_ratio")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_scale_factor", "vae_temporal_compression_ratio")


def default_sizes(pipe: Any, transformer: Any, changed: dict[str, Any]) -> tuple[GenerationSizes, int]:
    """Return the sizes and the number of steps of a call of ``pipe`` with default arguments, except for ``changed``."""
    parameters = inspect.signature(original_class(pipe).__call__).parameters

    def default(name: str, otherwise: int) -> int:
        return _int(parameters[name].default if name in parameters else None) or otherwise

    def of_pipe(names: tuple[str, ...], otherwise: int) -> int:
        return next((value for name in names if (value := _int(getattr(pipe, name, None)))), otherwise)

    spatial = of_pipe(_SPATIAL, 8)
    temporal = of_pipe(_TEMPORAL, 4)
    side = of_pipe(("default_sample_size",), 0) or _int(getattr(transformer.config, "sample_size", None)) or 128
    sizes = GenerationSizes(
        height=default("height", _int(getattr(transformer.config, "sample_height", None)) * spatial or side * spatial),
        width=default("width", _int(getattr(transformer.config, "sample_width", None)) * spatial or side * spatial),
        frames=default("num_frames", 49 if "CogVideoX" in type(transformer).__name__ else 1),
        text=default("max_sequence_length", 512),
        spatial=spatial,
        temporal=temporal,
    )
    return replace(sizes, **changed), default("num_inference_steps", 50)


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
