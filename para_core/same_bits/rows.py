"""Matrix products of few rows, computed with the rows of one process.

A row of a product has the same bits for every number of rows from :func:`enough_rows` on. Below, libraries
choose kernels that add up in another order: on a CPU, MKL below 16 rows in float32, and oneDNN below some 400
rows in bfloat16. tests/same_bits/test_rows.py compares products of any numbers of rows, and
benchmarks/pipelines/same_bits.py whole pipelines. Only :mod:`.mode` calls :func:`linear` and
:func:`convolution`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.same_bits.at_place import has_samples, resize, sizes_in_one_process
from para_core.same_bits.one_process import OneProcess, Tokens

# 16 bits on a CPU need some 400 rows, so 512 has a margin. What a GPU needs was not measured.
_ENOUGH_IN_32_BITS_ON_A_CPU = 16
_ENOUGH_ELSEWHERE = 512

# The functions with the number of dims of an input with samples.
CONVOLUTIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}


def enough_rows(x: Tensor) -> int:
    """Return from how many rows on each row of a product of ``x`` has the same bits for every number of rows."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _ENOUGH_IN_32_BITS_ON_A_CPU
    return _ENOUGH_ELSEWHERE


def linear(one_process: OneProcess, tokens: Tokens, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``F.linear(x, ...)``, computed with the rows of one process if ``x`` has few.
    ``tokens`` says which of them these are.
    """
    rows = prod(x.shape[:-1])
    if x.ndim < 2 or rows == 0 or rows >= enough_rows(x):
        return F.linear(x, *args, **kwargs)
    sizes = _sizes_for_bits(one_process, tokens, x)
    if prod(sizes[:-1]) <= rows:
        return F.linear(x, *args, **kwargs)
    # The position of a token does not matter, so a rank's tokens stay in front. That of a sample does: the
    # second of two rows may be computed by another kernel than the first.
    first = 0
    if has_samples(x, one_process, tokens):
        first = one_process.batch_index * x.shape[0]
    padded = resize(x, sizes)
    part_like(x, padded, first).copy_(x)
    # The unmodified layer returns a contiguous tensor, and the next one may round differently for another.
    return part_like(x, F.linear(padded, *args, **kwargs), first).contiguous()


def part_like(x: Tensor, padded: Tensor, first: int) -> Tensor:
    """Return the part of ``padded`` with the rows of ``x``: the samples from ``first`` on, and the first rows
    along the other dims but the last, which has features.
    """
    padded = padded.narrow(0, first, x.shape[0])
    for dim in range(1, x.ndim - 1):
        padded = padded.narrow(dim, 0, x.shape[dim])
    return padded


def _sizes_for_bits(one_process: OneProcess, tokens: Tokens, x: Tensor) -> list[int]:
    """Return sizes with which a product of ``x`` has the bits of one process: its sizes there, with no more
    tokens than make enough rows.
    """
    sizes = sizes_in_one_process(x, one_process, tokens)
    if tokens is not None and prod(sizes[:-1]) > enough_rows(x):
        dim = tokens[0]
        rows_per_token = prod(sizes[:-1]) // sizes[dim]
        sizes[dim] = max(-(-enough_rows(x) // rows_per_token), x.shape[dim])
    return sizes


def convolution(
    function: Callable[..., Tensor], one_process: OneProcess, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return ``function(x, ...)``, a convolution of a tensor with samples, computed with those of one process."""
    if one_process.batch_size == 1:
        return function(x, *args, **kwargs)
    # Unlike that of a row, the position of a sample does not matter: each is a product of its own
    # (test_convolutions_see_the_samples_of_one_process).
    padded = torch.cat([x, *[torch.zeros_like(x)] * (one_process.batch_size - 1)])
    return function(padded, *args, **kwargs)[: len(x)]
