"""The gradient of attention to a block of keys that this rank holds, and of what is around it on one rank.

:func:`~para_core.attention.gradients.usp.compose_backward` nests these functions as
:func:`~para_core.attention.usp.compose` nests their forwards. Nothing here communicates. Tests:
tests/attention/test_gradients.py.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from para_core.attention.attend import Block, take_columns
from para_core.attention.blocks import expand_heads
from para_core.attention.finite_masks import FiniteMaskedRows
from para_core.attention.gradients.contract import Backward, QueryGradients
from para_core.attention.local import local_attention_backward
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.low_rows import hide_by_position
from para_core.attention.tiles import Tiling
from para_core.layout.runs import add_at, take
from para_core.option_values import Backend


def local_backward(backend: Backend | None, scale: float | None) -> Backward:
    """Return the gradient of :func:`~para_core.attention.blocks.attend_by_backend`, tile by tile."""

    def backward(into: QueryGradients, key: Tensor, value: Tensor, block: int) -> Block:
        tiling = into.tiling
        # Tiling.split returns views, one for each piece of the queries, so adding to a piece of the sums adds to
        # ``into``. The mask of ``into`` has rows of its queries only, or one row, which every piece gets whole.
        parts = [
            tiling.split(x)
            for x in (into.query, into.grad_out, into.out, into.lse[..., None], into.grad_query)
        ]
        rows = None
        if into.mask is not None:
            rows = tiling.split(into.mask)
        sums = None
        if into.grad_mask is not None:
            sums = tiling.split(into.grad_mask)
        grads = [x.new_zeros(x.shape, dtype=into.lse.dtype) for x in (key, value)]
        for piece, tile in tiling.tiles(block):
            query, grad_out, out, lse, grad_query = [of_pieces[piece] for of_pieces in parts]
            mask = None
            if rows is not None:
                mask = take_columns(rows[piece], tile.positions)
            keys, values = take(key, 2, tile.runs), take(value, 2, tile.runs)
            call = LocalAttentionCall(query, keys, values, mask, tile.is_causal, scale)
            of_query, of_key, of_value, of_mask = local_attention_backward(
                call, grad_out, out, lse[..., 0], backend=backend, mask_gradient=sums is not None
            )
            grad_query.add_(of_query)
            add_at(grads[0], 2, tile.runs, of_key)
            add_at(grads[1], 2, tile.runs, of_value)
            # With sums the gradient of the mask was asked for, and is a tensor. The second test is for mypy.
            if sums is None or of_mask is None:
                continue
            # Every tile has the whole of a mask with one column, whose gradient is a sum over the keys.
            if sums[piece].shape[3] == 1:
                sums[piece].add_(of_mask.sum_to_size(sums[piece].shape))
            else:
                add_at(sums[piece], 3, tile.positions, of_mask)
        return grads[0], grads[1]

    return backward


def key_heads_backward(block_backward: Backward) -> Backward:
    """Return the gradient of :func:`~para_core.attention.blocks.expand_key_heads` around attention with the
    gradient ``block_backward``.
    """

    def backward(into: QueryGradients, key: Tensor, value: Tensor, block: int) -> Block:
        heads = into.key_heads
        expanded = expand_heads(key, heads), expand_heads(value, heads)
        grads = block_backward(replace(into, key_heads=None), *expanded, block)
        if heads is None:
            return grads
        of_key, of_value = [
            grad.new_zeros(x.shape).index_add_(1, heads, grad)
            for x, grad in zip((key, value), grads, strict=True)
        ]
        return of_key, of_value

    return backward


def low_rows_backward(block_backward: Backward, of_mask: Tiling) -> Backward:
    """Return the gradient of :func:`~para_core.attention.low_rows.level_low_rows` around attention with the
    gradient ``block_backward``. The ``of_mask`` of both is the same.
    """

    def backward(into: QueryGradients, key: Tensor, value: Tensor, block: int) -> Block:
        low_rows = None
        if into.mask is not None:
            low_rows = FiniteMaskedRows.of(hide_by_position(into.mask, of_mask))
        if low_rows is None:
            return block_backward(into, key, value, block)
        query_rows = low_rows.take_rows(0, into.query.shape[2])
        grad_out, lse = query_rows.for_gradient(into.grad_out, into.lse)
        return block_backward(
            replace(into, grad_out=grad_out, lse=lse, mask=low_rows.mask), key, value, block
        )

    return backward
