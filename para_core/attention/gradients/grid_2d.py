"""The gradient of Attention2D.

In the backward, queries are sent together with out, its gradient and lse; keys are sent as in the forward.
Gradients return in float32 (4 bytes), or in float64 for float64 inputs:

    queries:                       B · H · (e · (D + 2 · D_v) + 4) · S_i · (c - 1)
    gradients of queries:          4 · B · H · D · Σ_row S_j
    keys and values:               B · e · H_kv · (D + D_v) · T_i · (r - 1)
    gradients of keys and values:  4 · B · H_kv · (D + D_v) · Σ_column T_j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.gradients.contract import Backward, QueryGradients
from para_core.attention.grid_2d import (
    Grid2D,
    join_by_token,
    split_by_head,
    start_copies,
    start_parts,
    view_as_lse,
    view_lse_as,
)
from para_core.layout.runs import add_at, take
from para_core.layout.sequence import Run


def grid_2d_backward(block_backward: Backward, grid: Grid2D) -> Backward:
    """Return the gradient of :func:`~para_core.attention.grid_2d.grid_2d` around attention with the gradient
    ``block_backward``.
    """

    def backward(into: QueryGradients, key: Tensor, value: Tensor, _: int) -> Block:
        return _gradients_in_grid(block_backward, grid, into, key, value)

    return backward


def _gradients_in_grid(
    block_backward: Backward, grid: Grid2D, into: QueryGradients, key: Tensor, value: Tensor
) -> Block:
    query, out, lse, mask = into.query, into.out, into.lse, into.mask
    dim, S, sizes, D, D_v = grid.plan.dim, query.shape[2], grid.row_sizes, query.shape[3], value.shape[3]
    sent_keys = take(key, 2, grid.plan.sent_runs), take(value, 2, grid.plan.sent_runs)
    if grid.row:
        sent = join_by_token(query, into.grad_out, out, view_lse_as(lse, query.dtype))
        arriving_queries = start_copies(sent, grid.row, sizes, dim)
    arriving_keys = start_copies(join_by_token(*sent_keys), grid.column, grid.column_sizes, dim)
    local = replace(into, mask=_take_rows(mask, 0, S), grad_mask=_take_rows(into.grad_mask, 0, S))
    of_own_keys = block_backward(local, key, value, 0)
    others = None
    if grid.row:
        rows = arriving_queries.wait()
        q, do, o, bits = split_by_head(rows, D, D_v, D_v, rows.shape[3] - D - 2 * D_v)
        others = QueryGradients(
            do,
            q,
            o,
            view_as_lse(bits, lse.dtype),
            _take_rows(mask, S, sum(sizes)),
            grid.row_tiling,
            into.key_heads,
            torch.zeros_like(q, dtype=lse.dtype),
            _take_rows(into.grad_mask, S, sum(sizes)),
        )
        _put(of_own_keys, grid.plan.sent_runs, block_backward(others, *sent_keys, 0))
    keys, values = split_by_head(arriving_keys.wait(), D, D_v)
    of_column = None
    if others is not None:
        of_column = block_backward(others, keys, values, 1)
        arriving_queries = start_parts(
            join_by_token(others.grad_query), grid.row, sizes, [S] * len(grid.row), dim
        )
    grads = block_backward(local, keys, values, 1)
    if of_column is not None:
        for grad, other in zip(grads, of_column, strict=True):
            grad.add_(other)
    num_own = [sent_keys[0].shape[2]] * len(grid.column)
    arriving_keys = start_parts(join_by_token(*grads), grid.column, grid.column_sizes, num_own, dim)
    if others is not None:
        into.grad_query.add_(split_by_head(_sum_over_ranks(arriving_queries.wait(), len(grid.row)), D)[0])
    _put(
        of_own_keys,
        grid.plan.sent_runs,
        split_by_head(_sum_over_ranks(arriving_keys.wait(), len(grid.column)), D, D_v),
    )
    return of_own_keys


def _take_rows(mask: Tensor | None, first: int, length: int) -> Tensor | None:
    """Return ``length`` rows of ``mask`` from ``first`` on; ``mask`` itself if it is None or has one row for all."""
    if mask is None or mask.shape[2] == 1:
        return mask
    return mask.narrow(2, first, length)


def _put(totals: Sequence[Tensor], runs: Sequence[Run], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        add_at(total, 2, runs, part)


def _sum_over_ranks(rows: Tensor, num_ranks: int) -> Tensor:
    """Sum the parts of ``num_ranks`` ranks, ``[num_ranks · S, B, H, D]``, to ``[S, B, H, D]``."""
    return rows.view(num_ranks, rows.shape[0] // num_ranks, *rows.shape[1:]).sum(0)
