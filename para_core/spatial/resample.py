"""Rules that run padding, interpolation and pixel shuffles on sharded rows.

Rules are explained in :mod:`.rules`. Tests: tests/spatial/test_functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.kernels.device_tables import keep_outside_graphs, new_table
from para_core.layout.windows import Sizes, bounds_of, round_to_multiples, scale_sizes
from para_core.spatial.fetch import fetch_rows, relayout_rows
from para_core.spatial.row_tag import RowTag, ShardedSize, local_sizes, mixing_error, rows_of, set_rows
from para_core.spatial.rules import argument, bind, only_first, require_rows, sum_dtype
from para_core.torch_functions import Function, name_of

_NEAREST = ("nearest", "nearest-exact")


def run_pad(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.pad``. Padding rows are added only at the edges of the image, by the first and the last rank."""
    x, rows = only_first(func, args, kwargs)
    _, pads, mode, value = bind(func, args, kwargs, input=None, pad=(), mode="constant", value=None)
    widths = list(pads)
    index = 2 * (x.ndim - 1 - rows.dim)
    before = after = 0
    if index < len(widths):
        before, after = widths[index], widths[index + 1]
    if not before and not after:
        return set_rows(func(x, widths, mode, value), rows)
    if rows.outer > 1 or mode == "circular":
        raise mixing_error(func, rows, "the padding is circular, or lies between frames")
    if mode in ("reflect", "replicate"):
        min_rows = max(before, after) + (mode == "reflect")
    else:
        min_rows = max(-before, -after) + 1
    if min(rows.sizes[0], rows.sizes[-1]) < min_rows:
        raise mixing_error(
            func, rows, f"padding by {before} and {after} rows needs {min_rows} on the first and last rank"
        )
    widths[index] = before * (ranks.index == 0)
    widths[index + 1] = after * (ranks.index == ranks.size - 1)
    sizes = list(rows.sizes)
    sizes[0] += before
    sizes[-1] += after
    return set_rows(func(x, widths, mode, value), RowTag(rows.dim, tuple(sizes)))


