"""Rules for norms over sharded rows. Ranks exchange statistics in float32, or in float64 for float64 inputs."""

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
from para_core.spatial.local import argument, bind
from para_core.spatial.rows import Layout
from para_core.spatial.tag import rows_of, tagged

Function = Callable[..., Any]


def group_norm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.group_norm`` of ``[B, C, ...]``, with one all-gather of ``2 · B · groups`` numbers per rank."""
    x, groups, weight, bias, eps = bind(func, args, kwargs, input=None, num_groups=1, weight=None, bias=None, eps=1e-5)
    rows = rows_of(x)
    if rows is None or rows.dim == 1:
        raise unknown(func, rows, "its channels are sharded, or only its weights")
    if rows.dim == 0:
        return tagged(func(x, groups, weight, bias, eps), rows)
    moments = operators.moments(x, groups)
    fractions = _fractions(rows.layout, moments.dtype, x.device)
    moments_of_ranks = all_ranks(moments, ranks)
    return tagged(operators.normalized(x, moments_of_ranks, fractions, groups, weight, bias, eps), rows)


@kept_outside_graphs
def _fractions(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fraction of all rows that each rank holds, as a tensor ``[ranks]``."""
    return new_table([rows / sum(layout) for rows in layout], dtype, device)


def batch_norm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.batch_norm`` in eval mode, which uses running statistics and needs no exchange."""
    x = args[0] if args else kwargs["input"]
    rows = rows_of(x)
    training = argument(args, kwargs, "training", 5, False)
    if rows is None or training or rows.dim == 1:
        raise unknown(func, rows, "in training it needs statistics of all rows. Call .eval() first")
    return tagged(func(*args, **kwargs), rows)


RULES: dict[str, Any] = {"group_norm": group_norm, "batch_norm": batch_norm}
