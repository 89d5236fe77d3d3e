"""Padding, interpolation and pixel shuffles along rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.kernels.device_tables import kept_outside_graphs, new_table
from para_core.spatial import rows as plans
from para_core.spatial.errors import name_of, unknown
from para_core.spatial.fetch import fetch, relayout
from para_core.spatial.rows import Layout, held
from para_core.spatial.tag import Rows, ShardedSize, local_sizes, rows_of, tagged

Function = Callable[..., Any]


def pad(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``F.pad``: over the image's edge the first and the last rank pad, and they alone."""
    x, widths, mode, value = _pad_arguments(*args, **kwargs)
    rows = rows_of(x)
    if rows is None:
        raise unknown(func, Rows(0, (0,)), "an argument other than the first is sharded")
    widths = list(widths)
    at = 2 * (x.ndim - 1 - rows.dim)
    before, after = (widths[at], widths[at + 1]) if at < len(widths) else (0, 0)
    if not before and not after:
        return tagged(func(x, widths, mode, value), rows)
    if rows.outer > 1 or mode == "circular":
        raise unknown(func, rows, "padding wraps around, or goes between frames")
    least = max(before, after) + (mode == "reflect") if mode in ("reflect", "replicate") else max(-before, -after) + 1
    if min(rows.layout[0], rows.layout[-1]) < least:
        raise unknown(func, rows, f"padding by {before} and {after} rows needs {least} on the first and last rank")
    first, last = ranks.index == 0, ranks.index == ranks.size - 1
    widths[at], widths[at + 1] = before if first else 0, after if last else 0
    layout = list(rows.layout)
    layout[0] += before
    layout[-1] += after
    out = func(x, widths, mode, value) if any(widths) else x.clone()
    return tagged(out, Rows(rows.dim, tuple(layout)))


