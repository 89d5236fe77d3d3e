"""Matrix products with the rows of one process, where a rank has few.

A row of a product has the same bits for every number of rows from a threshold on. Below, libraries choose
kernels that add up in another order: on a CPU, MKL below 16 rows in float32, and oneDNN below some 400 rows
in bfloat16 (benchmarks/pipelines/same_bits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.same_bits.at_place import resize, sizes_in_one_process
from para_core.same_bits.one_process import OneProcess, Tokens

# The number of rows from which a row of a matrix product has the same bits for every number of rows.
_ROWS_IN_32_BITS = 16
_ROWS_IN_16_BITS = 512

CONVOLUTIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}


def few_rows(x: Tensor) -> int:
    """Return below how many rows the bits of a product of ``x`` with a matrix may depend on the number of rows."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _ROWS_IN_32_BITS
    return _ROWS_IN_16_BITS


def linear(one_process: OneProcess, tokens: Tokens, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``F.linear(x, ...)``, computed with the rows of one process if ``x`` has few.
    ``tokens`` says which of them these are.
    """
    sizes = _sizes_of_product(one_process, tokens, x)
    if sizes is None:
        return F.linear(x, *args, **kwargs)
    padded = resize(x, sizes)
    first = 0
    if sizes[0] == x.shape[0] * one_process.batch_size:
        first = one_process.batch_index * x.shape[0]
    _part(padded, x, first).copy_(x)
    # The unmodified layer returns a contiguous tensor, and the next one may round differently for another.
    return _part(F.linear(padded, *args, **kwargs), x, first).contiguous()


def _part(padded: Tensor, x: Tensor, first: int) -> Tensor:
    """Return the part of ``padded`` that has the sizes of ``x``, from sample ``first`` on."""
    padded = padded.narrow(0, first, x.shape[0])
    for dim in range(1, x.ndim - 1):
        padded = padded.narrow(dim, 0, x.shape[dim])
    return padded


def _sizes_of_product(one_process: OneProcess, tokens: Tokens, x: Tensor) -> list[int] | None:
    """Return the sizes of ``x`` with enough rows to have the bits of one process; None if it has enough."""
    rows = prod(x.shape[:-1])
    enough = few_rows(x)
    if x.ndim < 2 or rows == 0 or rows >= enough:
        return None
    # The position of a token does not matter, so a rank's tokens stay in front. That of a sample does: the
    # second of two rows may be computed by another kernel than the first.
    sizes = sizes_in_one_process(x, one_process, tokens)
    if tokens is not None and prod(sizes[:-1]) > enough:
        rest = prod(sizes[:-1]) // sizes[tokens[0]]
        sizes[tokens[0]] = max(-(-enough // rest), x.shape[tokens[0]])
    return sizes if prod(sizes[:-1]) > rows else None


def convolution(
    function: Callable[..., Tensor], one_process: OneProcess, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return ``function(x, ...)``, a convolution, computed with the samples of one process."""
    if one_process.batch_size == 1 or x.ndim != CONVOLUTIONS[function]:
        return function(x, *args, **kwargs)
    padded = torch.cat([x, *[torch.zeros_like(x)] * (one_process.batch_size - 1)])
    return function(padded, *args, **kwargs)[: len(x)]
