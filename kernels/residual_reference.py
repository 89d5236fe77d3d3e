"""What a cache asks of residuals: how much one has changed, and a forecast added to a stream. The contract, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def change(now: Tensor, before: Tensor) -> Tensor:
    """Σ|now - before| and Σ|before| of each sample: their ratio is mean|Δ| / mean|previous|.

    Deterministic: equal inputs give equal bits, so ranks that hold the same never decide differently.

    Args:
        now, before: ``[B, n]``, of one float dtype; n may be 0.

    Returns:
        ``[B, 2]`` float32. NaN or inf where a sample has one.

    >>> change(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 3.0]])).tolist()
    [[3.0, 5.0]]
    """
    changed = (now - before).abs().sum(dim=-1, dtype=torch.float32)
    return torch.stack([changed, before.abs().sum(dim=-1, dtype=torch.float32)], dim=-1)


def forecast(entry: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``entry`` and the weighted residuals, added up.

    Args:
        entry: of any shape.
        residuals: like ``entry``, as many as ``weights``, at least one.

    Returns:
        Like ``entry``.

    >>> forecast(torch.tensor([1.0]), [torch.tensor([2.0]), torch.tensor([4.0])], [2.0, -0.5]).tolist()
    [3.0]
    """
    total = entry
    for weight, residual in zip(weights, residuals, strict=True):
        # One launch: adding with a factor of 1 is adding.
        total = total.add(residual, alpha=weight)
    return total
