"""Norms whose statistics reach over all rows: each rank's are exchanged, in float32 (float64 for float64)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.kernels.device_tables import kept_outside_graphs, new_table
from para_core.mesh import MeshDim
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
    var, mean = _moments(x, groups)
    found = all_ranks(torch.stack([var, mean]), ranks)
    shares = _shares(rows.layout, var.dtype, x.device)
    mean = (shares * found[:, 1]).sum(0)
    # Of all rows around the common mean: what each rank found around its own, and how far that one is off.
    var = (shares * (found[:, 0] + (found[:, 1] - mean).square())).sum(0)
    rstd = torch.rsqrt(var + eps)
    per_channel = x.shape[1] // groups
    scale = rstd.repeat_interleave(per_channel, 1)
    shift = (-mean * rstd).repeat_interleave(per_channel, 1)
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    shape = (*x.shape[:2], *[1] * (x.ndim - 2))
    return tagged(_scaled(x, scale.view(shape), shift.view(shape)), rows)


@kept_outside_graphs
def _shares(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return which share of all rows each rank holds, ``[ranks, 1, 1]``."""
    return new_table([rows / sum(layout) for rows in layout], dtype, device)[:, None, None]


def _moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Variance and mean of each group of channels of ``[B, C, ...]``, ``[B, groups]`` each, in at least float32."""
    if x.is_cpu and x.dtype in (torch.float32, torch.float64):
        return _moments_on_cpu(x, groups)
    grouped = x.unflatten(1, (groups, -1)).flatten(2) if x.is_contiguous() else x.unflatten(1, (groups, -1))
    dims = tuple(range(2, grouped.ndim))
    if grouped.dtype in (torch.float32, torch.float64):
        return torch.var_mean(grouped, dims, correction=0)
    # Without a copy of the input in float32. What is lost by subtracting is far below what 16 bits can hold.
    count = grouped[0, 0].numel()
    mean = torch.sum(grouped, dims, dtype=torch.float32) / count
    square = torch.linalg.vector_norm(grouped, 2, dims, dtype=torch.float32).square() / count
    return (square - mean.square()).clamp_min(0), mean


def _moments_on_cpu(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """A twelfth of the time of ``var_mean``, which is not vectorized there.

    Channel by channel: over a group of channels that lie last in memory (convolutions on CPUs leave them so) a sum is not vectorized
    either, and takes up to 60 times as long.
    """
    dims = tuple(range(2, x.ndim))
    mean = x.mean(dims)
    apart = x - mean.view(*mean.shape, *[1] * len(dims))
    # What the mean, rounded, was off by: far from zero that is no small part of the deviation.
    off = apart.mean(dims)
    # Not vector_norm: its sum of 100,000 squares is off by 1e-5, that of mean() is pairwise.
    var = (apart.square_().mean(dims) - off.square()).unflatten(1, (groups, -1))
    mean = (mean + off).unflatten(1, (groups, -1))
    of_groups = mean.mean(-1)
    # Around the group's mean: what each channel has around its own, and how far that one is off.
    return (var + (mean - of_groups[..., None]).square()).mean(-1), of_groups


def _scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x · scale + shift``, computed in the type of ``scale``, in the type of ``x``."""
    # Written at once in the type of x: no copy in float32.
    return torch.addcmul(shift, x, scale, out=torch.empty_like(x))


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