def pixel_shuffle(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Both shuffles: a row becomes ``factor``, or so many rows one; those that a factor parts are moved first."""
    x = args[0] if args else kwargs["input"]
    rows = rows_of(x)
    shuffles = name_of(func) == "pixel_shuffle"
    name = "upscale_factor" if shuffles else "downscale_factor"
    factor = args[1] if len(args) > 1 else kwargs[name]
    if rows is None or rows.outer > 1 or rows.dim == x.ndim - 3:
        raise unknown(func, rows or Rows(0, (0,)), "its channels are sharded")
    if rows.dim < x.ndim - 3:
        return tagged(func(x, factor), rows)
    if shuffles:
        return tagged(func(x, factor), Rows(rows.dim, tuple([count * factor for count in rows.layout])))
    layout = plans.multiples(rows.layout, factor)
    x = relayout(x, rows, layout, ranks)
    return tagged(func(x, factor), Rows(rows.dim, tuple([count // factor for count in layout])))


# -- interpolation


def interpolate(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``F.interpolate``: along rows by hand, from the rows of the input that each row of the output takes; else as it is."""
    x, size, scale, mode, align, recompute, antialias = _interpolate_arguments(*args, **kwargs)
    rows = rows_of(x)
    spatial = x.ndim - 2
    if rows is None or rows.outer > 1 or antialias or mode == "area":
        raise unknown(func, rows or Rows(0, (0,)), f"mode={mode!r}, antialias={antialias} is not built")
    place = rows.dim - 2
    if place < 0:
        if rows.dim == 1:
            raise unknown(func, rows, "its channels are sharded")
        return tagged(func(x, size, scale, mode, align, recompute), rows)
    scales = None if scale is None else _each(scale, spatial)
    sizes = None if size is None else _each(size, spatial)
    if scales is not None:
        factor = scales[place]
        if (factor == 1 or (mode in ("nearest", "nearest-exact") and factor == int(factor))) and not recompute:
            # Each row becomes so many; floating point is exact here.
            made = Rows(rows.dim, tuple([count * int(factor) for count in rows.layout]))
            return tagged(func(x, None, scales, mode, align), made)
        total = math.floor(sum(rows.layout) * factor)
        layout = plans.scaled(rows.layout, total)
        step = 1 / factor if not recompute else sum(rows.layout) / total
        others = [math.floor(count * one) for count, one in zip(x.shape[2:], scales, strict=True)]
    elif sizes is not None:
        # Read from a sharded tensor, or the number of all rows.
        wanted = sizes[place]
        times = wanted // sum(rows.layout)
        # Each row becomes so many here as there; of other multiples steps are rounded, and not alike.
        same = isinstance(wanted, ShardedSize) and wanted.layout == tuple([count * times for count in rows.layout])
        if mode == "nearest" and same and times in (1, 2, 4, 8, 16):
            return tagged(func(x, local_sizes(sizes)), Rows(rows.dim, wanted.layout))
        layout = wanted.layout if isinstance(wanted, ShardedSize) else plans.scaled(rows.layout, wanted)
        step = sum(rows.layout) / sum(layout)
        others = list(sizes)
    else:
        raise unknown(func, rows, "neither size= nor scale_factor= is given")
    if torch.compiler.is_compiling():
        raise unknown(func, rows, f"mode={mode!r} to {sum(layout)} rows is not built for compiled functions")
    found = _resample(ranks, x, rows, layout, step, mode, bool(align))
    kept = found.shape[rows.dim]
    if scales is None:
        others[place] = kept
        return tagged(func(found, others, None, mode, align), Rows(rows.dim, layout))
    scales[place] = 1.0
    return tagged(func(found, None, scales, mode, align, recompute), Rows(rows.dim, layout))


def interpolated_whole(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``F.interpolate`` of a replicated tensor, to the size of a sharded one: to that of all rows, replicated."""
    found: Tensor = func(*args, **kwargs)
    return found


class _Resampling(NamedTuple):
    """Rows ``start`` to ``stop`` of ``made``, of which the mode computes each from some of ``total`` rows."""

    mode: str
    total: int
    made: int
    step: float
    align: bool
    start: int
    stop: int


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _taps(resampling: _Resampling) -> tuple[Tensor, Tensor]:
    """Return which rows each row is computed from, and their weights, ``[rows, taps]`` each, on the CPU."""
    mode, total, made, step, align, start, stop = resampling
    rows = torch.arange(start, stop, dtype=torch.float32)
    if mode == "nearest":
        return (rows * step).floor().long().clamp(0, total - 1)[:, None], torch.ones(stop - start, 1)
    if mode == "nearest-exact":
        return ((rows + 0.5) * step).floor().long().clamp(0, total - 1)[:, None], torch.ones(stop - start, 1)
    source = rows * ((total - 1) / (made - 1) if made > 1 else 0.0) if align else (rows + 0.5) * step - 0.5
    if mode != "bicubic":
        source = source.clamp(min=0)
        low = source.floor().long().clamp(max=total - 1)
        share = (source - low).clamp(0, 1)
        return torch.stack([low, (low + 1).clamp(max=total - 1)], 1), torch.stack([1 - share, share], 1)
    low = source.floor()
    t = (source - low)[:, None]
    distance = torch.cat([t + 1, t, 1 - t, 2 - t], 1)
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance.square() + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    weights = torch.where(distance <= 1, near, far)
    return (low.long()[:, None] + torch.arange(-1, 3)).clamp(0, total - 1), weights


@lru_cache(maxsize=256)
def _span(resampling: _Resampling) -> tuple[int, int]:
    """Return the first row that is needed, and the one after the last."""
    index, _ = _taps(resampling)
    return int(index.min()), int(index.max()) + 1


@kept_outside_graphs
def _index_on(resampling: _Resampling, device: torch.device) -> Tensor:
    """Return the rows that each row is computed from, counted from the first one that is needed, ``[taps, rows]``."""
    index = (_taps(resampling)[0] - _span(resampling)[0]).T
    return new_table(index.flatten().tolist(), torch.int64, device).view(index.shape)


@kept_outside_graphs
def _weights_on(resampling: _Resampling, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights of these rows, ``[taps, rows]``."""
    weights = _taps(resampling)[1].T
    return new_table(weights.flatten().tolist(), dtype, device).view(weights.shape)


def _resample(ranks: MeshDim, x: Tensor, rows: Rows, layout: Layout, step: float, mode: str, align: bool) -> Tensor:
    """The rows that ``layout`` gives this rank of ``x`` resampled along its rows alone."""
    of_ranks = [_Resampling(mode, sum(rows.layout), sum(layout), step, align, *bounds) for bounds in held(layout)]
    part = fetch(x, rows, [_span(one) for one in of_ranks], ranks)
    own = of_ranks[ranks.index]
    index = _index_on(own, x.device)
    if len(index) == 1:
        return part.index_select(rows.dim, index[0])
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    shape = [-1] + [1] * (x.ndim - 1 - rows.dim)
    taken = [
        part.index_select(rows.dim, of_tap).to(wide) * weights.view(shape)
        for of_tap, weights in zip(index, _weights_on(own, wide, x.device), strict=True)
    ]
    resampled: Tensor = sum(taken[1:], start=taken[0])
    return resampled.to(x.dtype)


def _each(value: Any, spatial: int) -> list[Any]:
    return [value] * spatial if isinstance(value, (int, float)) else list(value)


def _pad_arguments(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> tuple[Any, ...]:
    return input, pad, mode, value


def _interpolate_arguments(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Any, ...]:
    return input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias


RULES: dict[str, Any] = {
    "pad": pad,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_shuffle,
    "interpolate": interpolate,
}
# Of no sharded tensor, but of a size of one.
FACTORIES: dict[str, Any] = {"interpolate": interpolated_whole}
