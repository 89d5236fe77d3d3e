"""A block of queries and one block of keys after the other, on one device: what the ways to bring blocks together share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from para_core.attention.backend_selection import Backend
from para_core.attention.finite_masks import FiniteMaskedRows
from para_core.attention.local import continued_attention, local_attention_backward, local_attention_with_lse
from para_core.attention.merge import Merged
from para_core.attention.tiles import Tiling, join_neighbours, put, take
from para_core.distributed.layout import Run

# (query, key, value, *, mask, is_causal, scale) -> out, lse: a user's own.
LocalAttention = Callable[..., tuple[Tensor, Tensor]]
Block = tuple[Tensor, Tensor]  # keys and values


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """The columns of keys at these positions, of a mask for all keys."""
    return mask if mask.shape[-1] == 1 else take(mask, -1, join_neighbours(positions))


def expand(x: Tensor, heads: Tensor | None) -> Tensor:
    """``x`` ``[B, H_kv, S, D]`` with the key head of each query head, where these are not grouped evenly."""
    return x if heads is None else x.index_select(1, heads)


def add_autograd_dependency(x: Tensor, received: Sequence[Tensor]) -> Tensor:
    """``x`` and nothing of ``received``: but if autograd follows these, they have a gradient of 0, on every rank.

    A rank that needs nothing of what it got would otherwise not join in that collective's backward.
    """
    if not torch.is_grad_enabled():
        return x
    for tensor in received:
        if tensor.requires_grad:
            x = x + tensor[:0].sum().to(x.dtype)
    return x


class BlockAttention:
    """Attention of a block of queries to the blocks of keys that come, split as ``tiling`` says.

    Args:
        query: ``[B, H, S_q, D]``.
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``: rows as ``query``, columns by position in the whole sequence.
        heads: the key head of each query head, ``[H]``; None if they are grouped evenly.
        attn_func: computes attention on one device; None: ``backend``.
    """

    def __init__(
        self,
        query: Tensor,
        mask: Tensor | None,
        tiling: Tiling,
        *,
        scale: float | None,
        backend: Backend | None,
        heads: Tensor | None = None,
        attn_func: LocalAttention | None = None,
    ) -> None:
        self._tiling, self._scale, self._backend, self._heads = tiling, scale, backend, heads
        self._queries = tiling.split(query) if tiling.by_position else [query]
        finite_rows = None if mask is None else FiniteMaskedRows.of(mask)
        self._finite_rows: Sequence[FiniteMaskedRows | None] = (
            [None] * len(self._queries) if finite_rows is None else finite_rows.split(tiling.split)
        )
        self._rows: Sequence[Tensor | None] = [None] * len(self._queries)
        if mask is not None:
            self._rows = tiling.split(mask if finite_rows is None else finite_rows.mask)
        self._merged = [Merged() for _ in self._queries]
        # Where the lse of a partial result is to be corrected, it must not be merged yet.
        self._continues = attn_func is None and finite_rows is None
        self._attn_func = partial(local_attention_with_lse, backend=backend) if attn_func is None else attn_func

    def add(self, block: Block, step: int, *, is_last: bool = False) -> None:
        """Attend to a block of keys ``[B, H_kv, S_k, D]`` and values ``[B, H_kv, S_k, D_v]``, that of the tiling's ``step``.

        Args:
            is_last: no other block follows: the result may be rounded to query's dtype.
        """
        by_position = self._tiling.by_position
        k, v = block
        if by_position or self._heads is not None:
            k, v = [expand(self._tiling.keys[step].arrange(x), self._heads) for x in block]
        if not by_position and self._continues and self._rows[0] is None:
            # One tile is all keys of the block, as they lie.
            continued_attention(
                self._merged[0], self._queries[0], k, v, scale=self._scale, backend=self._backend, is_last=is_last
            )
            return
        for piece, tile in self._tiling.tiles(step):
            rows = self._rows[piece]
            mask = None if rows is None else columns(rows, tile.positions)
            tensors = (
                self._queries[piece],
                take(k, 2, tile.runs) if by_position else k,
                take(v, 2, tile.runs) if by_position else v,
            )
            if self._continues:
                continued_attention(
                    self._merged[piece],
                    *tensors,
                    mask=mask,
                    is_causal=tile.diagonal,
                    scale=self._scale,
                    backend=self._backend,
                    is_last=is_last and not by_position,
                )
                continue
            out, lse = self._attn_func(*tensors, mask=mask, is_causal=tile.diagonal, scale=self._scale)
            finite_rows = self._finite_rows[piece]
            if finite_rows is not None and mask is not None:
                lse = finite_rows.lse_of_tile(lse, mask, diagonal=tile.diagonal)
            self._merged[piece].add(out, lse)

    def result(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, H, S_q, D_v]``, in float32 where partial results were merged, and lse ``[B, H, S_q]``.

        Args:
            key, value: any block, for queries that saw none.
        """
        nothing = key[:, :, :0], value[:, :, :0]
        results = [
            (merged.out, merged.lse) if merged.count else local_attention_with_lse(q, *nothing)
            for q, merged in zip(self._queries, self._merged, strict=True)
        ]
        if not self._tiling.by_position:
            return results[0]
        return self._tiling.join([out for out, _ in results]), self._tiling.join([lse for _, lse in results])


