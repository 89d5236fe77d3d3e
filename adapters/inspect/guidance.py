"""Whether a call of a pipeline uses classifier-free guidance by default, and the heads of its transformer.

Only the planner asks, to predict times and to choose a default mesh (``adapters/planner/default_mesh.py``),
so a wrong answer costs time and changes no result. Tests: tests/planner/test_default_mesh.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from para_core.instance.private_class import original_class


def default_guidance(pipe: Any, transformer: Any) -> str | None:
    """Return why calls of ``pipe`` with default arguments use classifier-free guidance; None if they do not.

    A guider decides by the number of its conditions, else the property ``do_classifier_free_guidance``.
    Without both, guidance is used if the default scale is above 1 and (for ``true_cfg_scale``) there is a
    default negative prompt, or (for ``guidance_scale``) the pipeline takes a negative prompt and the model
    does not embed the scale.
    """
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        scale = getattr(guider, "guidance_scale", None)
        if getattr(guider, "num_conditions", 1) > 1:
            return f"its guider has guidance_scale {scale}"
        return None
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    # In Stable Video Diffusion the scale grows from frame to frame; use the largest.
    if "max_guidance_scale" in defaults:
        defaults["guidance_scale"] = defaults["max_guidance_scale"]
    guides, name = _does_guidance(pipe, defaults), "guidance_scale"
    if guides is None:
        if "true_cfg_scale" in defaults:
            name = "true_cfg_scale"
            two_branches = defaults.get("negative_prompt") is not None
        else:
            embedded = getattr(getattr(transformer, "config", None), "guidance_embeds", False)
            two_branches = "negative_prompt" in defaults and not embedded
        scale = defaults.get(name)
        guides = two_branches and isinstance(scale, (int, float)) and scale > 1
    if guides:
        return f"{name} is {defaults.get(name)} by default"
    return None


def _does_guidance(pipe: Any, defaults: Mapping[str, Any]) -> bool | None:
    """Return ``pipe.do_classifier_free_guidance`` as in a call with ``defaults``; None if it is missing or fails."""
    cls: Any = original_class(pipe)
    if not isinstance(inspect.getattr_static(cls, "do_classifier_free_guidance", None), property):
        return None
    # Catch any exception, because the class may be the user's own: its code may raise anything.
    try:
        # The property reads attributes in which a call stores its arguments, so set these on a copy of the
        # pipeline.
        copy = cls.__new__(cls)
        copy.__dict__.update({**vars(pipe), **{f"_{name}": default for name, default in defaults.items()}})
        return bool(copy.do_classifier_free_guidance)
    except Exception:
        return None


# Config entries that hold the number of heads. Key heads come first, because models with grouped queries have
# fewer of them. LongCat-AudioDiT has dit_heads.
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEADS = (*_KEY_HEADS, "num_attention_heads", "num_heads", "n_heads", "dit_heads")


def number_of_heads(transformer: Any) -> int | None:
    """Return the number of key heads of ``transformer``; None if its config does not say."""
    config = getattr(transformer, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            return heads
    # Kandinsky's config does not name the number of heads. It gives the width of a token (model_dim), and the
    # width of a head in parts, one for each rotary axis (axes_dims).
    width, axes = getattr(config, "model_dim", None), getattr(config, "axes_dims", None)
    if isinstance(width, int) and isinstance(axes, (tuple, list)):
        return width // sum(axes)
    return None
