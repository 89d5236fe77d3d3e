"""Matrix products whose order of summation depends on the number of rows, as cuBLAS may choose it.

cuBLAS picks a kernel by the sizes of a product, and may split the sum over K. A model on one rank and the same model on
two then add in different orders: same bits on the CPU, other bits on a GPU. The switch shows which operators would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# Rows per class, and how many parts the sum over K is split into there.
CLASSES = ((16, 4), (64, 3), (256, 2))

_is_on = False


@contextmanager
def kernels_depend_on_rows() -> Iterator[None]:
    """Choose the order of summation of matrix products by the number of rows, inside the ``with`` block."""
    global _is_on  # noqa: PLW0603  the simulated device is one per process
    before, _is_on = _is_on, True
    try:
        yield
    finally:
        _is_on = before


def parts_of_sum(num_rows: int) -> int:
    """Return how many parts the sum over K is split into for this many rows."""
    return next((parts for most, parts in CLASSES if num_rows <= most), 1)


def with_kernel_of_rows(op: Any, packet: Any) -> Callable[..., Any]:
    """Return ``op``, or for a matrix product under :func:`kernels_depend_on_rows` one that sums in parts."""
    if not _is_on:
        return op
    products: dict[Any, Callable[..., Any]] = {aten.mm: _mm, aten.addmm: _addmm, aten.bmm: _mm}
    product = products.get(packet)
    if product is None:
        return op

    def run(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        result = product(*args, **kwargs)
        return result if out is None else out.copy_(result)

    return run


def _mm(a: Tensor, b: Tensor) -> Tensor:
    parts = min(parts_of_sum(a.shape[-2]), a.shape[-1]) or 1
    sums = [x.float() @ y.float() for x, y in zip(a.chunk(parts, -1), b.chunk(parts, -2), strict=True)]
    return torch.stack(sums).sum(0).to(a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * _mm(a, b)
