"""Which branch of guidance a call of a model is, where the pipeline does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# A pipeline has two or three.
MOST_BRANCHES = 8
# So many of which none came back are no branches: what tells them apart changes from step to step.
_MOST_NEW = 4


@dataclass
class _Known:
    leaves: list[Any]
    name: str
    came_back: bool = False


class Branches:
    """Tells branches apart by what the model is conditioned on, never by counting calls.

    Args:
        conditions: names of the arguments that differ between branches, and stay from step to step.
    """

    def __init__(self, conditions: tuple[str, ...]) -> None:
        self.conditions = conditions
        self._known: list[_Known] = []
        self._count = 0

    def name_of(self, given: Mapping[str, Any]) -> str | None:
        """The name of the branch: ``branch 0`` for the first that was seen, and so on; None if they cannot be told apart.

        The host waits for the device only where the conditions are tensors that were made anew, and then once.
        """
        if self._count > _MOST_NEW and not any(known.came_back for known in self._known):
            return None
        leaves = pytree.tree_leaves([given.get(name) for name in self.conditions])
        # Switches, too: some pipelines call the model a third time with some of its layers left out.
        leaves += [x for name, x in sorted(given.items()) if isinstance(x, (bool, str))]
        found = self._find(leaves)
        if found is not None:
            found.came_back = True
            # What comes next may be this very tensor.
            found.leaves = leaves
            return found.name
        self._count += 1
        if self._count > _MOST_NEW and not any(known.came_back for known in self._known):
            self._known = []
            return None
        name = f"branch {self._count - 1}"
        self._known = [*self._known, _Known(leaves, name)][-MOST_BRANCHES:]
        return name

    def _find(self, leaves: list[Any]) -> _Known | None:
        alike = [known for known in self._known if _may_be_same(known.leaves, leaves)]
        for known in alike:
            if all(x is y for x, y in zip(known.leaves, leaves, strict=True) if isinstance(x, Tensor)):
                return known
        if not alike:
            return None
        same = [
            torch.stack(
                [(x == y).all() for x, y in zip(known.leaves, leaves, strict=True) if isinstance(x, Tensor)]
            ).all()
            for known in alike
        ]
        return next((known for known, equal in zip(alike, torch.stack(same).tolist(), strict=True) if equal), None)


def _may_be_same(before: list[Any], now: list[Any]) -> bool:
    """Whether only the values of tensors could tell them apart."""
    return len(before) == len(now) and all(map(_form_is_same, before, now))


def _form_is_same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    return type(x) is type(y) and bool(x == y)
