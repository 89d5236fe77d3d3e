"""What is said where a function cannot run on a part of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from para_core.spatial.tag import Rows


class MixesRows(RuntimeError):
    """A function that touches sharded rows, and that is not known to keep them apart, or how it mixes them."""


def name_of(func: Callable[..., Any]) -> str:
    """The name by which a function of torch is known here: ``add`` of ``Tensor.__iadd__``, ``shape`` of ``Tensor.shape``."""
    name: str = getattr(getattr(func, "func", func), "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    stripped = name.strip("_")
    if name.startswith("__i") and name.endswith("__") and stripped not in ("invert", "index", "int", "iter"):
        return stripped[1:]
    return stripped


def unknown(func: Callable[..., Any], rows: Rows, reason: str) -> MixesRows:
    """The error for a call of ``func`` on rows that are sharded as ``rows`` says."""
    return MixesRows(
        f"{name_of(func)} on a tensor of which dim {rows.dim} is sharded over {len(rows.layout)} ranks as "
        f"{list(rows.layout)}: {reason}. Run this model on one rank (unparallelize_vae, unparallelize_pipe); or of a VAE its tiles "
        "on several (method='tiled')."
    )
