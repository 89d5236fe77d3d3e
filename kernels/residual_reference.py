"""Reference, in plain PyTorch: the change of a residual between steps, and a sum of hidden states and
residuals. Tests: tests/kernels/test_small_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def change(now: Tensor, before: Tensor) -> Tensor:
    """Return Σ|now - before| and Σ|before| of each sample. First Block Cache compares their ratio with its
    threshold.

    Equal inputs give equal bits, so that ranks with equal inputs make the same decision to skip blocks.

    Args:
        now, before: ``[B, n]``, of one float dtype; n may be 0.

    Returns:
        ``[B, 2]`` float32. NaN or inf for a sample that contains one.

    >>> change(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 3.0]])).tolist()
    [[3.0, 5.0]]
    """
    changed = (now - before).abs().sum(dim=-1, dtype=torch.float32)
    return torch.stack([changed, before.abs().sum(dim=-1, dtype=torch.float32)], dim=-1)


def forecast(entry: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the sum of ``entry`` and the weighted residuals.

    Args:
        entry: Hidden states before the skipped blocks, of any shape.
        residuals: At least one stored residual, each of the shape and dtype of ``entry``.
        weights: One number per residual.

    Returns:
        A tensor of the shape and dtype of ``entry``.

    >>> forecast(torch.tensor([1.0]), [torch.tensor([2.0]), torch.tensor([4.0])], [2.0, -0.5]).tolist()
    [3.0]
    """
    total = entry
    for weight, residual in zip(weights, residuals, strict=True):
        # add() with alpha multiplies and adds in one launch.
        total = total.add(residual, alpha=weight)
    return total
