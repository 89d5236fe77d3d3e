"""The one primitive by which rows travel: each rank gets the ranges that it wants. A halo, another layout, or all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather, start_all_gather, start_all_to_all, wait
from para_core.distributed.mesh import MeshDim
from para_core.spatial.rows import Layout, Range, held
from para_core.spatial.tag import Rows

# For each rank the ranges that it wants.
Wanted = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class _RowSpan:
    """Consecutive rows of one range: from ``sender``, of whom they are the rows from ``start``. No sender: over the edge."""

    sender: int | None
    start: int
    length: int


@dataclass(frozen=True)
class _Plan:
    # Of this rank's rows, (start, length) for each other rank, in its order of pieces.
    sends: tuple[tuple[tuple[int, int], ...], ...]
    receives: tuple[int, ...]  # rows from each rank
    ranges: tuple[tuple[_RowSpan, ...], ...]
    silent: bool  # no rank needs another's rows


@lru_cache(maxsize=4096)
def _plan(layout: Layout, wanted: Wanted, rank: int) -> _Plan:
    sends: list[tuple[tuple[int, int], ...]] = []
    for receiver, ranges in enumerate(wanted):
        pieces = [piece for one in ranges for piece in _pieces(layout, one) if piece.sender == rank]
        sends.append(() if receiver == rank else tuple([(piece.start, piece.length) for piece in pieces]))
    mine = tuple([_pieces(layout, one) for one in wanted[rank]])
    receives = [0] * len(layout)
    for piece in [piece for pieces in mine for piece in pieces]:
        if piece.sender is not None and piece.sender != rank:
            receives[piece.sender] += piece.length
    silent = all(
        piece.sender in (None, receiver)
        for receiver, ranges in enumerate(wanted)
        for one in ranges
        for piece in _pieces(layout, one)
    )
    return _Plan(tuple(sends), tuple(receives), mine, silent)


def _pieces(layout: Layout, one: Range) -> tuple[_RowSpan, ...]:
    start, stop = one
    total = sum(layout)
    found = []
    if start < 0:
        found.append(_RowSpan(None, 0, min(stop, 0) - start))
    for sender, (first, last) in enumerate(held(layout)):
        low, high = max(start, first), min(stop, last)
        if low < high:
            found.append(_RowSpan(sender, low - first, high - low))
    if stop > total:
        found.append(_RowSpan(None, 0, stop - max(start, total)))
    return tuple(found)


def start_fetch(
    x: Tensor, rows: Rows, wanted: Wanted, ranks: MeshDim, *, fill: float = 0.0
) -> Callable[[], list[Tensor]]:
    """Begin to fetch; what is returned waits, and gives a tensor like ``x`` for each range that this rank wants.

    One all-to-all, in which a rank sends what others want of its rows and it alone; none where no rank wants another's rows, which
    all of them know.

    Args:
        x: this rank's part, as ``rows`` says.
        wanted: every rank's ranges, in units of ``rows``. What is over the edge is filled with ``fill``.
    """
    _require_no_gradient(x)
    plan = _plan(rows.layout, wanted, ranks.index)
    units = _units_first(x, rows)
    rest = units.shape[1:]
    size = rest.numel()
    travelling = None
    if not plan.silent:
        parts = [units.narrow(0, start, length).reshape(-1) for pieces in plan.sends for start, length in pieces]
        outgoing = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) if parts else units.new_empty(0)
        travelling = start_all_to_all(
            outgoing,
            [sum(length for _, length in pieces) * size for pieces in plan.sends],
            [count * size for count in plan.receives],
            ranks,
        )

    def finish() -> list[Tensor]:
        arrived = () if travelling is None else wait(travelling).split([count * size for count in plan.receives])
        taken = [0] * ranks.size
        found = []
        for pieces in plan.ranges:
            parts = []
            for piece in pieces:
                if piece.sender is None:
                    parts.append(units.new_full((piece.length, *rest), fill))
                elif piece.sender == ranks.index:
                    parts.append(units.narrow(0, piece.start, piece.length))
                else:
                    start = taken[piece.sender]
                    taken[piece.sender] += piece.length
                    part = arrived[piece.sender].narrow(0, start * size, piece.length * size)
                    parts.append(part.view(piece.length, *rest))
            found.append(_units_back(parts, rows))
        return found

    return finish


def fetch(x: Tensor, rows: Rows, wanted: Sequence[Range], ranks: MeshDim, *, fill: float = 0.0) -> Tensor:
    """The rows ``wanted[rank]`` of what all ranks hold a part ``x`` of; see :func:`start_fetch`."""
    (found,) = start_fetch(x, rows, tuple([(one,) for one in wanted]), ranks, fill=fill)()
    return found


def relayout(x: Tensor, rows: Rows, layout: Layout, ranks: MeshDim) -> Tensor:
    """This rank's part of ``x`` as ``layout`` shares it out."""
    return x if layout == rows.layout else fetch(x, rows, held(layout), ranks)


def gather(x: Tensor, rows: Rows, ranks: MeshDim) -> Tensor:
    """All rows of ``x``, on every rank; contiguous."""
    _require_no_gradient(x)
    units = all_gather(_units_first(x, rows), rows.layout, 0, ranks)
    return _units_back([units], rows).contiguous()


def part_of(x: Tensor, rows: Rows, ranks: MeshDim) -> Tensor:
    """This rank's part of ``x``, of which it holds all; no copy where ``rows`` has one run."""
    start, stop = held(rows.layout)[ranks.index]
    units = x.unflatten(rows.dim, (rows.outer, -1)).narrow(rows.dim + 1, start, stop - start)
    found: Tensor = units.flatten(rows.dim, rows.dim + 1)
    return found


def all_ranks(x: Tensor, ranks: MeshDim) -> Tensor:
    """``x`` of every rank, stacked: ``[ranks, ...]``. For statistics, which are small."""
    _require_no_gradient(x)
    return wait(start_all_gather(x.reshape(-1), ranks)).view(ranks.size, *x.shape)


def _require_no_gradient(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "a gradient was asked for of rows that are sharded over ranks, and none is computed through what they exchange. Run "
            "the model under torch.no_grad(), or on one rank."
        )


def _units_first(x: Tensor, rows: Rows) -> Tensor:
    """``[units, ...]``: a view wherever there is one run."""
    if rows.outer > 1:
        x = x.unflatten(rows.dim, (rows.outer, -1))
    return x.movedim(rows.dim + (rows.outer > 1), 0)


def _units_back(parts: list[Tensor], rows: Rows) -> Tensor:
    dim = rows.dim + (rows.outer > 1)
    moved = [part.movedim(0, dim) for part in parts]
    x = moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    return x.flatten(rows.dim, dim) if rows.outer > 1 else x
