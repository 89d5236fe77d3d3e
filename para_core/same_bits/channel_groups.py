"""GroupNorm as one process computes it: each rank gets all rows of some groups of channels, as Ulysses gives heads.

Only :mod:`.image_rows` calls this. Tests: tests/same_bits/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.distributed.collectives import all_to_all
from para_core.distributed.mesh import MeshDim
from para_core.layout.sequence import Run
from para_core.layout.windows import Sizes, divide_evenly
from para_core.same_bits.placed_rows import VECTOR
from para_core.spatial.fetch import part_of, put_part
from para_core.spatial.row_tag import RowTag, set_rows


def group_norm_of_rows(
    ranks: MeshDim,
    x: Tensor,
    rows: RowTag,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return this rank's rows of ``F.group_norm``, with the bits of one process. Collective: two all-to-alls.

    Of ``x`` with ``n`` bytes on a rank, each rank sends ``n · (ranks − 1) / ranks`` bytes in each; the
    default norm sends statistics of a few bytes per group. ``groups`` must divide the channels, and rows must
    lie behind them (``rows.dim`` > 1): the caller checks both. Groups need not divide by the ranks: some
    ranks get one more, and with more ranks than groups some get none.

    Bits are those of one process with the same number of threads: with channels last, a CPU adds up the rows
    of a large image per thread.
    """
    groups_of_ranks = divide_evenly(groups, ranks.size)
    channels_per_group = x.shape[1] // groups
    channels = tuple([count * channels_per_group for count in groups_of_ranks])
    # This is the format that one process would choose, on every rank: the rows of a rank have the order of
    # dims in memory of the whole image, and each rank has at least one row, so that no part is empty.
    memory_format = _format_of_group_norm(x)
    part = _exchange_rows_for_channels(x, rows, channels, ranks)
    first, number = sum(channels[: ranks.index]), channels[ranks.index]
    if number:
        start, length = first, number
        if memory_format is not torch.contiguous_format:
            start, length = _widen_to_vectors(first, number, x.shape[1], channels_per_group)
        sizes = _with_size(part.shape, 1, length)
        padded = torch.zeros(sizes, dtype=x.dtype, device=x.device).contiguous(memory_format=memory_format)
        padded.narrow(1, first - start, number).copy_(part)
        parameters = _narrow(weight, start, length), _narrow(bias, start, length)
        normalized = F.group_norm(padded, length // channels_per_group, *parameters, eps)
        part = normalized.narrow(1, first - start, number)
    out = _exchange_channels_for_rows(part, rows, channels, ranks)
    return set_rows(out.contiguous(memory_format=memory_format), rows)


def _widen_to_vectors(first: int, number: int, total: int, channels_per_group: int) -> Run:
    """Return the shortest run that contains the ``number`` channels from ``first`` on, and in which a CPU
    computes vectors of the same channels as in one process.

    With channels last, ATen computes vectors of neighbouring channels, and the last few by another function.

    >>> _widen_to_vectors(first=48, number=32, total=160, channels_per_group=16)
    (0, 128)
    """
    unit = lcm(VECTOR, channels_per_group)
    start = first // unit * unit
    stop = min(total, -(-(first + number) // unit) * unit)
    return start, stop - start


def _narrow(parameter: Tensor | None, first: int, length: int) -> Tensor | None:
    """Return ``length`` channels of a weight or bias from ``first`` on; None without one."""
    if parameter is None:
        return None
    return parameter.narrow(0, first, length)


def _format_of_group_norm(x: Tensor) -> torch.memory_format:
    """Return the memory format in which ATen normalizes ``x``, and returns the result.

    On a CPU it is that of c10's ``suggest_memory_format``. There a dim of size 1 counts: a stride that is too
    small for it makes the order ambiguous, and so contiguous. On other devices it is always contiguous.

    >>> x = torch.zeros(2, 12, 13, 5, device="meta").contiguous(memory_format=torch.channels_last)
    >>> F.group_norm(x, 4).is_contiguous(), _format_of_group_norm(x)
    (True, torch.contiguous_format)
    """
    if not x.is_cpu:
        return torch.contiguous_format
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.ndim not in formats or x.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for dim in (1, *range(x.ndim - 1, 1, -1), 0):
        is_ambiguous = dim == 0 and least == x.stride(1)
        if x.shape[dim] == 0 or x.stride(dim) < least or is_ambiguous:
            return torch.contiguous_format
        least = x.stride(dim) * x.shape[dim]
    return formats[x.ndim]


def _exchange_rows_for_channels(x: Tensor, rows: RowTag, channels: Sizes, ranks: MeshDim) -> Tensor:
    """Return all rows of this rank's channels. Collective."""
    parts = x.split(channels, 1)
    sizes = [*x.shape]
    sizes[1] = channels[ranks.index]
    sizes_of_ranks = [_with_size(sizes, rows.dim, rows.outer * count) for count in rows.sizes]
    received = _exchange_parts(parts, sizes_of_ranks, ranks)
    whole = x.new_empty(_with_size(sizes, rows.dim, rows.total))
    for rank, part in enumerate(received):
        put_part(whole, part, rows, ranks, rank=rank)
    return whole


def _exchange_channels_for_rows(x: Tensor, rows: RowTag, channels: Sizes, ranks: MeshDim) -> Tensor:
    """Undo :func:`_exchange_rows_for_channels`. Collective."""
    parts = [part_of(x, rows, ranks, rank=rank) for rank in range(ranks.size)]
    sizes = _with_size([*x.shape], rows.dim, rows.outer * rows.sizes[ranks.index])
    received = _exchange_parts(parts, [_with_size(sizes, 1, count) for count in channels], ranks)
    return torch.cat(received, 1)


def _exchange_parts(
    parts: Sequence[Tensor], sizes_of_ranks: Sequence[Sequence[int]], ranks: MeshDim
) -> list[Tensor]:
    """Send one part to each rank, and return those of all ranks with the given sizes. Collective."""
    receive_sizes = [torch.Size(sizes).numel() for sizes in sizes_of_ranks]
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = all_to_all(sent, [part.numel() for part in parts], receive_sizes, ranks)
    return [
        part.view(sizes) for part, sizes in zip(received.split(receive_sizes), sizes_of_ranks, strict=True)
    ]


def _with_size(sizes: Sequence[int], dim: int, size: int) -> list[int]:
    """Return ``sizes`` with ``size`` for dim ``dim``."""
    changed = [*sizes]
    changed[dim] = size
    return changed
