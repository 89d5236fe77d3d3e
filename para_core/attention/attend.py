"""The contract of attention: a pair of functions that work on a block of keys, and what they accumulate.

``forward`` adds attention to the keys of a block to an :class:`Accumulator` of out and lse. ``backward``
returns the gradients of the keys and values of a block, and adds those of queries and mask to
:class:`QueryGradients`, which holds out and lse over *all* keys. With these two numbers the gradient is
additive over blocks of keys (FlashAttention, arXiv:2205.14135, appendix B). So a function around such a pair
is such a pair again:

- :func:`~para_core.attention.blocks.local` computes a block that this rank holds;
- :func:`~para_core.attention.ring.ring` and :func:`~para_core.attention.grid_2d.grid_2d` bring the blocks of
  other ranks, and call the pair that they are given for each;
- :func:`~para_core.attention.blocks.expand_key_heads` and
  :func:`~para_core.attention.finite_masks.keep_low_rows` change the keys or the mask, and leave the rest to
  the pair that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.attention.finite_masks import FiniteMaskedRows
from para_core.attention.local import add_autograd_dependency, local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.merge import Merged
from para_core.attention.tiles import Tile, Tiling
from para_core.layout.runs import join_neighbours, take
from para_core.layout.sequence import Run

Block = tuple[Tensor, Tensor]  # The keys and the values of a block, or their gradients.


class Attend(NamedTuple):
    """Attention as a pair of functions; see the top of this file.

    ``forward(into, key, value, block, is_last)`` adds attention to a block to the Accumulator ``into``.
    ``block`` is the number of the block in ``into.tiling``: 0 for this rank's own keys. If the block
    ``is_last``, the result may be rounded to the dtype of query. ``backward(into, key, value, block)``
    returns the gradients of key and value in the dtype of lse.
    """

    forward: Callable[[Accumulator, Tensor, Tensor, int, bool], None]
    backward: Callable[[QueryGradients, Tensor, Tensor, int], Block]


@dataclass(frozen=True)
class Mask:
    """The mask tensor of some queries. The positional masks of the call are those of its Tiling.

    Args:
        tensor: ``[B or 1, H or 1, S_q or 1, total or 1]``, bool or float. Rows are in the order of the
            queries; they may be followed by rows of other queries. Columns are positions in the whole
            sequence.
        of_tile: Converts the part of the mask for a tile, given the queries; None to leave it as it is.
        hides_rows: Whether the converted mask may hide all keys of a row.
        low_rows: The rows whose lse :func:`~para_core.attention.blocks.of_function` has to correct, if any.
    """

    tensor: Tensor
    of_tile: Callable[[Tensor, Tensor], Tensor] | None = None
    hides_rows: bool = True
    low_rows: FiniteMaskedRows | None = None

    def rows(self, first: int, length: int) -> Mask:
        """Return the mask of the ``length`` queries from ``first`` on."""
        if self.tensor.shape[2] == 1 or (first == 0 and length == self.tensor.shape[2]):
            return self
        low_rows = None
        if self.low_rows is not None:
            low_rows = self.low_rows.rows(first, length)
        return replace(self, tensor=self.tensor.narrow(2, first, length), low_rows=low_rows)


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """Return the columns of ``mask`` at the runs ``(start, length)``, or ``mask`` itself if it has one column."""
    if mask.shape[-1] == 1:
        return mask
    return take(mask, -1, join_neighbours(positions))


class Accumulator:
    """The result of some queries for the blocks of keys that were added so far, merged by lse.

    Args:
        query: ``[B, H, S_q, D]``.
        mask: The mask of the queries; rows of other queries may follow. None if there is no mask tensor.
        tiling: Which queries see which keys of each block.
        key_heads: ``[H]``, the key head of each query head; None if heads are grouped evenly.

    Attributes:
        merged: One partial result for each piece of the queries.
        received: Tensors from other ranks, on which the result depends in autograd.
        of_others: Results ``(out, lse)`` of all queries that other ranks computed, still to be merged.
        last_steps: Functions that change the merged ``(out, lse)`` in place.
    """

    queries: list[Tensor]  # The queries of each piece.
    rows: list[Tensor] | None  # The rows of the mask for each piece.
    low_rows: list[FiniteMaskedRows] | None  # Those of Mask.low_rows for each piece.

    def __init__(
        self, query: Tensor, mask: Mask | None, tiling: Tiling, key_heads: Tensor | None = None
    ) -> None:
        self.query, self.mask, self.tiling, self.key_heads = query, mask, tiling, key_heads
        self.merged = [Merged()]
        if tiling.masks:
            self.merged = [Merged() for _ in tiling.pieces]
        self.received: list[Tensor] = []
        self.of_others: list[tuple[Tensor, Tensor]] = []
        self.last_steps: list[Callable[[Tensor, Tensor], None]] = []
        self.queries, self.rows, self.low_rows = [query], None, None
        if tiling.masks or mask is not None:
            self._split()

    def _split(self) -> None:
        self.queries = self.tiling.split(self.query)
        self.rows, self.low_rows = None, None
        if self.mask is not None:
            mask = self.mask.rows(0, self.query.shape[2])
            self.rows = self.tiling.split(mask.tensor)
            if mask.low_rows is not None:
                self.low_rows = mask.low_rows.split(self.tiling.split)

    def with_inputs(self, query: Tensor, mask: Mask | None) -> Accumulator:
        """Return an accumulator with other inputs, whose results are added to this one."""
        other = object.__new__(Accumulator)
        other.query, other.mask, other.tiling, other.key_heads = query, mask, self.tiling, self.key_heads
        other.merged, other.received = self.merged, self.received
        other.of_others, other.last_steps = self.of_others, self.last_steps
        other._split()
        return other

    def mask_of_tile(self, piece: int, tile: Tile) -> Tensor | None:
        """Return the mask of a tile, for the queries of a piece."""
        if self.rows is None or self.mask is None:
            return None
        part = columns(self.rows[piece], tile.positions)
        if self.mask.of_tile is None:
            return part
        return self.mask.of_tile(part, self.queries[piece])

    def result(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, H, S_q, D_v]``, in float32 if partial results were merged, and lse ``[B, H,
        S_q]``.

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
        if self.of_others:
            total = Merged()
            for partial_result in ((out, lse), *self.of_others):
                total.add(*partial_result)
            out, lse = total.out, total.lse
        for change in self.last_steps:
            change(out, lse)
        return out, lse

    def rounded_result(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`result` with out in the dtype of query; in autograd it depends on all that was received."""
        out, lse = self.result(key, value)
        if out.dtype != self.query.dtype:
            out = out.to(self.query.dtype)
        if torch.is_grad_enabled():
            out = add_autograd_dependency(out, [self.query, key, value, *self.received])
        return out, lse


