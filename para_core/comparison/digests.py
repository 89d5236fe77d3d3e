"""Digests of tensors: a rank's part can be compared with the whole tensor after both are freed.

:mod:`.call_record` makes them, and :mod:`.difference` compares their rows. Unlike hashes they are compared up
to a tolerance. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Number of random vectors on which each slice of a tensor is projected.
_PROBES = 4
# Larger values would overflow the projections. NaN becomes another value than the largest one, so that both
# differ.
_LARGEST = 1e6


@dataclass(frozen=True)
class Digest:
    """A summary of a tensor: shape, dtype, and random projections of its slices along each dim.

    ``rows[dim]`` has shape ``[size of dim, probes]``: the projections of each slice on ``probes`` random
    vectors. The projections preserve the ratio of two norms on average, unless a slice is antisymmetric in
    two dims of equal size, which share their vectors. ``rows[0]`` of a 1-D real tensor is ``[size, 1]``, the
    tensor itself. A 0-D tensor counts as one slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[Tensor, ...]

    def to_cpu(self) -> Digest:
        """Return a copy on the CPU, which can be sent to another rank."""
        return replace(self, rows=tuple([row.cpu() for row in self.rows]))


def digest(x: Tensor) -> Digest:
    """Return the digest of ``x``, in which NaN and values beyond ±``_LARGEST`` count as other numbers."""
    shape, dtype = tuple(x.shape), x.dtype
    x = x.detach()
    if x.ndim == 0:
        x = x.reshape(1)
    num_dims = x.ndim
    if x.is_complex():
        # The real and imaginary parts are a last dim, which is contracted like the others, but has no slices.
        x = torch.view_as_real(x.resolve_conj())
    if x.dtype != torch.float64:
        x = x.float()
    x = x.nan_to_num(nan=_LARGEST / 3).clamp(-_LARGEST, _LARGEST)
    return Digest(shape, dtype, tuple([_project_slices(x, dim) for dim in range(num_dims)]))


def _project_slices(x: Tensor, dim: int) -> Tensor:
    """Return random projections of the slices of ``x`` along ``dim``, ``[size of dim, probes]``.

    All other dims are contracted with random vectors, one after the other.
    """
    x = x.movedim(dim, 0)
    if x.ndim == 1:
        return x[:, None]
    # Not a matrix product, which a user may let round to TF32 or bfloat16 (torch.set_float32_matmul_precision).
    rows = torch.stack([(x * probe).sum(-1) for probe in _noise(x.shape[-1], x).unbind(1)], dim=-1)
    while rows.ndim > 2:
        rows = (rows * _noise(rows.shape[-2], rows)).sum(-2)
    return rows


def _noise(size: int, like: Tensor) -> Tensor:
    """Return the random vectors ``[size, probes]`` along a dim of this size, with the dtype and device of ``like``."""
    # The size is the seed, so that a rank's part and the whole tensor, which differ in one dim, are projected
    # on the same vectors along all others.
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, _PROBES, generator=generator, device="cpu").to(like)
