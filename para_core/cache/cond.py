"""One of two computations in a compiled graph, chosen by a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Streams = tuple[Tensor | None, ...]


def either(
    condition: Any, one: Callable[[], Streams], other: Callable[[], Streams], present: list[int], inputs: Streams
) -> Streams:
    """Return ``one()`` if ``condition``, else ``other()``: each is a branch of ``torch.cond``.

    Args:
        condition: a bool tensor with one element. On an accelerator, the host waits for it at each call.
        present: indices of the outputs that are tensors; the others are None.
        inputs: tensors whose shapes the outputs have.
    """

    def flattened(make: Callable[[], Streams]) -> Callable[[], tuple[Tensor, ...]]:
        def flat_outputs() -> tuple[Tensor, ...]:
            values = make()
            return tuple([_flat_copy(values[i]) for i in present])

        return flat_outputs

    flat = torch.cond(condition, flattened(one), flattened(other), ())
    outputs: list[Tensor | None] = [None] * len(inputs)
    for i, x in zip(present, flat, strict=True):
        shape: Any = inputs[i]
        outputs[i] = x.view(shape.shape)
    return tuple(outputs)


def nothing_like(x: Tensor) -> Tensor:
    """Memory in the form of ``x``, for what is replaced later on."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _flat_copy(x: Tensor | None) -> Tensor:
    """Return a contiguous copy of ``x`` with one dim.

    ``torch.cond`` requires outputs that alias nothing, and equal strides in both branches. If a size is symbolic, it derives the
    strides of the result from the sizes, and fails where a dim of size 1 or two branches with other expressions of the same size
    make that ambiguous. One dim has stride 1 whatever its size.
    """
    if x is None:
        raise RuntimeError("a block returned None where it returned a tensor before; call it without the cache.")
    return x.clone(memory_format=torch.contiguous_format).view(-1)