def rows_of_pieces(mask: Tensor | None, tiling: Tiling) -> Sequence[Tensor | None]:
    """The rows of ``mask`` for each piece of the queries."""
    return [None] * len(tiling.pieces) if mask is None else tiling.split(mask)


class BlockGradients:
    """The gradient of :class:`BlockAttention`, block of keys by block of keys.

    Args:
        grad_out, out: ``[B, H, S_q, D_v]``; out and ``lse`` ``[B, H, S_q]`` over all keys, those of other ranks too.
        mask_gradient: find that of ``mask``, too.
    """

    def __init__(
        self,
        grad_out: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        tiling: Tiling,
        *,
        scale: float | None,
        backend: Backend | None,
        heads: Tensor | None = None,
        mask_gradient: bool = False,
    ) -> None:
        self._tiling, self._scale, self._backend, self._heads = tiling, scale, backend, heads
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
        """The gradients of a block of keys and values, in the dtype of lse; those of queries and mask are added up."""
        order = self._tiling.keys[step]
        key, value = (order.arrange(x) for x in block)
        grads = [x.new_zeros(x.shape, dtype=self._pieces[0].lse.dtype) for x in (key, value)]
        key, value = expand(key, self._heads), expand(value, self._heads)
        for number, tile in self._tiling.tiles(step):
            piece = self._pieces[number]
            grad_query, *grad_block, grad_mask = local_attention_backward(
                piece.grad_out,
                piece.query,
                take(key, 2, tile.runs),
                take(value, 2, tile.runs),
                piece.out,
                piece.lse[..., 0],
                mask=None if piece.mask is None else columns(piece.mask, tile.positions),
                is_causal=tile.diagonal,
                scale=self._scale,
                backend=self._backend,
                mask_gradient=piece.grad_mask is not None,
            )
            piece.grad_query.add_(grad_query)
            for total, grad in zip(grads, grad_block, strict=True):
                put(total, 2, tile.runs, grad, self._heads)
            if piece.grad_mask is not None and grad_mask is not None:
                piece.add_to_mask(grad_mask, tile.positions)
        return [order.restore(grad) for grad in grads]

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of query and, if asked for, of mask, in the dtype of lse."""
        grad_query = self._tiling.join([piece.grad_query for piece in self._pieces])
        of_rows = [piece.grad_mask for piece in self._pieces if piece.grad_mask is not None]
        if not of_rows:
            return grad_query, None
        return grad_query, torch.stack(of_rows).sum(0) if self._mask_is_broadcast else self._tiling.join(of_rows)


@dataclass(frozen=True)
class _QueryGroup:
    """Queries that see the same keys of every block; gradients, in the dtype of lse, are added up in place."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor  # [B, H, S_q, 1]
    mask: Tensor | None
    grad_query: Tensor
    grad_mask: Tensor | None

    def add_to_mask(self, grad: Tensor, positions: Sequence[Run]) -> None:
        """Add the gradient of a mask's columns at ``positions``, ``[B, H, S_q, S_k]``."""
        if self.grad_mask is None:
            return
        if self.grad_mask.shape[3] == 1:
            self.grad_mask.add_(grad.sum_to_size(self.grad_mask.shape))
        else:
            put(self.grad_mask, 3, positions, grad)
