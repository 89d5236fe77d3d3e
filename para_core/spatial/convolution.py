"""Rules for convolutions, pools and ``stft``, whose windows need rows of neighbouring ranks.

Rules are explained in :mod:`.rules`. Which rows a rank needs is computed in :mod:`para_core.layout.windows`;
:mod:`para_core.same_bits.image_rows` also reads calls by :func:`read_convolution` and :func:`read_pool`.
Tests: tests/spatial/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.layout.windows import bounds_of, plan_convolution, plan_overlap, plan_transposed
from para_core.spatial.fetch import fetch_rows, start_fetch
from para_core.spatial.row_tag import RowTag, mixing_error, set_rows
from para_core.spatial.rules import bind, only_first, require_rows
from para_core.torch_functions import Function, name_of

# A function run(x, padding) that computes an operator on local rows, with ``padding`` rows of padding at
# either end.
RunSlices = Callable[[Tensor, int], Tensor]


class WindowedCall(NamedTuple):
    """A call of an operator with windows, such as a convolution or a pool.

    Args:
        x: This rank's rows, sharded as ``rows`` says.
        extent, stride: Size of a window, including dilation, and distance between windows, in rows.
        padding: Number of rows of padding, of value ``fill``, at either end of the image.
        run: Computes the operator on local rows.
    """

    x: Tensor
    rows: RowTag
    extent: int
    stride: int
    padding: int
    run: RunSlices
    fill: float = 0.0


def run_convolution(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.conv1d``, ``F.conv2d`` or ``F.conv3d`` on this rank's rows, with one collective.

    Each rank fetches the rows of its neighbours that its windows reach, up to half a dilated kernel on each
    side. With an odd kernel, an accelerator computes the output rows that need no such row during the
    exchange.
    """
    call = read_convolution(func, args, kwargs)
    if call is None:
        return _run_samples(func, args, kwargs)
    return run_windows(ranks, func, call)


