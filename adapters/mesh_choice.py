"""Which mesh a pipeline gets where none is given: guidance first where it guides, then heads, then the ring."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.instance import original_class


@dataclass(frozen=True)
class MeshChoice:
    """Sizes of the mesh dims, and why."""

    batch: int
    ring: int
    ulysses: int
    reason: str


def choose_mesh(num_ranks: int, num_heads: int | None, guidance: str | None) -> MeshChoice:
    """Half of the ranks for each branch of guidance, if there are any; then Ulysses up to the number of (key) heads; then the ring.

    Args:
        num_heads: None: not known, so as many as there are ranks.
        guidance: why branches are expected; None: they are not.

    >>> choose_mesh(8, 24, None)
    MeshChoice(batch=1, ring=1, ulysses=8, reason='no guidance by default, 24 heads')
    >>> choose_mesh(8, 2, "guidance_scale is 6.0 by default")
    MeshChoice(batch=2, ring=2, ulysses=2, reason='guidance_scale is 6.0 by default, 2 heads')
    """
    batch = 2 if guidance is not None and num_ranks % 2 == 0 else 1
    left = num_ranks // batch
    ulysses = next(size for size in range(min(left, num_heads or left), 0, -1) if left % size == 0)
    heads = "heads not known" if num_heads is None else f"{num_heads} heads"
    return MeshChoice(batch, left // ulysses, ulysses, f"{guidance or 'no guidance by default'}, {heads}")


def default_guidance(pipe: Any, transformer: Any) -> str | None:
    """Why calls of ``pipe`` guide, by its default arguments; None if they do not.

    The pipeline's own ``do_classifier_free_guidance`` is asked, as it would answer in such a call: it knows of distilled models. Without
    one, a ``true_cfg_scale`` needs a negative prompt, and a ``guidance_scale`` is a branch only where there may be a negative
    prompt, and the model does not embed it.
    """
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        scale = getattr(guider, "guidance_scale", None)
        return f"its guider has guidance_scale {scale}" if getattr(guider, "num_conditions", 1) > 1 else None
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    answer = _own_answer(pipe, defaults)
    name = "guidance_scale" if answer or "true_cfg_scale" not in defaults else "true_cfg_scale"
    scale = defaults.get(name)
    if answer is None:
        if name == "true_cfg_scale":
            may = defaults.get("negative_prompt") is not None
        else:
            embedded = getattr(getattr(transformer, "config", None), "guidance_embeds", False)
            may = "negative_prompt" in defaults and not embedded
        answer = may and isinstance(scale, (int, float)) and scale > 1
    return f"{name} is {scale} by default" if answer else None


def _own_answer(pipe: Any, defaults: Mapping[str, Any]) -> bool | None:
    """Whether ``pipe`` says of itself that it guides, called with ``defaults``; None if it says nothing."""
    cls: Any = original_class(pipe)
    asked = inspect.getattr_static(cls, "do_classifier_free_guidance", None)
    if not isinstance(asked, property):
        return None
    # Calls keep their arguments under these names, and the property reads them. A pipe that was never called has none.
    called = cls.__new__(cls)
    called.__dict__.update({**vars(pipe), **{f"_{name}": default for name, default in defaults.items()}})
    try:
        return bool(called.do_classifier_free_guidance)
    except (AttributeError, TypeError):
        return None


def number_of_heads(transformer: Any) -> int | None:
    """Of keys, where these are fewer."""
    config = getattr(transformer, "config", None)
    for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None
