"""Recognize in a graph that calls of several CFG branches share one state, which a graph cannot look up by
itself.

If a model is compiled after :func:`~para_core.cache.apply.apply_cache`, or called inside a compiled function,
the hook that identifies branches is part of the graph, and calls without a ``cache_context`` share one state.

Only ``GraphForm.enter`` (:mod:`.graph`) calls this. Tests: tests/cache/test_steps.py, tests/cache/test_graph.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.cache.argument_values import condition_of
from para_core.torch_internals import pytree


class CallDigest(NamedTuple):
    """Sums over the arguments of one call.

    Args:
        conditions: ``[n]`` in float64, of what does not change from step to step.
        clock: ``[m]`` in float64, of the position in the schedule; ``m`` is 0 if no argument holds it.
        mixed: ``[1]``, 1 if calls since the state was emptied belonged to several branches, else 0.
    """

    conditions: Tensor
    clock: Tensor
    mixed: Tensor

    def update(self, now: CallDigest, agree: Callable[[Tensor], Tensor]) -> Tensor:
        """Store ``now``, the digest of the next call, in place, and return the new ``mixed``.

        The next call belongs to another branch if its conditions differ, or its position in the schedule is
        the same. ``agree`` returns, on all ranks, the largest value of any rank.
        """
        differs = (self.conditions != now.conditions).any()
        if self.clock.numel() > 0:
            differs = differs | (self.clock == now.clock).all()
        mixed = torch.maximum(self.mixed, agree(differs.to(self.mixed.dtype)[None]))
        self.conditions.copy_(now.conditions)
        self.clock.copy_(now.clock)
        self.mixed.copy_(mixed)
        return mixed


def digest_call(
    arguments: Mapping[str, Any], conditions: tuple[str, ...], clocks: tuple[str, ...], device: torch.device
) -> CallDigest:
    """Return the digest of a call with ``arguments``. A graph may trace this function.

    Tensors other than ``conditions`` and ``clocks`` are left out, because they may change from step to step.
    ``arguments`` are in the order of the model's parameters.
    """
    sums = [
        _digest_value(x, device)
        for name in conditions
        for x in pytree.tree_leaves(condition_of(arguments, name))
    ]
    for name, value in arguments.items():
        if name not in clocks:
            sums += [_digest_value(x, device) for x in pytree.tree_leaves(value) if not isinstance(x, Tensor)]
    times = [_digest_value(x, device) for name in clocks for x in pytree.tree_leaves(arguments.get(name))]
    none = torch.zeros(0, dtype=torch.float64, device=device)
    return CallDigest(
        torch.cat([none, *sums]),
        torch.cat([none, *times]),
        torch.zeros(1, dtype=torch.float64, device=device),
    )


def _digest_value(value: Any, device: torch.device) -> Tensor:
    """Return two numbers ``[2]`` that differ if tensors or numbers differ, except by coincidence.

    Of a string only the length counts, and of other values nothing.
    """
    if isinstance(value, Tensor):
        x = value.detach().to(torch.float64).flatten()
        # The second sum sees the order of the elements.
        weights = torch.arange(1, x.numel() + 1, dtype=torch.float64, device=x.device).sqrt()
        return torch.stack([x.sum(), (x * weights).sum()]).to(device)
    if isinstance(value, (bool, int, float)):
        return torch.full((2,), float(value), dtype=torch.float64, device=device)
    # A graph is compiled for one string, so its length tells apart most that select something else.
    number = 0.5
    if isinstance(value, str):
        number = float(len(value))
    return torch.full((2,), number, dtype=torch.float64, device=device)
