"""Attention of one rank's queries to key blocks that arrive one after the other, as in a ring and in Attention2D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.backends import LocalAttentionCall, bias_dtype
from para_core.attention.finite_masks import (
    FiniteMaskedRows,
    can_be_finite,
    clear_rows_without_key,
    finite_bias,
    level_rows,
)
from para_core.attention.local import continued_attention, local_attention_backward, local_attention_with_lse
from para_core.attention.merge import Merged
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling
from para_core.layout.runs import join_neighbours, put, take
from para_core.layout.sequence import Run

# A function that replaces the backends of local attention; it returns (out, lse).
LocalAttention = Callable[[LocalAttentionCall], tuple[Tensor, Tensor]]
Block = tuple[Tensor, Tensor]  # The keys and the values of a block.


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """Return the columns of ``mask`` at the runs ``(start, length)``, or ``mask`` itself if it has one column."""
    return mask if mask.shape[-1] == 1 else take(mask, -1, join_neighbours(positions))


def expand(x: Tensor, heads: Tensor | None) -> Tensor:
    """Return ``x``, ``[B, H_kv, S, D]``, with key head ``heads[i]`` for query head i, or ``x`` itself without heads."""
    return x if heads is None else x.index_select(1, heads)


@dataclass(frozen=True)
class Saved:
    """The tensors of the forward that the backward needs, after the Ulysses exchange: ``[B, H_local, S, …]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class BlockAttention:
    """Attention of one set of queries to key blocks that are added one by one. Partial results are merged by lse.

    Args:
        query, mask, heads, attn_func: The arguments of :func:`~para_core.attention.ring.ring_attention`.
        tiling: Which queries see which keys of each block.
        spec: The specification of the call; its scale and backend are used.
    """

    def __init__(
        self,
        query: Tensor,
        mask: Tensor | None,
        tiling: Tiling,
        spec: AttentionSpec,
        *,
        heads: Tensor | None,
        attn_func: LocalAttention | None,
    ) -> None:
        self._tiling, self._scale, self._backend, self._heads = tiling, spec.scale, spec.options.backend, heads
        self._attn_func = attn_func
        # The lse of each block is corrected only for a user's function. Otherwise the mask is changed beforehand, in a
        # way that has no gradient, but needs fewer launches.
        finite_rows = None if attn_func is None else FiniteMaskedRows.of(mask)
        if finite_rows is not None:
            mask = finite_rows.mask
        self._bias_dtype, self._converts_tiles = None, False
        if attn_func is None and mask is not None:
            is_finite = self._is_of_pytorch and can_be_finite(mask, query)
            self._bias_dtype = bias_dtype(mask, query) if is_finite else None
            if mask.dtype != torch.bool:
                # By position, numbers that a smaller dtype rounds to -inf may be all that a query sees.
                rounds = self._bias_dtype is not None and not tiling.by_position
                query, mask = level_rows(query, mask, bias_dtype(mask, query) if rounds else mask.dtype)
            # Convert a mask of keys at once. One with a row per query would need too much memory.
            self._converts_tiles = is_finite and mask.shape[2] > 1
            if is_finite and not self._converts_tiles:
                mask = finite_bias(mask, query, by_position=tiling.by_position)
        self._queries = tiling.split(query) if tiling.by_position else [query]
        self._rows = rows_of_pieces(mask, tiling)
        self._finite_rows: Sequence[FiniteMaskedRows | None] = (
            [None] * len(self._queries) if finite_rows is None else finite_rows.split(tiling.split)
        )
        self._merged = [Merged() for _ in self._queries]

    @property
    def _is_of_pytorch(self) -> bool:
        """Whether PyTorch computes each block. Its backends fail for rows without a key, and the others do not."""
        return self._backend not in ("triton", "triton-int8")

    def add(self, block: Block, step: int, *, is_last: bool = False) -> None:
        """Merge attention to the key block with index ``step`` into the result.

        If the block ``is_last``, the result may be rounded to the dtype of query.
        """
        by_position = self._tiling.by_position
        k, v = block
        if by_position or self._heads is not None:
            k, v = [expand(self._tiling.keys[step].arrange(x), self._heads) for x in block]
        if not by_position and self._attn_func is None and self._rows[0] is None:
            # All queries see all keys of the block, so one call computes it.
            call = LocalAttentionCall(self._queries[0], k, v, scale=self._scale)
            continued_attention(self._merged[0], call, self._backend, is_last=is_last)
            return
        for piece, tile in self._tiling.tiles(step):
            rows = self._rows[piece]
            mask = None if rows is None else columns(rows, tile.positions)
            if mask is not None and self._converts_tiles:
                mask = finite_bias(mask, self._queries[piece], by_position=by_position)
            keys, values = [take(x, 2, tile.runs) if by_position else x for x in (k, v)]
            call = LocalAttentionCall(self._queries[piece], keys, values, mask, tile.diagonal, self._scale)
            if self._attn_func is None:
                is_final, hides_rows = is_last and not by_position, self._bias_dtype is None
                continued_attention(self._merged[piece], call, self._backend, is_last=is_final, hides_rows=hides_rows)
                continue
            out, lse = self._attn_func(call)
            finite_rows = self._finite_rows[piece]
            if finite_rows is not None and mask is not None:
                lse = finite_rows.lse_of_tile(lse, mask, keys.shape[2], diagonal=tile.diagonal)
            self._merged[piece].add(out, lse)

    def result(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, H, S_q, D_v]``, in float32 if partial results were merged, and lse ``[B, H, S_q]``.

        The result of queries that saw no key gets its shape and dtype from ``key`` and ``value`` of any block.
        """
        nothing = key[:, :, :0], value[:, :, :0]
        results = [
            (merged.out, merged.lse) if merged.count else local_attention_with_lse(LocalAttentionCall(q, *nothing))
            for q, merged in zip(self._queries, self._merged, strict=True)
        ]
        out, lse = results[0]
        if self._tiling.by_position:
            out, lse = (self._tiling.join(parts) for parts in zip(*results, strict=True))
        if self._bias_dtype is not None:
            clear_rows_without_key(out, lse, self._bias_dtype)
        return out, lse


def rows_of_pieces(mask: Tensor | None, tiling: Tiling) -> Sequence[Tensor | None]:
    """Split the rows of ``mask`` into one part for each piece of the queries; each part is None if ``mask`` is."""
    return [None] * len(tiling.pieces) if mask is None else tiling.split(mask)


class BlockGradients:
    """The backward of :class:`BlockAttention`, one key block at a time, with the same arguments.

    ``out`` and ``lse`` are the results over the keys of all ranks. ``mask_gradient`` asks for the gradient of ``mask``.
    """

    def __init__(
        self,
        grad_out: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        tiling: Tiling,
        spec: AttentionSpec,
        *,
        heads: Tensor | None,
        mask_gradient: bool,
    ) -> None:
        self._tiling, self._scale, self._backend, self._heads = tiling, spec.scale, spec.options.backend, heads
        self._mask_is_broadcast = mask is not None and mask.shape[2] == 1
        finite_rows = FiniteMaskedRows.of(mask)
        if finite_rows is not None:
            mask = finite_rows.mask
            grad_out, lse = finite_rows.for_gradient(grad_out, lse)
        queries, grads, outs, lses = [tiling.split(x) for x in (query, grad_out, out, lse[..., None])]
        self._pieces = [
            _QueryGroup(
                queries[number],
                grads[number],
                outs[number],
                lses[number],
                rows,
                grad_query=torch.zeros_like(queries[number], dtype=lse.dtype),
                grad_mask=torch.zeros_like(rows, dtype=lse.dtype) if mask_gradient and rows is not None else None,
            )
            for number, rows in enumerate(rows_of_pieces(mask, tiling))
        ]

    def add(self, block: Block, step: int) -> list[Tensor]:
        """Return the gradients of a block's keys and values in the dtype of lse; accumulate those of query and mask."""
        order = self._tiling.keys[step]
        key, value = (order.arrange(x) for x in block)
        grads = [x.new_zeros(x.shape, dtype=self._pieces[0].lse.dtype) for x in (key, value)]
        key, value = expand(key, self._heads), expand(value, self._heads)
        for number, tile in self._tiling.tiles(step):
            piece = self._pieces[number]
            mask = None if piece.mask is None else columns(piece.mask, tile.positions)
            tensors = piece.query, take(key, 2, tile.runs), take(value, 2, tile.runs)
            grad_query, *grad_block, grad_mask = local_attention_backward(
                LocalAttentionCall(*tensors, mask, tile.diagonal, self._scale),
                piece.grad_out,
                piece.out,
                piece.lse[..., 0],
                backend=self._backend,
                mask_gradient=piece.grad_mask is not None,
            )
            piece.grad_query.add_(grad_query)
            for total, grad in zip(grads, grad_block, strict=True):
                put(total, 2, tile.runs, grad, self._heads)
            if piece.grad_mask is not None and grad_mask is not None:
                if piece.grad_mask.shape[3] == 1:
                    piece.grad_mask.add_(grad_mask.sum_to_size(piece.grad_mask.shape))
                else:
                    put(piece.grad_mask, 3, tile.positions, grad_mask)
        return [order.restore(grad) for grad in grads]

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of query and mask in the dtype of lse; None for mask without ``mask_gradient``."""
        grad_query = self._tiling.join([piece.grad_query for piece in self._pieces])
        of_rows = [piece.grad_mask for piece in self._pieces if piece.grad_mask is not None]
        if not of_rows:
            return grad_query, None
        return grad_query, torch.stack(of_rows).sum(0) if self._mask_is_broadcast else self._tiling.join(of_rows)


@dataclass(frozen=True)
class _QueryGroup:
    """The tensors of queries that see the same keys, and the gradients summed so far, which have the dtype of lse."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor  # [B, H, S_q, 1]
    mask: Tensor | None
    grad_query: Tensor
    grad_mask: Tensor | None
