"""The gradient of Attention2D.

In the backward, queries are sent together with out, its gradient and lse; keys are sent as in the forward.
Gradients return in float32 (4 bytes), or in float64 for float64 inputs:

    queries:                       B · H · (e · (D + 2 · D_v) + 4) · S_i · (c - 1)  (4 for lse; 8 if it is float64)
    gradients of queries:          4 · B · H · D · Σ_row S_j
    keys and values:               B · e · H_kv · (D + D_v) · T_i · (r - 1)
    gradients of keys and values:  4 · B · H_kv · (D + D_v) · Σ_column T_j

``Grid2D.gradient`` in :mod:`para_core.attention.grid_2d` names this function, and the composition of
gradients (:mod:`para_core.attention.gradients.usp`) calls it. ``tests/attention/test_grid_2d.py`` counts the
bytes, ``tests/attention/test_gradients.py`` compares the numbers with one device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.gradients.contract import Backward, QueryGradients, add_to_sent_keys
from para_core.attention.grid_2d import (
    Grid2D,
    join_by_token,
    split_by_head,
    start_copies,
    start_parts,
    view_as_lse,
    view_lse_as,
)
from para_core.layout.runs import take


def grid_2d_backward(block_backward: Backward, grid: Grid2D) -> Backward:
    """Return the gradient of :meth:`Grid2D.over_ring` of attention with the gradient ``block_backward``."""
    if grid.row:
        return partial(_gradients_in_grid, block_backward, grid)
    return partial(_gradients_in_column, block_backward, grid)


def _gradients_in_column(
    block_backward: Backward, grid: Grid2D, into: QueryGradients, key: Tensor, value: Tensor, _: int
) -> Block:
    """Return what :func:`_gradients_in_grid` returns, in a grid of one column, in which no query is sent.
    Collective: an all-to-all of keys, and one of their gradients.
    """
    sent_keys = take(key, 2, grid.plan.sent_runs), take(value, 2, grid.plan.sent_runs)
    arriving = start_copies(join_by_token(*sent_keys), grid.column, grid.column_sizes, grid.plan.dim)
    own_grads = block_backward(into, key, value, 0)
    keys, values = split_by_head(arriving.wait(), key.shape[3], value.shape[3])
    _return_gradients(grid, own_grads, block_backward(into, keys, values, 1))
    return own_grads


def _gradients_in_grid(
    block_backward: Backward, grid: Grid2D, into: QueryGradients, key: Tensor, value: Tensor, _: int
) -> Block:
    """Return the gradients of this rank's keys and values. Accumulate those of query and mask in ``into``.
    Collective.

    All ranks start the same all-to-alls in the same order: of the row's queries, of the column's keys, of the
    gradients of queries, of the gradients of keys. Each rank has others in its row, unless the grid has one
    column, and in its column, because ``choose_grid`` never returns a single row. ``into.mask`` has the rows
    of this rank's queries, then those of the row's other ranks.
    """
    query, dim, sizes = into.query, grid.plan.dim, grid.row_sizes
    num_own, width, value_width = query.shape[2], query.shape[3], value.shape[3]
    sent_keys = take(key, 2, grid.plan.sent_runs), take(value, 2, grid.plan.sent_runs)
    # All of the dtype of query, or torch.cat would convert the bits of lse.
    sent = join_by_token(query, into.grad_out, into.out, view_lse_as(into.lse, query.dtype))
    arriving_queries = start_copies(sent, grid.row, sizes, dim)
    arriving_keys = start_copies(join_by_token(*sent_keys), grid.column, grid.column_sizes, dim)
    own = replace(
        into, mask=_take_rows(into.mask, 0, num_own), grad_mask=_take_rows(into.grad_mask, 0, num_own)
    )
    own_grads = block_backward(own, key, value, 0)
    others = _queries_of_row(grid, into, arriving_queries.wait(), value_width)
    add_to_sent_keys(own_grads, block_backward(others, *sent_keys, 0), grid.plan)
    keys, values = split_by_head(arriving_keys.wait(), width, value_width)
    grads_of_others = block_backward(others, keys, values, 1)
    returning = start_parts(join_by_token(others.grad_query), grid.row, sizes, [num_own] * len(grid.row), dim)
    grads = block_backward(own, keys, values, 1)
    for grad, other in zip(grads, grads_of_others, strict=True):
        grad.add_(other)
    _return_gradients(grid, own_grads, grads)
    into.grad_query.add_(split_by_head(_sum_over_ranks(returning.wait(), len(grid.row)), width)[0])
    return own_grads


def _return_gradients(grid: Grid2D, own_grads: Block, grads: Block) -> None:
    """Send ``grads``, of the keys and values of the column's other ranks, back to these, and add what they
    return to ``own_grads``. Collective.
    """
    num_sent = [sum([length for _, length in grid.plan.sent_runs])] * len(grid.column)
    sent = join_by_token(*grads)
    returning = start_parts(sent, grid.column, grid.column_sizes, num_sent, grid.plan.dim)
    summed = _sum_over_ranks(returning.wait(), len(grid.column))
    grad_key, grad_value = split_by_head(summed, grads[0].shape[3], grads[1].shape[3])
    add_to_sent_keys(own_grads, (grad_key, grad_value), grid.plan)


def _queries_of_row(grid: Grid2D, into: QueryGradients, rows: Tensor, value_width: int) -> QueryGradients:
    """Return the queries of the row's other ranks before any block, from the ``rows`` that arrived, and with
    their rows of the masks of ``into``.
    """
    num_own, width = into.query.shape[2], into.query.shape[3]
    lse_width = rows.shape[3] - width - 2 * value_width
    query, grad_out, out, lse_bits = split_by_head(rows, width, value_width, value_width, lse_width)
    return QueryGradients(
        grad_out=grad_out,
        query=query,
        out=out,
        lse=view_as_lse(lse_bits, into.lse.dtype),
        mask=_take_rows(into.mask, num_own, sum(grid.row_sizes)),
        tiling=grid.row_tiling,
        key_heads=into.key_heads,
        grad_query=torch.zeros_like(query, dtype=into.lse.dtype),
        grad_mask=_take_rows(into.grad_mask, num_own, sum(grid.row_sizes)),
    )


def _take_rows(mask: Tensor | None, first: int, length: int) -> Tensor | None:
    """Return ``length`` rows of ``mask`` from ``first`` on; ``mask`` itself if it is None or has one row for all."""
    if mask is None or mask.shape[2] == 1:
        return mask
    return mask.narrow(2, first, length)


def _sum_over_ranks(rows: Tensor, num_ranks: int) -> Tensor:
    """Sum the parts of ``num_ranks`` ranks, ``[num_ranks · S, B, H, D]``, to ``[S, B, H, D]``."""
    return rows.view(num_ranks, rows.shape[0] // num_ranks, *rows.shape[1:]).sum(0)
