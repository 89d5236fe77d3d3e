"""A ``torch.cond`` whose branches may return None, and tensors of symbolic shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Streams = tuple[Tensor | None, ...]


def cond(
    condition: Any, if_true: Callable[[], Streams], if_false: Callable[[], Streams], present: list[int], inputs: Streams
) -> Streams:
    """Return the outputs of ``if_true`` or of ``if_false``, chosen by ``torch.cond``.

    Args:
        condition: A bool tensor with one element. If it is on an accelerator, the host waits for it at each call.
        if_true, if_false: Functions that return the outputs, a tuple of tensors and None.
        present: Indices of the outputs that are tensors; the others are None.
        inputs: Tensors with the shapes that the outputs have.
    """

    def flattened(make: Callable[[], Streams]) -> Callable[[], tuple[Tensor, ...]]:
        def flat_outputs() -> tuple[Tensor, ...]:
            values = make()
            return tuple([_flat_copy(values[i]) for i in present])

        return flat_outputs

    flat = torch.cond(condition, flattened(if_true), flattened(if_false), ())
    outputs: list[Tensor | None] = [None] * len(inputs)
    for i, x in zip(present, flat, strict=True):
        shape: Any = inputs[i]
        outputs[i] = x.view(shape.shape)
    return tuple(outputs)


def _flat_copy(x: Tensor | None) -> Tensor:
    """Return a contiguous copy of ``x`` with one dim.

    ``torch.cond`` requires that its outputs are not views, and that both branches return equal strides. If a size is
    symbolic, ``torch.cond`` derives the strides of the result from the sizes, and fails if a dim has size 1 or if the
    branches have different expressions for the same size. A tensor with one dim always has stride 1.
    """
    if x is None:
        raise RuntimeError("a block returned None where it returned a tensor before; call it without the cache.")
    return x.clone(memory_format=torch.contiguous_format).view(-1)
