"""Arithmetic on runs ``(start, length)`` of positions, and taking the tokens at runs from a tensor.

Except for :func:`take` and :func:`add_at`, everything here is integer arithmetic.

Attention, :mod:`.gather`, :mod:`.fetch` and :mod:`.pieces` call these functions. Tests: the examples below,
tests/layout/test_sequence.py, tests/attention/test_exactness.py and tests/attention/test_block_sparse.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from para_core.layout.sequence import Run


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each of some consecutive parts begins. ``lengths`` may be symbolic: they are only added.

    >>> starts_of([3, 0, 2])
    [0, 3, 3]
    """
    return list(accumulate(lengths, initial=0))[:-1]


def coalesce(runs: Sequence[Run]) -> list[Run]:
    """Return disjoint ``runs`` ``(start, length)`` sorted, without empty ones, and with adjacent ones joined.

    >>> coalesce([(4, 2), (0, 3), (3, 1), (9, 0)])
    [(0, 6)]
    """
    return join_neighbours(sorted(runs))


def join_neighbours(runs: Sequence[Run]) -> list[Run]:
    """Return ``runs`` ``(start, length)`` in their order, without empty ones, and with adjacent ones joined.

    Only a run that begins where the run before it in the list ends is joined.

    >>> join_neighbours([(4, 2), (6, 1), (0, 3), (3, 0)])
    [(4, 3), (0, 3)]
    """
    joined: list[Run] = []
    for start, length in runs:
        if length == 0:
            continue
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def cut(runs: Sequence[Run], edges: Iterable[int]) -> list[Run]:
    """Split ``runs`` ``(start, length)`` at the positions ``edges``.

    >>> cut([(0, 10)], [5, 2, 25])
    [(0, 2), (2, 3), (5, 5)]
    """
    edges = sorted(set(edges))
    pieces = []
    for start, length in runs:
        inner = [edge for edge in edges if start < edge < start + length]
        ends = [*inner, start + length]
        pieces += [(a, b - a) for a, b in zip([start, *inner], ends, strict=True)]
    return pieces


def intersect(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Return the intersection of two ascending lists of runs, ascending, without empty runs. The runs of each
    list must be disjoint.

    >>> intersect([(0, 4), (6, 4)], [(2, 5), (8, 9)])
    [(2, 2), (6, 1), (8, 2)]
    """
    common, index = [], 0
    for start, length in runs:
        while index < len(others) and sum(others[index]) <= start:
            index += 1
        for other_start, other_length in others[index:]:
            if other_start >= start + length:
                break
            first, last = max(start, other_start), min(start + length, other_start + other_length)
            if first < last:
                common.append((first, last - first))
    return common


def offsets(runs: Sequence[Run], block: Sequence[Run]) -> list[Run]:
    """Convert ascending ``runs`` of positions to runs of offsets in the concatenation of the runs ``block``.

    The result is in the order of the block. Adjacent runs are joined. Positions that the block does not have
    are left out.

    >>> offsets([(4, 1), (7, 2)], [(0, 2), (4, 6)])
    [(2, 1), (5, 2)]
    """
    positions, before = [], 0
    for start, length in block:
        positions += [
            (before + first - start, number) for first, number in intersect([(start, length)], runs)
        ]
        before += length
    return join_neighbours(positions)


def take(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """Return the concatenation of the slices of ``x`` at ``runs`` ``(start, length)`` along ``dim``.

    A single run gives a view, or ``x`` itself if the run has its length; several runs give a copy.
    """
    if len(runs) == 1:
        start, length = runs[0]
        return x if length == x.size(dim) else x.narrow(dim, start, length)
    return torch.cat([x.narrow(dim, 0, 0), *[x.narrow(dim, *run) for run in runs]], dim=dim)


def add_at(total: Tensor, dim: int, runs: Sequence[Run], x: Tensor) -> None:
    """Add ``x`` in place to the slices of ``total`` at ``runs``: the transpose of :func:`take`.

    ``x`` is first summed over the dims in which ``total`` has size 1. The lengths of the runs must add up to
    that of ``x``.
    """
    for run, part in zip(runs, x.split([length for _, length in runs], dim=dim), strict=True):
        slice_of_total = total.narrow(dim, *run)
        slice_of_total.add_(part.sum_to_size(slice_of_total.shape))
