"""Optional features of attention over a mesh: one line each. To remove a feature, delete its files and its line.

Imports no torch, so that a command can read these tables at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The options of attention besides rotate_method and backend, each the class of its values: an AttentionOption.
OPTIONS: tuple[str, ...] = (
    "para_core.attention.rounding:Rounding",
    "para_core.attention.block_sparse:BlockMask",
)
# More options, those that an AttentionSchedule may choose for some steps, each by its word in ``word=number``.
OPTIONS_OF_STEPS: dict[str, str] = {
    "keys": "para_core.attention.kept_keys:KeptKeys",
}
# The values of the option rotate_method: the class of each way in which keys reach the queries of other ring ranks.
STYLES: dict[str, str] = {
    "alltoall": "para_core.attention.ring:Ring",
    "allgather": "para_core.attention.ring:GatheredRing",
    "2d": "para_core.attention.grid_2d:GridPlan",
}


def load(path: str) -> Any:
    """Return what ``path`` names: ``"module:attribute"``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
