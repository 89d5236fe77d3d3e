"""Fetch ranges of a sequence that other ranks hold.

This is one all-to-all over one mesh dim, described by a :class:`FetchPlan`. It is differentiable: in the
backward, too, every rank takes part in the exchange, whether it has sent and received anything or not.

:mod:`para_core.layout.halo`, which makes plans of its own, and :mod:`para_core.spatial.fetch` call this
module. Tests: tests/layout/test_sequence.py for plans, the rows ``rows`` of tests/plans/test_exactness.py for
the exchange and its gradients, and tests/spatial/test_functions.py for rows of images and ``fill``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.distributed.collectives import start_all_to_all, wait
from para_core.distributed.mesh import MeshDim
from para_core.layout.pieces import Layout
from para_core.layout.runs import starts_of
from para_core.layout.sequence import Run

# For each rank, the runs (start, length) of positions of the sequence that it fetches. If a gradient is
# needed, every rank must have at least one run, which may be empty (:func:`start_exchange`).
Wanted = tuple[tuple[Run, ...], ...]


class Span(NamedTuple):
    """A part of a fetched run: ``length`` tokens of rank ``sender``, from offset ``start`` of its tensor on.

    ``sender`` is None for positions that no rank holds, beyond the ends of the sequence.
    """

    sender: int | None
    start: int
    length: int


class FetchPlan(NamedTuple):
    """The tokens that this rank sends and receives in the all-to-all of one fetch. Lengths may be symbolic.

    Args:
        sends: For each receiving rank, the runs (start, length) of offsets in this rank's tensor that are
            sent.
        receives: For each sending rank, the number of tokens that this rank receives.
        runs: For each run that this rank fetches, the parts of which it consists.
        is_local: Whether every rank already holds all that it fetches, so that nothing is exchanged.
        has_runs: Whether every rank fetches at least one run, empty or not. All ranks have the same value.
    """

    sends: tuple[tuple[Run, ...], ...]
    receives: tuple[int, ...]
    runs: tuple[tuple[Span, ...], ...]
    is_local: bool
    has_runs: bool


def plan_spans(spans_of_ranks: Sequence[Sequence[Sequence[Span]]], rank: int) -> FetchPlan:
    """Return the plan of ``rank``. ``spans_of_ranks`` has the parts of each run that each rank fetches."""
    flat = [[span for spans in runs for span in spans] for runs in spans_of_ranks]
    sends = [
        tuple([(span.start, span.length) for span in spans if span.sender == rank and receiver != rank])
        for receiver, spans in enumerate(flat)
    ]
    receives = [0] * len(flat)
    for span in flat[rank]:
        if span.sender is not None and span.sender != rank:
            receives[span.sender] += span.length
    is_local = all(span.sender in (None, receiver) for receiver, spans in enumerate(flat) for span in spans)
    runs = tuple([tuple(spans) for spans in spans_of_ranks[rank]])
    return FetchPlan(tuple(sends), tuple(receives), runs, is_local, has_runs=all(spans_of_ranks))


@lru_cache(maxsize=4096)
def plan_fetch(layout: Layout, wanted: Wanted, rank: int) -> FetchPlan:
    """Return the plan by which ``rank`` of ``layout`` gets its runs in ``wanted``. Lengths must be plain
    numbers.

    >>> plan = plan_fetch(Layout.consecutive((3, 2)), (((-1, 5),), ((2, 3),)), 0)
    >>> plan.sends, plan.receives
    (((), ((2, 1),)), (0, 1))
    >>> [tuple(span) for span in plan.runs[0]]
    [(None, 0, 1), (0, 0, 3), (1, 0, 1)]
    """
    spans = [[_find_spans(layout, run, receiver) for run in runs] for receiver, runs in enumerate(wanted)]
    return plan_spans(spans, rank)


def _find_spans(layout: Layout, run: Run, receiver: int) -> list[Span]:
    """Split ``run`` into consecutive parts, each held by one rank or by none.

    A replicated part is that of ``receiver``.
    """
    position, stop = run[0], run[0] + run[1]
    spans = []
    for held in _pieces_by_position(layout, receiver):
        low, high = max(position, held.start), min(stop, held.start + held.length)
        if low < high:
            if position < low:
                spans.append(Span(None, 0, low - position))
            spans.append(Span(held.owner, held.offset + low - held.start, high - low))
            position = high
    if position < stop:
        spans.append(Span(None, 0, stop - position))
    return spans


class _HeldPiece(NamedTuple):
    """The positions ``start`` to ``start + length``, which lie at ``offset`` of the tensor of the rank ``owner``."""

    start: int
    length: int
    owner: int
    offset: int


@lru_cache(maxsize=4096)
def _pieces_by_position(layout: Layout, receiver: int) -> tuple[_HeldPiece, ...]:
    """Return the pieces of all ranks by position; of the replicated ones, which all hold, those of ``receiver``."""
    table = []
    for owner, pieces in enumerate(layout.pieces):
        offsets = starts_of([piece.length for piece in pieces])
        for piece, offset in zip(pieces, offsets, strict=True):
            if not piece.replicated or owner == receiver:
                table.append(_HeldPiece(piece.start, piece.length, owner, offset))
    return tuple(sorted(table))


def start_exchange(
    x: Tensor, dim: int, plan: FetchPlan, ranks: MeshDim, *, fill: float = 0.0
) -> Callable[[], list[Tensor]]:
    """Start the all-to-all of ``plan``, unless it is local. Return a function that waits for it, and returns
    one tensor for each run that this rank fetches.

    Collective, unless the plan is local, which it is on all ranks or on none. ``x`` must not change before
    the returned function has been called, because parts may be sent from its memory, and this rank's own
    parts are taken then. Nor may it change in place afterwards while the results are used: a run that this
    rank holds itself, in one piece, is a view of ``x``.

    The backward is collective, too: ``x`` must require a gradient on all ranks or on none, and the loss of each
    rank must depend on all its runs. A rank whose backward does not reach the exchange leaves the others waiting.

    Args:
        x: This rank's tokens, along ``dim``.
        fill: Value of tokens that no rank holds.

    Raises:
        ValueError: ``x`` requires a gradient, and some rank fetches no run. All ranks raise if the ``x`` of
            all requires one.
    """
    if x.requires_grad and torch.is_grad_enabled() and not (plan.is_local or plan.has_runs):
        raise ValueError(
            "a gradient is needed, and some rank fetches no run. Its result would not depend on the exchange, so the "
            "other ranks would wait for it in the backward. Give that rank an empty run, such as (0, 0)."
        )
    tokens = x.movedim(dim, 0)
    size = tokens.shape[1:].numel()
    receive_sizes = [number * size for number in plan.receives]
    in_flight = None
    if not plan.is_local:
        parts = [tokens.narrow(0, *run).reshape(-1) for runs in plan.sends for run in runs]
        send_sizes = [sum([length for _, length in runs]) * size for runs in plan.sends]
        in_flight = start_all_to_all(_concatenate_vectors(parts, tokens), send_sizes, receive_sizes, ranks)

    def finish() -> list[Tensor]:
        received: Sequence[Tensor] = ()
        if in_flight is not None:
            received = wait(in_flight).split(receive_sizes)
        runs = _parts_of_runs(plan, tokens, received, ranks, fill)
        has_only_own_parts = not _receives(plan, ranks.index)
        if runs and received and has_only_own_parts and _needs_gradient(received[0]):
            # Without this part, which is empty, the result would not depend on the exchange. The backward would skip
            # it, and the other ranks would hang, as ``rows`` of test_exactness.py would on 2 × 2 ranks.
            runs[0].append(received[0].view(0, *tokens.shape[1:]))
        return [_concatenate(parts, tokens, dim) for parts in runs]

    return finish


def _parts_of_runs(
    plan: FetchPlan, tokens: Tensor, received: Sequence[Tensor], ranks: MeshDim, fill: float
) -> list[list[Tensor]]:
    """Return the parts of each run of ``plan``, with their tokens first: views of ``tokens``, which are this
    rank's own, and of ``received``, the vectors that each rank has sent; and tensors of ``fill``.
    """
    rest, size = tokens.shape[1:], tokens.shape[1:].numel()
    num_read = [0] * ranks.size
    runs = []
    for spans in plan.runs:
        parts = []
        for span in spans:
            if span.sender is None:
                parts.append(tokens.new_full((span.length, *rest), fill))
            elif span.sender == ranks.index:
                parts.append(tokens.narrow(0, span.start, span.length))
            else:
                # A rank sends its spans in the order of the runs, so they are read from the front on.
                start = num_read[span.sender]
                num_read[span.sender] += span.length
                part = received[span.sender].narrow(0, start * size, span.length * size)
                parts.append(part.view(span.length, *rest))
        runs.append(parts)
    return runs


def _needs_gradient(received: Tensor) -> bool:
    """Whether a backward may follow that must reach the exchange from which ``received`` comes."""
    # Whether a tensor of a graph needs a gradient is known only after the graph was traced.
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or received.requires_grad)


def _receives(plan: FetchPlan, rank: int) -> bool:
    """Whether ``rank`` fetches anything from other ranks."""
    return any(span.sender not in (None, rank) for spans in plan.runs for span in spans)


def _concatenate_vectors(parts: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Return the vectors ``parts`` as one contiguous vector; without any, an empty one that depends on ``tokens``."""
    if not parts:
        return tokens.narrow(0, 0, 0).reshape(-1)
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(list(parts))


def _concatenate(parts: Sequence[Tensor], tokens: Tensor, dim: int) -> Tensor:
    """Return ``parts``, each with its tokens first, as one tensor with its tokens along ``dim``."""
    moved = [part.movedim(0, dim) for part in parts or [tokens.narrow(0, 0, 0)]]
    if len(moved) == 1:
        return moved[0]
    return torch.cat(moved, dim)
