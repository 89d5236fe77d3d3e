"""Find the guidance, sizes and steps that a pipeline uses with default arguments, and its number of heads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from para_core.adapters.planner.inputs import GenerationSizes
from para_core.instance_patching import original_class


def default_guidance(pipe: Any, transformer: Any) -> str | None:
    """Return why calls of ``pipe`` with default arguments use classifier-free guidance; None if they do not.

    If the pipeline has a guider, the number of its conditions decides. Else, if the pipeline has the property
    ``do_classifier_free_guidance``, that property decides, because it knows distilled models. Otherwise guidance is
    used if the default scale is above 1 and (for ``true_cfg_scale``) there is a default negative prompt, or (for
    ``guidance_scale``) the pipeline takes a negative prompt and the model does not embed the scale.
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


def default_sizes(pipe: Any, transformer: Any, changed: dict[str, Any]) -> tuple[GenerationSizes, int]:
    """Return the sizes and the number of steps of a call of ``pipe`` with default arguments, except for ``changed``."""
    parameters = inspect.signature(original_class(pipe).__call__).parameters

    def default(name: str, otherwise: int) -> int:
        return _int(parameters[name].default if name in parameters else None) or otherwise

    def of_pipe(names: tuple[str, ...], otherwise: int) -> int:
        return next((value for name in names if (value := _int(getattr(pipe, name, None)))), otherwise)

    spatial = of_pipe(("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_scale_factor"), 8)
    temporal = of_pipe(("vae_scale_factor_temporal", "vae_temporal_scale_factor"), 4)
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
