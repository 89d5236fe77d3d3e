"""Custom operators for the two steps of a group norm over sharded rows: Triton kernels on GPUs, plain PyTorch
elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import norm_reference
from para_core.triton_support import are_floats, load_kernel, needs_plain, on_device_of

define_operator("group_moments(Tensor x, SymInt groups) -> Tensor")
define_operator(
    "group_normalized(Tensor x, Tensor of_ranks, Tensor shares, SymInt groups, Tensor? weight, Tensor? bias, float "
    "eps) -> Tensor"
)


def moments_on_gpu(x: Tensor, groups: int) -> Tensor:
    fused = load_kernel("norm", x.device)
    if fused is None or not are_floats(x):
        return norm_reference.moments(x, groups)
    with on_device_of(x):
        out: Tensor = fused.moments(x, groups)
    return out


def normalized_on_gpu(
    x: Tensor, of_ranks: Tensor, shares: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    fused = load_kernel("norm", x.device)
    if fused is None or not are_floats(x, of_ranks, *_present(weight, bias)):
        return norm_reference.normalized(x, of_ranks, shares, groups, weight, bias, eps)
    with on_device_of(x):
        out: Tensor = fused.normalized(x, of_ranks, shares, groups, weight, bias, eps)
    return out


def _moments_shape(x: Tensor, groups: int) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(2, x.shape[0], groups, dtype=dtype)


LIBRARY.impl("group_moments", norm_reference.moments, "CompositeExplicitAutograd")
LIBRARY.impl("group_moments", moments_on_gpu, "CUDA")
LIBRARY.impl("group_normalized", norm_reference.normalized, "CompositeExplicitAutograd")
LIBRARY.impl("group_normalized", normalized_on_gpu, "CUDA")
torch.library.register_fake("para_core::group_moments", _moments_shape, lib=LIBRARY)
torch.library.register_fake("para_core::group_normalized", lambda x, *_: torch.empty_like(x), lib=LIBRARY)


def moments(x: Tensor, groups: int) -> Tensor:
    """Return the variance and the mean of each group of channels of ``x`` over this rank's rows, ``[2, B, groups]``.

    ``x`` is ``[B, C, ...]``. The result is float32, or float64 for float64 input. On GPUs a Triton kernel computes it.
    """
    if needs_plain(x):
        return norm_reference.moments(x, groups)
    out: Tensor = torch.ops.para_core.group_moments.default(x, groups)
    return out


def normalized(
    x: Tensor, of_ranks: Tensor, shares: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the group norm of this rank's rows ``x`` ``[B, C, ...]``, given the statistics of all ranks.

    ``of_ranks`` ``[ranks, 2, B, groups]`` holds each rank's :func:`moments`, and ``shares`` ``[ranks]`` the fraction of
    all rows on each rank. On GPUs a Triton kernel computes the result.
    """
    if needs_plain(x, *_present(weight, bias)):
        return norm_reference.normalized(x, of_ranks, shares, groups, weight, bias, eps)
    out: Tensor = torch.ops.para_core.group_normalized.default(x, of_ranks, shares, groups, weight, bias, eps)
    return out


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]