@dataclass(frozen=True)
class Saved:
    """The tensors of the forward that the backward needs, after the Ulysses exchange: ``[B, H_local, S, …]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class QueryGradients:
    """The gradients of some queries and of their mask, summed over the blocks so far, in the dtype of lse.

    Args:
        grad_out, query, out, lse: The gradient of the output, the queries, and their results over the keys of
            all ranks.
        mask: The mask tensor of the queries, or None.
        tiling, key_heads: As of :class:`Accumulator`.
        grad_query, grad_mask: The sums; ``grad_mask`` is None if it is not wanted.
    """

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    mask: Tensor | None
    tiling: Tiling
    key_heads: Tensor | None
    grad_query: Tensor
    grad_mask: Tensor | None

    @staticmethod
    def of(
        grad_out: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        tiling: Tiling,
        *,
        key_heads: Tensor | None,
        mask_gradient: bool,
    ) -> QueryGradients:
        """Return the gradients before any block: zeros.
        ``mask_gradient`` asks for the gradient of ``mask``.
        """
        grad_mask = None
        if mask_gradient and mask is not None:
            grad_mask = torch.zeros_like(mask, dtype=lse.dtype)
        zeros = torch.zeros_like(query, dtype=lse.dtype)
        return QueryGradients(grad_out, query, out, lse, mask, tiling, key_heads, zeros, grad_mask)
