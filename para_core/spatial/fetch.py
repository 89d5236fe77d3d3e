"""Fetch rows from other ranks: a halo, the rows of another layout, or all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather, start_all_gather, start_all_to_all, wait
from para_core.distributed.mesh import MeshDim
from para_core.spatial.rows import Layout, Range, RowTag, ranges_of

# For each rank, the ranges of rows that the rank fetches.
Wanted = tuple[tuple[Range, ...], ...]


class _RowSpan(NamedTuple):
    """A part of a fetched range: rows of rank ``sender`` from its row ``start`` on; None beyond the image's edge."""

    sender: int | None
    start: int
    length: int


class _FetchPlan(NamedTuple):
    """The rows that this rank sends and receives in the all-to-all of one fetch.

    Args:
        sends: For each receiving rank, the runs (start, length) of this rank's rows that are sent.
        receives: For each sending rank, the number of rows that this rank receives.
        ranges: For each range that this rank fetches, the parts of which it consists.
        is_local: Whether every rank already holds all rows that it fetches, so that nothing is exchanged.
    """

    sends: tuple[tuple[tuple[int, int], ...], ...]
    receives: tuple[int, ...]
    ranges: tuple[tuple[_RowSpan, ...], ...]
    is_local: bool


@lru_cache(maxsize=4096)
def _fetch_plan(layout: Layout, wanted: Wanted, rank: int) -> _FetchPlan:
    spans_of_ranks = [[_spans(layout, range_) for range_ in ranges] for ranges in wanted]
    flat = [list(chain.from_iterable(ranges)) for ranges in spans_of_ranks]
    sends = [
        tuple([(span.start, span.length) for span in spans if span.sender == rank and receiver != rank])
        for receiver, spans in enumerate(flat)
    ]
    receives = [0] * len(layout)
    for span in flat[rank]:
        if span.sender is not None and span.sender != rank:
            receives[span.sender] += span.length
    is_local = all(span.sender in (None, receiver) for receiver, spans in enumerate(flat) for span in spans)
    return _FetchPlan(tuple(sends), tuple(receives), tuple(spans_of_ranks[rank]), is_local)


def _spans(layout: Layout, range_: Range) -> tuple[_RowSpan, ...]:
    """Split ``range_`` into consecutive parts, each held by one rank or beyond the edge of the image."""
    start, stop = range_
    total = sum(layout)
    spans = []
    if start < 0:
        spans.append(_RowSpan(None, 0, min(stop, 0) - start))
    for sender, (first, last) in enumerate(ranges_of(layout)):
        low, high = max(start, first), min(stop, last)
        if low < high:
            spans.append(_RowSpan(sender, low - first, high - low))
    if stop > total:
        spans.append(_RowSpan(None, 0, stop - max(start, total)))
    return tuple(spans)