def run_pixel_shuffle(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``pixel_shuffle`` or ``pixel_unshuffle`` on this rank's rows.

    Before ``pixel_unshuffle``, rows are exchanged so that each boundary between ranks is a multiple of the
    factor.
    """
    x, rows = only_first(func, args, kwargs)
    shuffles = name_of(func) == "pixel_shuffle"
    factor_name = "downscale_factor"
    if shuffles:
        factor_name = "upscale_factor"
    factor = argument(args, kwargs, factor_name, 1)
    if rows.outer > 1 or rows.dim == x.ndim - 3:
        raise mixing_error(func, rows, "its channels are sharded")
    if rows.dim < x.ndim - 3:
        return set_rows(func(x, factor), rows)
    if shuffles:
        return set_rows(func(x, factor), RowTag(rows.dim, tuple([count * factor for count in rows.sizes])))
    if rows.total % factor:
        # Only the last rank would have rows that are no multiple, and raise, while the others go on.
        raise mixing_error(func, rows, f"{rows.total} rows are no multiple of the factor {factor}")
    sizes = round_to_multiples(rows.sizes, factor)
    out_sizes = tuple([count // factor for count in sizes])
    require_rows(func, rows, out_sizes)
    return set_rows(func(relayout_rows(x, rows, sizes, ranks), factor), RowTag(rows.dim, out_sizes))


def run_interpolate(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.interpolate`` along the sharded dim, with rows of other ranks, and then locally along the other dims."""
    parameters = {"input": None, "size": None, "scale_factor": None, "mode": "nearest", "align_corners": None}
    x, size, scale, mode, align, recompute, antialias = bind(
        func, args, kwargs, **parameters, recompute_scale_factor=None, antialias=False
    )
    rows = rows_of(x)
    if rows is None or rows.outer > 1 or antialias or mode == "area":
        raise mixing_error(func, rows, f"mode={mode!r}, antialias={antialias} is not supported")
    axis = rows.dim - 2
    if rows.dim == 1:
        raise mixing_error(func, rows, "its channels are sharded")
    if rows.dim == 0:
        return set_rows(func(x, size, scale, mode, align, recompute), rows)
    scales: list[Any] | None = _values_per_dim(scale, x.ndim - 2)
    sizes: Any = _values_per_dim(size, x.ndim - 2)
    if scales is None and sizes is None:
        raise mixing_error(func, rows, "neither size= nor scale_factor= is given")
    repeated_rows = _tag_of_repeated_rows(rows, axis, mode, scales, sizes, recompute)
    if repeated_rows is not None:
        return set_rows(func(x, local_sizes(sizes), scales, mode, align), repeated_rows)
    row_sizes, step = _sizes_and_step(rows, axis, scales, sizes, recompute)
    require_rows(func, rows, row_sizes)
    if mode not in _NEAREST and not x.is_floating_point():
        # PyTorch rounds these sums to integers in a way of its own.
        raise mixing_error(func, rows, f"mode={mode!r} of {x.dtype} is not supported")
    if torch.compiler.is_compiling():
        raise mixing_error(
            func, rows, f"mode={mode!r} to {sum(row_sizes)} rows is not supported in compiled functions"
        )
    x = _resample(ranks, x, rows, row_sizes, step, mode, bool(align))
    if scales is not None:
        scales[axis] = 1.0
        out = func(x, None, scales, mode, align, recompute)
    else:
        sizes[axis] = x.shape[rows.dim]
        out = func(x, sizes, None, mode, align)
    return set_rows(out, RowTag(rows.dim, row_sizes))


def _tag_of_repeated_rows(
    rows: RowTag, axis: int, mode: str, scales: list[Any] | None, sizes: Any, recompute: Any
) -> RowTag | None:
    """Return the sharding of the output if each rank can repeat its rows without rows of other ranks, else None.

    ``axis`` is the index of the sharded dim among the spatial dims, and so in ``scales`` and ``sizes``, of
    which one is None.
    """
    if scales is not None:
        factor = scales[axis]
        is_repetition = factor == 1 or (mode in _NEAREST and factor == int(factor))
        if recompute or not is_repetition:
            return None
        return RowTag(rows.dim, tuple([count * int(factor) for count in rows.sizes]))
    # This is a ShardedSize if the model read it from the shape of a sharded tensor.
    total = sizes[axis]
    factor = total // sum(rows.sizes)
    is_multiple = isinstance(total, ShardedSize) and total.of_ranks == tuple(
        [count * factor for count in rows.sizes]
    )
    # For these factors PyTorch rounds local and global sizes equally.
    if mode == "nearest" and is_multiple and factor in (1, 2, 4, 8, 16):
        return RowTag(rows.dim, total.of_ranks)
    return None


def _sizes_and_step(
    rows: RowTag, axis: int, scales: list[Any] | None, sizes: Any, recompute: Any
) -> tuple[Sizes, float]:
    """Return the number of output rows of each rank, and the distance between output rows in input rows, as
    PyTorch computes it. ``axis`` is as in :func:`_tag_of_repeated_rows`.
    """
    before = sum(rows.sizes)
    if scales is not None:
        total = math.floor(before * scales[axis])
        if recompute:
            return scale_sizes(rows.sizes, total), before / total
        return scale_sizes(rows.sizes, total), 1 / scales[axis]
    total = sizes[axis]
    row_sizes = scale_sizes(rows.sizes, total)
    if isinstance(total, ShardedSize):
        row_sizes = total.of_ranks
    return row_sizes, before / sum(row_sizes)


class _Resampling(NamedTuple):
    """The parameters of an interpolation along rows, for output rows ``start`` to ``stop - 1``.

    The whole image has ``total`` input rows and ``num_rows`` output rows. Consecutive output rows are
    ``step`` input rows apart. Positions are computed in ``dtype``.
    """

    dtype: torch.dtype
    mode: str
    total: int
    num_rows: int
    step: float
    align: bool
    start: int
    stop: int


# Leave inference mode, because kept tensors may be used outside of it later.
@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _taps(resampling: _Resampling) -> tuple[Tensor, Tensor]:
    """Return for each output row the indices of its input rows and their weights, each ``[rows, taps]`` on the CPU."""
    dtype, mode, total, num_rows, step, align, start, stop = resampling
    rows = torch.arange(start, stop, dtype=dtype)
    if mode in _NEAREST:
        center = 0.0
        if mode == "nearest-exact":
            center = 0.5
        source = (rows + center) * step
        return source.floor().long().clamp(0, total - 1)[:, None], torch.ones(stop - start, 1)
    if align:
        # The first and the last output row are the first and the last input row.
        source = rows * ((total - 1) / max(num_rows - 1, 1))
    else:
        source = (rows + 0.5) * step - 0.5
    if mode != "bicubic":
        source = source.clamp(min=0)
        low = source.floor().long().clamp(max=total - 1)
        fraction = (source - low).clamp(0, 1)
        return torch.stack([low, (low + 1).clamp(max=total - 1)], 1), torch.stack([1 - fraction, fraction], 1)
    low = source.floor()
    t = (source - low)[:, None]
    distance = torch.cat([t + 1, t, 1 - t, 2 - t], 1)
    # PyTorch's bicubic interpolation uses this coefficient.
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance.square() + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    weights = torch.where(distance <= 1, near, far)
    return (low.long()[:, None] + torch.arange(-1, 3)).clamp(0, total - 1), weights


@lru_cache(maxsize=256)
def _span(resampling: _Resampling) -> tuple[int, int]:
    """Return the run (start, length) of input rows that the output rows of ``resampling`` need."""
    index, _ = _taps(resampling)
    first = int(index.min())
    return first, int(index.max()) + 1 - first


@keep_outside_graphs
def _index_on(resampling: _Resampling, device: torch.device) -> Tensor:
    """Return the input rows that each output row combines, ``[taps, rows]``, counted from the first one needed."""
    index = (_taps(resampling)[0] - _span(resampling)[0]).T
    return new_table(index.flatten().tolist(), torch.int64, device).view(index.shape)


@keep_outside_graphs
def _weights_on(resampling: _Resampling, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of each input row that each output row combines, ``[taps, rows]``."""
    weights = _taps(resampling)[1].T
    return new_table(weights.flatten().tolist(), dtype, device).view(weights.shape)


def _resample(
    ranks: MeshDim, x: Tensor, rows: RowTag, sizes: Sizes, step: float, mode: str, align: bool
) -> Tensor:
    """Return this rank's output rows of ``x`` interpolated along the sharded dim only. Collective.

    Args:
        sizes: Number of output rows of each rank.
        step: Distance between output rows, in input rows.
    """
    wide = sum_dtype(x.dtype)
    # PyTorch finds the nearest row in float32, whatever the dtype of the image is.
    dtype = torch.float32 if mode in _NEAREST else wide
    of_ranks = [
        _Resampling(dtype, mode, sum(rows.sizes), sum(sizes), step, align, *bounds)
        for bounds in bounds_of(sizes)
    ]
    part = fetch_rows(x, rows, list(map(_span, of_ranks)), ranks)
    own = of_ranks[ranks.index]
    index = _index_on(own, x.device)
    if len(index) == 1:
        return part.index_select(rows.dim, index[0])
    shape = [-1] + [1] * (x.ndim - 1 - rows.dim)
    terms = [
        part.index_select(rows.dim, tap).to(wide) * weights.view(shape)
        for tap, weights in zip(index, _weights_on(own, wide, x.device), strict=True)
    ]
    out: Tensor = sum(terms[1:], start=terms[0])
    return out.to(x.dtype)


def _values_per_dim(value: Any, spatial: int) -> list[Any] | None:
    """Return ``value``, a number or one for each spatial dim, as a list for ``spatial`` dims; None for None."""
    if value is None:
        return None
    if isinstance(value, (int, float)):
        return [value] * spatial
    return list(value)


BY_RULE: dict[Any, str] = {
    run_pad: "pad",
    run_pixel_shuffle: "pixel_shuffle pixel_unshuffle",
    run_interpolate: "interpolate",
}
