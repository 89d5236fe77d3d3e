"""Not exact: numbers in 8 bits on the way to other ranks, as ``torch.float8_e4m3fn`` has them. The contract, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32


def write(x: Tensor, scale_rows: int) -> Tensor:
    """``x`` with the scale of each head behind its tokens, in bytes.

    Args:
        x: ``[B, H, S, D]``, of any strides, a float dtype of at most 32 bits.
        scale_rows: tokens that hold the scale: at least 4 / D.

    Returns:
        ``[B, H, S + scale_rows, D]``, uint8: x / scale rounded to float8_e4m3fn, and the scale as the 4 bytes of a float32. The scale of a
        sample and head is its largest amount / 448, or 1 if that is 0.
    """
    largest = x.abs().amax((2, 3)).float() if x.shape[2] * x.shape[3] else x.new_zeros(x.shape[:2]).float()
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    scale = scale.masked_fill(scale == 0, 1.0)
    tokens = (x / scale[..., None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    rows = tokens.new_zeros(*x.shape[:2], scale_rows * x.shape[3])
    rows[..., :SCALE_BYTES] = scale[..., None].view(torch.uint8)
    return torch.cat([tokens, rows.unflatten(2, (scale_rows, x.shape[3]))], dim=2)


def read(x: Tensor, scale_rows: int, dtype: torch.dtype) -> Tensor:
    """What :func:`write` wrote, ``[B, H, S + scale_rows, D]`` of any strides, as ``[B, H, S, D]`` in ``dtype``."""
    tokens, rows = x.split([x.shape[2] - scale_rows, scale_rows], dim=2)
    scale = rows.flatten(2)[..., :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    numbers: Tensor = tokens.contiguous().view(torch.float8_e4m3fn).float() * scale[..., None]
    return numbers.to(dtype)
