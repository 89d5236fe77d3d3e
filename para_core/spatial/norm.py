"""Rules for norms over sharded rows, and the operators of a group norm: Triton kernels on GPUs, PyTorch elsewhere.

Rules are explained in :mod:`.rules`. Layer norms, which work along one dim, are there too. The kernels are in
``kernels/norm.py``. Tests: tests/spatial/test_functions.py and tests/kernels/test_small_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.distributed.mesh import MeshDim
from para_core.kernels import norm_reference
from para_core.kernels.device_tables import keep_outside_graphs, new_table
from para_core.layout.windows import Sizes
from para_core.spatial.fetch import stack_ranks
from para_core.spatial.row_tag import mixing_error, rows_of, set_rows
from para_core.spatial.rules import argument, bind, only_first
from para_core.torch_functions import Function
from para_core.triton_support import are_floats, load_kernel, needs_plain, on_device_of


def run_group_norm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.group_norm`` of ``[B, C, ...]``, with one all-gather of ``2 · B · groups`` statistics per rank.

    The statistics are float32, or float64 for float64 input.
    """
    x, groups, weight, bias, eps, _ = bind(
        func, args, kwargs, input=None, num_groups=1, weight=None, bias=None, eps=1e-5, cudnn_enabled=True
    )
    rows = rows_of(x)
    if rows is None or rows.dim == 1:
        raise mixing_error(func, rows, "its channels are sharded, or only its weights")
    channels = x.shape[1]
    fits = groups > 0 and channels % groups == 0
    fits = fits and all(y.shape == (channels,) for y in _without_none(weight, bias))
    # If they do not fit, PyTorch raises its own error, on all ranks. Here a weight would be broadcast, and a
    # kernel would read beyond its end.
    if rows.dim == 0 or not fits:
        return set_rows(func(x, groups, weight, bias, eps), rows)
    moments: Callable[..., Tensor] = torch.ops.para_core.group_moments.default
    if needs_plain(x):
        moments = norm_reference.moments
    of_rank = moments(x, groups)
    fractions = _fractions(rows.sizes, of_rank.dtype, x.device)
    of_ranks = stack_ranks(of_rank, ranks)
    normalized: Callable[..., Tensor] = torch.ops.para_core.group_normalized.default
    if needs_plain(x, *_without_none(weight, bias)):
        normalized = norm_reference.normalize
    return set_rows(normalized(x, of_ranks, fractions, groups, weight, bias, eps), rows)


@keep_outside_graphs
def _fractions(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fraction of all rows that each rank holds, as a tensor ``[ranks]``."""
    return new_table([rows / sum(sizes) for rows in sizes], dtype, device)


def run_batch_norm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.batch_norm`` in eval mode, which uses running statistics and needs no exchange."""
    _, rows = only_first(func, args, kwargs)
    if argument(args, kwargs, "training", 5, False) or rows.dim == 1:
        raise mixing_error(
            func,
            rows,
            "in training it needs statistics of all rows (call .eval() first), or its channels are sharded",
        )
    return set_rows(func(*args, **kwargs), rows)


BY_RULE: dict[Any, str] = {run_group_norm: "group_norm", run_batch_norm: "batch_norm"}


def moments_on_gpu(x: Tensor, groups: int) -> Tensor:
    """Return what :func:`norm_reference.moments` returns, by the Triton kernel if it can run."""
    fused = load_kernel("norm", x.device)
    if fused is None or not are_floats(x):
        return norm_reference.moments(x, groups)
    with on_device_of(x):
        out: Tensor = fused.moments(x, groups)
    return out


def normalized_on_gpu(
    x: Tensor,
    of_ranks: Tensor,
    shares: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return what :func:`norm_reference.normalize` returns, by the Triton kernel if it can run."""
    fused = load_kernel("norm", x.device)
    if fused is None or not are_floats(x, of_ranks, *_without_none(weight, bias)):
        return norm_reference.normalize(x, of_ranks, shares, groups, weight, bias, eps)
    with on_device_of(x):
        out: Tensor = fused.normalize(x, of_ranks, shares, groups, weight, bias, eps)
    return out


def _without_none(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _moments_shape(x: Tensor, groups: int) -> Tensor:
    dtype = torch.float32
    if x.dtype == torch.float64:
        dtype = torch.float64
    return x.new_empty(2, x.shape[0], groups, dtype=dtype)


define_operator("group_moments(Tensor x, SymInt groups) -> Tensor")
define_operator(
    "group_normalized(Tensor x, Tensor of_ranks, Tensor shares, SymInt groups, Tensor? weight, Tensor? bias, float "
    "eps) -> Tensor"
)
LIBRARY.impl("group_moments", norm_reference.moments, "CompositeExplicitAutograd")
LIBRARY.impl("group_moments", moments_on_gpu, "CUDA")
LIBRARY.impl("group_normalized", norm_reference.normalize, "CompositeExplicitAutograd")
LIBRARY.impl("group_normalized", normalized_on_gpu, "CUDA")
torch.library.register_fake("para_core::group_moments", _moments_shape, lib=LIBRARY)
torch.library.register_fake("para_core::group_normalized", lambda x, *_: torch.empty_like(x), lib=LIBRARY)
