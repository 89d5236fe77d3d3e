"""Errors for functions that cannot run on sharded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from para_core.spatial.tag import RowTag


class MixesRows(RuntimeError):
    """An error raised if a function is called on sharded rows and has no rule, or combines rows in a way that is not
    supported.
    """


def name_of(func: Callable[..., Any]) -> str:
    """Return the name by which the rule of a torch function is found, for example ``add`` for ``Tensor.__iadd__``."""
    name: str = getattr(getattr(func, "func", func), "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    stripped = name.strip("_")
    if name.startswith("__i") and name.endswith("__") and stripped not in ("invert", "index", "int", "iter"):
        return stripped[1:]
    return stripped


def unknown(func: Callable[..., Any], rows: RowTag | None, reason: str) -> MixesRows:
    """Return (not raise) an error that says that ``func`` cannot run on sharded rows.

    Args:
        rows: The sharding of the tensor argument, for the message; None if the sharding is not known.
        reason: What is not supported.
    """
    sharding = ""
    if rows is not None:
        sharding = f" on a tensor whose dim {rows.dim} is sharded over {len(rows.layout)} ranks as {list(rows.layout)}"
    return MixesRows(
        f"{name_of(func)}{sharding}: {reason}. Run this model on one rank (unparallelize_vae, unparallelize_pipe), or "
        "a VAE in distributed tiles (method='tiled')."
    )
