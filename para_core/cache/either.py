"""One of two computations in a compiled graph, chosen by a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Streams = tuple[Tensor | None, ...]


def either(
    condition: Any, one: Callable[[], Streams], other: Callable[[], Streams], present: list[int], count: int
) -> Streams:
    """``one()`` if ``condition``, else ``other()``: a branch of ``torch.cond`` each.

    Args:
        condition: a bool tensor of one element, on the CPU, or the host waits for the device once for each call.
        present: places of the ``count`` tensors that are returned; None stands at the others.
    """

    def own(make: Callable[[], Streams]) -> Callable[[], tuple[Tensor, ...]]:
        def made() -> tuple[Tensor, ...]:
            values = make()
            return tuple([_own(values[i]) for i in present])

        return made

    found = torch.cond(condition, own(one), own(other), ())
    outputs: list[Tensor | None] = [None] * count
    for i, x in zip(present, found, strict=True):
        outputs[i] = x
    return tuple(outputs)


def nothing_like(x: Tensor) -> Tensor:
    """Memory in the form of ``x``, for what is replaced later on."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _own(x: Tensor | None) -> Tensor:
    """A tensor of its own in the order of its dims, as both branches of ``torch.cond`` have to return it."""
    if x is None:
        raise RuntimeError("a block returned None where it returned a tensor before; call it without the cache.")
    return x.clone(memory_format=torch.contiguous_format)
