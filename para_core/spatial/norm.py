"""Norms whose statistics reach over all rows: each rank's are exchanged, in float32 (float64 for float64)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.kernels.device_tables import kept_outside_graphs, new_table
from para_core.spatial import operators
from para_core.spatial.errors import unknown
from para_core.spatial.fetch import all_ranks
from para_core.spatial.rows import Layout
from para_core.spatial.tag import Rows, rows_of, tagged

Function = Callable[..., Any]


def group_norm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``F.group_norm`` of ``[B, C, ...]``: one all-gather of ``2 · B · groups`` numbers."""
    x, groups, weight, bias, eps = _group_norm_arguments(*args, **kwargs)
    rows = rows_of(x)
    if rows is None or rows.dim == 1:
        raise unknown(func, rows or Rows(0, (0,)), "its channels, or its weights alone, are sharded")
    if rows.dim == 0:
        return tagged(func(x, groups, weight, bias, eps), rows)
    moments = operators.moments(x, groups)
    shares = _shares(rows.layout, moments.dtype, x.device)
    of_ranks = all_ranks(moments, ranks)
    return tagged(operators.normalized(x, of_ranks, shares, groups, weight, bias, eps), rows)


@kept_outside_graphs
def _shares(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the part of all rows that each rank holds, ``[ranks]``."""
    return new_table([rows / sum(layout) for rows in layout], dtype, device)


def _group_norm_arguments(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Any, ...]:
    return input, num_groups, weight, bias, eps


def batch_norm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``F.batch_norm`` with running statistics."""
    x = args[0] if args else kwargs["input"]
    rows = rows_of(x)
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if rows is None or training or rows.dim == 1:
        raise unknown(func, rows or Rows(0, (0,)), "in training its statistics reach over all rows. Call .eval() first")
    return tagged(func(*args, **kwargs), rows)


RULES: dict[str, Any] = {"group_norm": group_norm, "batch_norm": batch_norm}
