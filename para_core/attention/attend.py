"""The contract of attention: a function that adds attention to a block of keys to an accumulator of out and
lse.

A function around such a function is such a function again:

- :func:`~para_core.attention.blocks.attend_by_backend` computes attention to a block that this rank holds;
- :meth:`RingStyle.over_ring <para_core.attention.ring_plan.RingStyle.over_ring>` of each style of a ring
  brings the blocks of other ranks, and calls the function that it is given for each;
- :func:`~para_core.attention.blocks.expand_key_heads` and
  :func:`~para_core.attention.low_rows.level_low_rows` change the keys or the mask, and leave the rest to the
  function that they are given.

:mod:`para_core.attention.gradients.contract` has the same contract for gradients. Its ``Backward`` and
``QueryGradients`` are the twins of :data:`Attend` and :class:`Accumulator`, and read the same masks: whoever
changes one of these here, or :class:`Mask`, changes the twin too.

:func:`para_core.attention.usp.compose` nests the functions of a call. Tests: tests/attention/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from para_core.attention.finite_masks import FiniteMaskedRows
from para_core.attention.local import local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.merge import Merged
from para_core.attention.tiles import Tile, Tiling
from para_core.layout.runs import join_neighbours, take
from para_core.layout.sequence import Run

Block = tuple[Tensor, Tensor]  # The keys and the values of a block, or their gradients.
# Called as attend(into, key, value, block, is_last): adds attention to a block to the Accumulator ``into``.
# ``block`` is the number of the block in ``into.tiling``: 0 for this rank's own keys. If the block
# ``is_last``, the result may be rounded to the dtype of query. So a caller passes True at most once for an
# accumulator, with the last block, and only if nothing is merged after it. A function that calls another one
# several times passes True with its last call only, and only if its own caller did.
Attend = Callable[["Accumulator", Tensor, Tensor, int, bool], None]


@dataclass(frozen=True)
class Mask:
    """The mask tensor of some queries. The positional masks of the call are those of its Tiling.

    Args:
        tensor: ``[B or 1, H or 1, S_q or 1, total or 1]``, bool or float. Rows are in the order of the
            queries; they may be followed by rows of other queries. Columns are positions in the whole
            sequence.
        convert: Called as ``convert(part, query)`` with the part of the mask for a tile and its queries;
            returns the mask of the tile. None to leave the part as it is.
        hides_rows: Whether the converted mask may hide all keys of a row.
        low_rows: The rows whose lse :func:`~para_core.attention.blocks.attend_by_function` corrects, if any.
    """

    tensor: Tensor
    convert: Callable[[Tensor, Tensor], Tensor] | None = None
    hides_rows: bool = True
    low_rows: FiniteMaskedRows | None = None

    def take_rows(self, first: int, length: int) -> Mask:
        """Return the mask of the ``length`` queries from ``first`` on; all of it if one row is for all queries."""
        if self.tensor.shape[2] == 1 or (first == 0 and length == self.tensor.shape[2]):
            return self
        low_rows = None
        if self.low_rows is not None:
            low_rows = self.low_rows.take_rows(first, length)
        return replace(self, tensor=self.tensor.narrow(2, first, length), low_rows=low_rows)


def take_columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """Return the columns of ``mask`` at the runs ``(start, length)``, or ``mask`` itself if it has one column."""
    if mask.shape[-1] == 1:
        return mask
    return take(mask, -1, join_neighbours(positions))


class Accumulator:
    """The result of some queries for the blocks of keys that were added so far, merged by lse.

    The queries are split into the pieces of ``tiling``, and each piece has a partial result of its own.

    Args:
        query: ``[B, H, S_q, D]``.
        mask: The mask of the queries; rows of other queries may follow. None if there is no mask tensor.
        tiling: Which queries see which keys of each block.
        key_heads: ``[H]``, the key head of each query head; None if heads are grouped evenly.

    Attributes:
        merged: One partial result for each piece of the queries.
        received: Tensors from other ranks, on which the result must depend in autograd, or a rank that uses
            none of them would leave out the collective of the backward. The ring styles append them.
        results_of_others: Results ``(out, lse)`` of all queries that other ranks computed, still to be
            merged. :mod:`.grid_2d` appends them.
        last_steps: Functions that change the merged ``(out, lse)`` in place, called by :meth:`finish`. Only
            for attention that autograd does not record. :func:`~para_core.attention.low_rows.level_low_rows`
            appends one.
    """

    queries: list[Tensor]  # The queries of each piece.
    rows: list[Tensor] | None  # The rows of the mask for each piece.
    low_rows: list[FiniteMaskedRows] | None  # Mask.low_rows for each piece.

    def __init__(
        self, query: Tensor, mask: Mask | None, tiling: Tiling, key_heads: Tensor | None = None
    ) -> None:
        self.query, self.mask, self.tiling, self.key_heads = query, mask, tiling, key_heads
        self.merged = [Merged()]
        if tiling.masks:
            self.merged = [Merged() for _ in tiling.pieces]
        self.received: list[Tensor] = []
        self.results_of_others: list[tuple[Tensor, Tensor]] = []
        self.last_steps: list[Callable[[Tensor, Tensor], None]] = []
        self.queries, self.rows, self.low_rows = [query], None, None
        if tiling.masks or mask is not None:
            self._split()

    def _split(self) -> None:
        self.queries = self.tiling.split(self.query)
        self.rows, self.low_rows = None, None
        if self.mask is not None:
            mask = self.mask.take_rows(0, self.query.shape[2])
            self.rows = self.tiling.split(mask.tensor)
            if mask.low_rows is not None:
                self.low_rows = mask.low_rows.split(self.tiling.split)

    def with_inputs(self, query: Tensor, mask: Mask | None) -> Accumulator:
        """Return an accumulator with other inputs, whose results are added to this one.

        Both share the objects in which results are collected, so that only this one needs to be finished. So
        ``query`` must hold the same heads and rows in the same order, and ``mask`` their rows: results are
        merged piece by piece.
        """
        # Not by __init__, which would make new objects for the results. Whoever adds an attribute there sets
        # it here, too: shared if it collects results. A shared list is only changed in place, never replaced.
        other = object.__new__(Accumulator)
        other.query, other.mask, other.tiling, other.key_heads = query, mask, self.tiling, self.key_heads
        other.merged, other.received = self.merged, self.received
        other.results_of_others, other.last_steps = self.results_of_others, self.last_steps
        other._split()
        return other

    def mask_of_tile(self, piece: int, tile: Tile) -> Tensor | None:
        """Return the mask of a tile, for the queries of a piece."""
        if self.rows is None or self.mask is None:
            return None
        part = take_columns(self.rows[piece], tile.positions)
        if self.mask.convert is None:
            return part
        return self.mask.convert(part, self.queries[piece])

    def finish(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, H, S_q, D_v]`` and lse ``[B, H, S_q]``. Out has the dtype of lse if merging has
        not rounded it yet, otherwise that of query. If this differs between pieces, it is the dtype of lse
        for all of them, to which ``torch.cat`` promotes.

        Call this once, because ``last_steps`` change the result in place.

        The result of queries that saw no key gets its shape and dtype from ``key`` and ``value`` of any
        block.
        """
        first = self.merged[0]
        if len(self.merged) == 1 and first.count:
            out, lse = first.out, first.lse
        else:
            results = []
            for query, merged in zip(self.queries, self.merged, strict=True):
                if merged.count:
                    results.append((merged.out, merged.lse))
                else:
                    nothing = LocalAttentionCall(query, key[:, :, :0], value[:, :, :0])
                    results.append(local_attention_with_lse(nothing))
            out, lse = (self.tiling.join(parts) for parts in zip(*results, strict=True))
        if self.results_of_others:
            total = Merged()
            for partial_result in ((out, lse), *self.results_of_others):
                total.add(*partial_result)
            out, lse = total.out, total.lse
        # This may write in place: attention has just made these tensors, and autograd has not saved them.
        for change in self.last_steps:
            change(out, lse)
        return out, lse


@dataclass(frozen=True)
class Saved:
    """The tensors of the forward that the backward needs, after the Ulysses exchange: ``[B, H_local, S, …]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
