"""Inputs of attention on one device, and the error measure of a parallel result."""

import torch
from torch import Tensor


def make_qkv(S, H, D=8, *, B=2, S_k=None, H_kv=None, D_v=None, dtype=torch.float32, seed=0) -> list[Tensor]:
    """Return query, key and value, which are the same on all ranks and in the parent process."""
    generator = torch.Generator().manual_seed(seed)
    of_keys = (B, H_kv or H, S if S_k is None else S_k)
    shapes = [(B, H, S, D), (*of_keys, D), (*of_keys, D_v or D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ‖out − expected‖ / ‖expected‖, or infinity if shape or dtype differ or a number is NaN."""
    if out.shape != expected.shape or (expected.dtype != torch.float64 and out.dtype != expected.dtype):
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(error.nan_to_num(nan=float("inf")))