def start_fetch(
    x: Tensor, rows: RowTag, wanted: Wanted, ranks: MeshDim, *, fill: float = 0.0
) -> Callable[[], list[Tensor]]:
    """Start fetching ranges of rows in one all-to-all, unless every rank holds all of its ranges. Return a
    function that waits for the rows, and returns one tensor for each of this rank's ranges.

    Args:
        x: This rank's rows, sharded as ``rows`` says. If a gradient is needed, ``RuntimeError`` is raised.
        wanted: For each rank, the ranges that it fetches, in rows of the full image (or in the units of
            ``rows``).
        fill: Value of rows beyond the edge of the image.
    """
    _require_no_gradient(x)
    plan = _fetch_plan(rows.layout, wanted, ranks.index)
    units = _units_first(x, rows)
    rest, size = units.shape[1:], units.shape[1:].numel()
    in_flight = None
    if not plan.is_local:
        parts = [
            units.narrow(0, start, length).reshape(-1) for spans in plan.sends for start, length in spans
        ]
        in_flight = start_all_to_all(
            _join(parts, units),
            [sum(length for _, length in spans) * size for spans in plan.sends],
            [count * size for count in plan.receives],
            ranks,
        )

    def finish() -> list[Tensor]:
        received: Sequence[Tensor] = ()
        if in_flight is not None:
            received = wait(in_flight).split([count * size for count in plan.receives])
        num_read = [0] * ranks.size
        fetched = []
        for spans in plan.ranges:
            parts = []
            for span in spans:
                if span.sender is None:
                    parts.append(units.new_full((span.length, *rest), fill))
                elif span.sender == ranks.index:
                    parts.append(units.narrow(0, span.start, span.length))
                else:
                    start = num_read[span.sender]
                    num_read[span.sender] += span.length
                    part = received[span.sender].narrow(0, start * size, span.length * size)
                    parts.append(part.view(span.length, *rest))
            fetched.append(_units_back(parts, rows))
        return fetched

    return finish


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return the vectors ``parts`` as one contiguous vector; without any, an empty one like ``like``."""
    if not parts:
        return like.new_empty(0)
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(parts)


def fetch(x: Tensor, rows: RowTag, wanted: Sequence[Range], ranks: MeshDim, *, fill: float = 0.0) -> Tensor:
    """Return the rows of this rank's range ``wanted[rank]``, fetched by :func:`start_fetch`."""
    (part,) = start_fetch(x, rows, tuple([(range_,) for range_ in wanted]), ranks, fill=fill)()
    return part


def relayout(x: Tensor, rows: RowTag, layout: Layout, ranks: MeshDim) -> Tensor:
    """Return this rank's rows of ``x`` after an exchange to ``layout``; ``x`` itself if this is its layout."""
    if layout == rows.layout:
        return x
    return fetch(x, rows, ranges_of(layout), ranks)


def gather(x: Tensor, rows: RowTag, ranks: MeshDim) -> Tensor:
    """Return the rows of all ranks, contiguous in memory, on every rank. Collective."""
    _require_no_gradient(x)
    units = all_gather(_units_first(x, rows), rows.layout, 0, ranks)
    return _units_back([units], rows).contiguous()


def part_of(x: Tensor, rows: RowTag, ranks: MeshDim) -> Tensor:
    """Return this rank's rows of ``x``, a tensor with all rows.
    The result is a view if ``rows.outer`` is 1.
    """
    start, stop = ranges_of(rows.layout)[ranks.index]
    units = x.unflatten(rows.dim, (rows.outer, -1)).narrow(rows.dim + 1, start, stop - start)
    part: Tensor = units.flatten(rows.dim, rows.dim + 1)
    return part


def all_ranks(x: Tensor, ranks: MeshDim) -> Tensor:
    """Return the tensors ``x`` of all ranks, such as statistics, stacked as ``[ranks, ...]``. Collective."""
    _require_no_gradient(x)
    return wait(start_all_gather(x.reshape(-1), ranks)).view(ranks.size, *x.shape)


def _require_no_gradient(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "sharded rows require a gradient, and none is computed through the exchange of rows. Run "
            "the model under torch.no_grad(), or on one rank."
        )


def _units_first(x: Tensor, rows: RowTag) -> Tensor:
    """Return ``x`` with the sharded units (rows) moved to dim 0: ``[units, ...]``.
    A view if ``rows.outer`` is 1.
    """
    if rows.outer > 1:
        x = x.unflatten(rows.dim, (rows.outer, -1))
    return x.movedim(rows.dim + (rows.outer > 1), 0)


def _units_back(parts: list[Tensor], rows: RowTag) -> Tensor:
    """Concatenate ``parts``, each ``[units, ...]``, and move the units back to their dim."""
    dim = rows.dim + (rows.outer > 1)
    moved = [part.movedim(0, dim) for part in parts]
    x = moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    if rows.outer > 1:
        x = x.flatten(rows.dim, dim)
    return x
