"""Which branch of guidance a call of a model is, where the pipeline does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# A pipeline has two or three; more means that what tells them apart changes from step to step.
MOST_BRANCHES = 8


class Branches:
    """Tells branches apart by what the model is conditioned on, never by counting calls.

    Args:
        conditions: names of the arguments that differ between branches, and stay from step to step.
    """

    def __init__(self, conditions: tuple[str, ...]) -> None:
        self._conditions = conditions
        self._known: list[tuple[list[Any], str]] = []
        self._count = 0

    def name_of(self, given: Mapping[str, Any]) -> str:
        """The name of the branch: ``branch 0`` for the first that was seen, and so on."""
        leaves = pytree.tree_leaves([given.get(name) for name in self._conditions])
        # Switches, too: some pipelines call the model a third time with some of its layers left out.
        leaves += [x for name, x in sorted(given.items()) if isinstance(x, (bool, str))]
        for known, name in self._known:
            if len(known) == len(leaves) and all(map(_same, known, leaves)):
                return name
        name = f"branch {self._count}"
        self._count += 1
        self._known = [*self._known, (leaves, name)][-MOST_BRANCHES:]
        return name


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        # A pipeline that makes them anew at each step; the host waits for the device.
        return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)
