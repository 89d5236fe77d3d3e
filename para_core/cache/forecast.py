"""Forecasting a residual from those of the last computed steps."""

from __future__ import annotations

import torch
from torch import Tensor


def forecast_weights(times: Tensor, now: Tensor, known: Tensor) -> Tensor:
    """Weights ``[n]`` of the last n residuals in a forecast: Lagrange's polynomial through them, at ``now``.

    Exact for a residual that is a polynomial of degree n - 1 in time, at any distances. A Taylor forecast with finite
    differences (TaylorSeer, arXiv:2503.06923, eq. 9) is this at equal distances.

    Args:
        times: ``[n]``, of the residuals, newest first; any unit.
        now: the time to forecast for.
        known: how many of them there are; with fewer than n, or with two at the same time (schedulers that call twice
            per step), the polynomial goes through the newest ones only.

    Returns:
        Float64, summing to 1.
    """
    times, now = times.double(), now.double()
    count = times.shape[0]
    weights = torch.zeros_like(times)
    weights[0] = 1.0
    for points in range(2, count + 1):
        gaps = times[:points, None] - times[None, :points]
        apart = gaps + torch.eye(points, dtype=times.dtype, device=times.device)
        factors = (now - times[None, :points]) / apart
        itself = torch.eye(points, dtype=torch.bool, device=times.device)
        polynomial = torch.where(itself, 1.0, factors).prod(dim=1)
        usable = (known >= points) & (apart != 0).all()
        padded = torch.cat([polynomial, torch.zeros_like(times[points:])])
        weights = torch.where(usable, padded, weights)
    return weights
