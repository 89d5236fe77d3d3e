"""Optional options of attention over a mesh: one line each. To remove a feature, delete its files and its
line.

:data:`para_core.option_values.RING_STYLES` lists the values of ``rotate_method``. Imports no torch, so that a
command can read these tables at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The options of attention besides rotate_method and backend, each the class of its values: an
# AttentionOption.
OPTIONS: tuple[str, ...] = (
    "rounding:Rounding",
    "block_sparse:BlockMask",
)
# More options, those that an AttentionSchedule may choose for some steps, each by its word in
# ``word=number``.
OPTIONS_OF_STEPS: dict[str, str] = {
    "keys": "kept_keys:KeptKeys",
}
# What computes calls that require a gradient.
GRADIENTS: tuple[str, ...] = (
    "gradients.operator:differentiate",
)  # fmt: skip


def load(path: str) -> Any:
    """Return what ``path`` names: ``"module:attribute"``, with a module of ``para_core.attention``."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"para_core.attention.{module}"), name)