def _run_samples(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run a function whose samples are sharded on those of this rank."""
    _, rows = only_first(func, args, kwargs)
    return set_rows(func(*args, **kwargs), rows)


def read_convolution(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> WindowedCall | None:
    """Return the windows of a call of ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``; None if its samples are
    sharded.

    Raises:
        MixesRows: Its channels or weights are sharded, its windows would span two frames, or
            ``padding="same"`` is uneven.
    """
    x, weight, bias, stride, padding, dilation, groups = bind(
        func, args, kwargs, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    spatial = weight.ndim - 2
    rows, axis = _spatial_axis(func, args, kwargs, spatial)
    if axis is None:
        return None
    strides, dilations = _sizes_per_dim(stride, spatial), _sizes_per_dim(dilation, spatial)
    extents = [d * (k - 1) + 1 for d, k in zip(dilations, weight.shape[2:], strict=True)]
    if padding == "same" and any(extent % 2 == 0 for extent in extents):
        raise mixing_error(
            func, rows, f"padding='same' of windows of {extents} rows is not the same at both ends"
        )
    if padding == "same" and max(strides) > 1:
        raise ValueError(f"padding='same' with stride {strides}; expected stride 1, which torch demands.")
    if padding == "same":
        paddings = [extent // 2 for extent in extents]
    elif padding == "valid":
        paddings = [0] * spatial
    else:
        paddings = _sizes_per_dim(padding, spatial)

    def run(part: Tensor, padded: int) -> Tensor:
        local_paddings = [*paddings[:axis], padded, *paddings[axis + 1 :]]
        num_rows = (part.shape[rows.dim] + 2 * padded - extents[axis]) // strides[axis] + 1
        out: Tensor
        if num_rows == 1 and part.dtype == torch.bfloat16 and part.device.type == "cpu":
            # On a CPU torch 2.13 computes wrong values in bfloat16 for an output of one column (oneDNN,
            # stride 2). A single device computes more columns than this rank, so convolve in float32, which
            # is right.
            wide_bias = None
            if bias is not None:
                wide_bias = bias.float()
            wide = func(part.float(), weight.float(), wide_bias, strides, local_paddings, dilations, groups)
            out = wide.to(torch.bfloat16)
        else:
            out = func(part, weight, bias, strides, local_paddings, dilations, groups)
        return out

    return WindowedCall(x, rows, extents[axis], strides[axis], paddings[axis], run)


def run_windows(ranks: MeshDim, func: Function, call: WindowedCall) -> Tensor:
    """Return this rank's output rows of an operator with windows.

    Collective, unless every rank has all the rows that it needs.
    """
    x, rows, extent, stride, padding, run, fill = call
    plan = plan_convolution(rows.sizes, extent, stride, padding)
    require_rows(func, rows, plan.sizes)
    out_rows = RowTag(rows.dim, plan.sizes)
    split = None
    if _overlaps(x.device):
        split = plan_overlap(rows.sizes, extent, stride, padding)
    if split is None:
        return set_rows(run(fetch_rows(x, rows, plan.wanted, ranks, fill=fill), 0), out_rows)
    edges_of_ranks = zip(split.top, split.bottom, strict=True)
    wanted = tuple([tuple([edge for edge in edges if edge is not None]) for edges in edges_of_ranks])
    finish = start_fetch(x, rows, wanted, ranks, fill=fill)
    out = run(x.narrow(rows.dim, *split.middle[ranks.index]), split.padding)
    edges = finish()
    if split.top[ranks.index] is not None:
        out.narrow(rows.dim, 0, split.edge).copy_(run(edges.pop(0), 0))
    if split.bottom[ranks.index] is not None:
        out.narrow(rows.dim, out.shape[rows.dim] - split.edge, split.edge).copy_(run(edges.pop(0), 0))
    return set_rows(out, out_rows)


def _overlaps(device: torch.device) -> bool:
    """Whether ``device`` computes while an exchange runs.
    A CPU does both itself: two more calls would only cost.
    """
    return device.type != "cpu"


def _spatial_axis(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], spatial: int
) -> tuple[RowTag, int | None]:
    """Return the tag of the input of a call of ``func`` and the index of the sharded dim in its ``spatial``
    last ones; None for the batch dim. Raise :class:`MixesRows` if the channels or another argument, such as
    the weights, are sharded, or one dim contains the rows of several frames.
    """
    x, rows = only_first(func, args, kwargs)
    axis = rows.dim - (x.ndim - spatial)
    if axis >= 0 and rows.outer > 1:
        raise mixing_error(func, rows, "its windows would span the rows of two frames")
    if axis < 0 and (rows.dim != 0 or x.ndim != spatial + 2):
        raise mixing_error(func, rows, "its channels are sharded")
    if axis < 0:
        return rows, None
    return rows, axis


def _sizes_per_dim(value: Any, spatial: int) -> list[int]:
    """Return ``value``, an int, or one or ``spatial`` ints, as a list of ``spatial`` ints."""
    if isinstance(value, int):
        return [value] * spatial
    values = list(value)
    if len(values) == 1:
        return values * spatial
    return values


def run_conv_transpose(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.conv_transpose1d``, ``F.conv_transpose2d`` or ``F.conv_transpose3d`` with rows fetched from others."""
    parameters = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "output_padding": 0}
    x, weight, bias, stride, padding, extra, groups, dilation = bind(
        func, args, kwargs, **parameters, groups=1, dilation=1
    )
    spatial = weight.ndim - 2
    rows, axis = _spatial_axis(func, args, kwargs, spatial)
    if axis is None:
        return set_rows(func(x, weight, bias, stride, padding, extra, groups, dilation), rows)
    strides, dilations, paddings, extras = (
        _sizes_per_dim(value, spatial) for value in (stride, dilation, padding, extra)
    )
    step, inset = strides[axis], paddings[axis]
    extent = dilations[axis] * (weight.shape[2 + axis] - 1) + 1
    plan = plan_transposed(rows.sizes, extent, step, inset, extras[axis])
    require_rows(func, rows, plan.sizes)
    part = fetch_rows(x, rows, plan.wanted, ranks)
    start, stop = bounds_of(plan.sizes)[ranks.index]
    # The first row of ``out``, counted in output rows of the full image.
    first = plan.wanted[ranks.index][0] * step - inset
    paddings[axis] = 0
    # With a stride longer than the kernel, this rank's last output rows may come after those of its input rows.
    extras[axis] = max(0, stop - first - (part.shape[rows.dim] - 1) * step - extent)
    out = func(part, weight, bias, strides, paddings, extras, groups, dilations)
    return set_rows(
        out.narrow(rows.dim, start - first, stop - start).contiguous(), RowTag(rows.dim, plan.sizes)
    )


