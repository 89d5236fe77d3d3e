"""Reference of group norm over sharded rows, in plain PyTorch: statistics of a rank, and the norm by all statistics.

:mod:`para_core.spatial.norm` calls it on a CPU and without Triton; the kernels are in ``kernels/norm.py``.
Tests: tests/kernels/test_small_kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moments(x: Tensor, groups: int) -> Tensor:
    """Return variance and mean of each group of channels over this rank's rows, ``[2, B, groups]``.

    Args:
        x: ``[B, C, ...]``, not empty.
        groups: Number of groups, a divisor of C.

    Returns:
        Float32, or float64 for float64 input. The variance is divided by the number of elements
        (``correction=0``).
    """
    if x.dtype not in (torch.float32, torch.float64):
        # In float32, because var_mean of 16 bits rounds its results to these, and E[x²] - E[x]² loses the
        # variance of numbers far from zero. One group at a time, to need no float32 copy of the input; a
        # compiler makes none.
        parts = [x]
        if not torch.compiler.is_compiling():
            parts = list(x.chunk(groups, 1))
        return torch.cat([moments(part.float(), groups // len(parts)) for part in parts], 2)
    if x.is_cpu:
        return torch.stack(_moments_on_cpu(x, groups))
    grouped = x.unflatten(1, (groups, -1))
    if x.is_contiguous():
        grouped = grouped.flatten(2)
    dims = tuple(range(2, grouped.ndim))
    return torch.stack(torch.var_mean(grouped, dims, correction=0))


def _moments_on_cpu(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean of each group, ``[B, groups]``.

    Channels are reduced first, because ``torch.var_mean`` is not vectorized on CPUs, and a sum over a group
    whose channels are last in memory is slow there.
    """
    dims = tuple(range(2, x.ndim))
    mean = x.mean(dims)
    apart = x - mean.view(*mean.shape, *[1] * len(dims))
    # The computed mean has a rounding error. Correct it, because the error matters for the deviations if
    # numbers are far from zero.
    off = apart.mean(dims)
    # Use mean(), whose sum is pairwise. vector_norm adds up in order, which loses digits of a sum of many
    # squares.
    var = (apart.square_().mean(dims) - off.square()).unflatten(1, (groups, -1))
    mean = (mean + off).unflatten(1, (groups, -1))
    of_groups = mean.mean(-1)
    # The variance of a group is the mean, over its channels, of the channel's variance plus the squared
    # distance of the channel's mean.
    return (var + (mean - of_groups[..., None]).square()).mean(-1), of_groups


def normalize(
    x: Tensor,
    of_ranks: Tensor,
    shares: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the group norm of this rank's rows, given the statistics of all ranks; in the dtype of ``x``.

    Without a gradient, which ``out=`` refuses. That of ``x`` the exchange of the statistics has refused before.

    Args:
        x: ``[B, C, ...]``.
        of_ranks: Results of :func:`moments` on each rank, ``[ranks, 2, B, groups]``.
        shares: Fraction of all rows that each rank holds, ``[ranks]``; their sum is 1.
        groups: Number of groups, a divisor of C.
        weight, bias: Scale and shift per channel, ``[C]``; None for none.
        eps: Added to the variance.
    """
    shares = shares[:, None, None]
    mean = (shares * of_ranks[:, 1]).sum(0)
    # The variance over all ranks is the weighted sum of each rank's variance plus the squared distance of the
    # rank's mean.
    var = (shares * (of_ranks[:, 0] + (of_ranks[:, 1] - mean).square())).sum(0)
    rstd = torch.rsqrt(var + eps)
    per_channel = x.shape[1] // groups
    scale = rstd.repeat_interleave(per_channel, 1)
    shift = (-mean * rstd).repeat_interleave(per_channel, 1)
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    shape = (*x.shape[:2], *[1] * (x.ndim - 2))
    # Passing out= avoids a float32 copy of the result.
    return torch.addcmul(shift.view(shape), x, scale.view(shape), out=torch.empty_like(x))
