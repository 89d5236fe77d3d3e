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
from para_core.attention.grid_2d import Grid2D, as_dtype, as_lse, by_head, by_token, give, start
from para_core.layout.runs import add_at, take
from para_core.layout.sequence import Run


def grid_2d_backward(inner: Backward, grid: Grid2D) -> Backward:
    """Return the gradient of :func:`~para_core.attention.grid_2d.grid_2d` around attention with the gradient
    ``inner``.
    """

    def backward(into: QueryGradients, key: Tensor, value: Tensor, _: int) -> Block:
        return _gradients_in_grid(inner, grid, into, key, value)

    return backward


def _gradients_in_grid(
    inner: Backward, grid: Grid2D, into: QueryGradients, key: Tensor, value: Tensor
) -> Block:
    query, out, lse, mask = into.query, into.out, into.lse, into.mask
    dim, S, sizes, D, D_v = grid.plan.dim, query.shape[2], grid.row_sizes, query.shape[3], value.shape[3]
    travels = take(key, 2, grid.plan.travels), take(value, 2, grid.plan.travels)
    if grid.row:
        sent = by_token(query, into.grad_out, out, as_dtype(lse, query.dtype))
        arriving_queries = give(sent, grid.row, sizes, dim)
    arriving_keys = give(by_token(*travels), grid.column, grid.column_sizes, dim)
    own = replace(into, mask=_rows_of(mask, 0, S), grad_mask=_rows_of(into.grad_mask, 0, S))
    of_own_keys = inner(own, key, value, 0)
    others = None
    if grid.row:
        rows = arriving_queries.wait()
        q, do, o, bits = by_head(rows, D, D_v, D_v, rows.shape[3] - D - 2 * D_v)
        others = QueryGradients(
            do,
            q,
            o,
            as_lse(bits, lse.dtype),
            _rows_of(mask, S, sum(sizes)),
            grid.row_tiling,
            into.key_heads,
            torch.zeros_like(q, dtype=lse.dtype),
            _rows_of(into.grad_mask, S, sum(sizes)),
        )
        _put(of_own_keys, grid.plan.travels, inner(others, *travels, 0))
    keys, values = by_head(arriving_keys.wait(), D, D_v)
    of_column = None
    if others is not None:
        of_column = inner(others, keys, values, 1)
        arriving_queries = start(by_token(others.grad_query), grid.row, sizes, [S] * len(grid.row), dim)
    grads = inner(own, keys, values, 1)
    if of_column is not None:
        for grad, other in zip(grads, of_column, strict=True):
            grad.add_(other)
    num_own = [travels[0].shape[2]] * len(grid.column)
    arriving_keys = start(by_token(*grads), grid.column, grid.column_sizes, num_own, dim)
    if others is not None:
        into.grad_query.add_(by_head(_sum_over_ranks(arriving_queries.wait(), len(grid.row)), D)[0])
    _put(
        of_own_keys,
        grid.plan.travels,
        by_head(_sum_over_ranks(arriving_keys.wait(), len(grid.column)), D, D_v),
    )
    return of_own_keys


def _rows_of(mask: Tensor | None, first: int, length: int) -> Tensor | None:
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