def run_pool(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run an average or maximum pool of 1 to 3 spatial dims on this rank's rows.

    Raises:
        MixesRows: If ``ceil_mode``, ``return_indices``, ``divisor_override``, or with padding
            ``count_include_pad=False`` is used.
    """
    call = read_pool(func, args, kwargs)
    if call is None:
        return _run_samples(func, args, kwargs)
    return run_windows(ranks, func, call)


def read_pool(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> WindowedCall | None:
    """Return the windows of a call of an average or maximum pool; None if its samples are sharded.

    Raises:
        MixesRows: If ``ceil_mode``, ``return_indices``, ``divisor_override``, or with padding
            ``count_include_pad=False`` is used.
    """
    name = name_of(func)
    is_max, spatial = name.startswith("max"), int(name[-2])
    window = {"input": None, "kernel_size": None, "stride": None, "padding": 0}
    if is_max:
        x, kernel, stride, padding, dilation, ceil_mode, unsupported = bind(
            func, args, kwargs, **window, dilation=1, ceil_mode=False, return_indices=False
        )
    else:
        x, kernel, stride, padding, ceil_mode, counts_padding, unsupported = bind(
            func, args, kwargs, **window, ceil_mode=False, count_include_pad=True, divisor_override=None
        )
        dilation, unsupported = 1, unsupported or (any(_sizes_per_dim(padding, 1)) and not counts_padding)
    rows, axis = _spatial_axis(func, args, kwargs, spatial)
    if axis is None:
        return None
    kernels, paddings, dilations = (_sizes_per_dim(value, spatial) for value in (kernel, padding, dilation))
    strides = kernels
    if stride is not None and stride not in ([], ()):
        strides = _sizes_per_dim(stride, spatial)
    if ceil_mode or unsupported:
        raise mixing_error(
            func,
            rows,
            "ceil_mode, return_indices, divisor_override and count_include_pad=False are not supported",
        )

    extent = dilations[axis] * (kernels[axis] - 1) + 1
    fill = 0.0
    if is_max:
        fill = float("-inf")

    def run(part: Tensor, padded: int) -> Tensor:
        if padded > kernels[axis] // 2:
            # PyTorch's own padding is at most half a kernel without its dilation.
            part = F.pad(part, [0, 0] * (spatial - 1 - axis) + [padded, padded], value=fill)
            padded = 0
        local_paddings = [*paddings[:axis], padded, *paddings[axis + 1 :]]
        out: Tensor
        if is_max:
            out = func(part, kernels, strides, local_paddings, dilations)
        else:
            out = func(part, kernels, strides, local_paddings)
        return out

    return WindowedCall(x, rows, extent, strides[axis], paddings[axis], run, fill)


def run_stft(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``torch.stft`` of a waveform ``[..., samples]`` that is sharded by samples, with ``center=False``.

    Each rank transforms the windows whose middle sample it holds, so the output is sharded by windows.
    """
    parameters = {"input": None, "n_fft": None, "hop_length": None, "win_length": None, "window": None}
    options = {"normalized": False, "onesided": None, "return_complex": None, "align_to_window": None}
    x, size, hop, win_length, window, center, _, *rest = bind(
        func, args, kwargs, **parameters, center=True, pad_mode="reflect", **options
    )
    _, rows = only_first(func, args, kwargs)
    if rows.dim != x.ndim - 1 or rows.outer > 1 or center:
        raise mixing_error(func, rows, "center=True and a sharded batch are not supported")
    if hop is None:
        hop = size // 4
    plan = plan_convolution(rows.sizes, size, hop, 0)
    require_rows(func, rows, plan.sizes)
    part = fetch_rows(x, rows, plan.wanted, ranks)
    return set_rows(
        func(part, size, hop, win_length, window, center, "reflect", *rest), RowTag(x.ndim, plan.sizes)
    )


BY_RULE: dict[Any, str] = {
    run_convolution: "conv1d conv2d conv3d",
    run_conv_transpose: "conv_transpose1d conv_transpose2d conv_transpose3d",
    run_stft: "stft",
    run_pool: "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d",
}
