"""Forecasts that were published, beside Taylor's. Each is a ``Forecast``, as one of a user's own would be."""

from __future__ import annotations

import torch
from torch import Tensor

from para_core import Forecast


def hermite(order: int, sigma: float = 0.5) -> Forecast:
    """HiCache (arXiv:2508.16984): Taylor's powers x^k are sigma^k H_k(sigma x), of the physicists' Hermite polynomials H_k.

    x is counted in distances of the last two computed steps. The first order is Taylor's with its slope times 2 sigma^2.
    """

    def weights(times: Tensor, now: Tensor, known: Tensor) -> Tensor:
        gap = times[0] - times[1]
        x = (now - times[0]) / torch.where(gap == 0, 1.0, gap)
        slope = 2 * sigma**2 * x
        first = torch.stack([1 + slope, -slope, *[torch.zeros_like(x)] * (order - 1)])
        found = torch.where((known >= 2) & (gap != 0), first, _newest(times))
        if order == 2:
            older = times[1] - times[2]
            ratio = gap / torch.where(older == 0, 1.0, older)
            # Backward differences of backward differences, over the newest distance.
            curve = sigma**2 * (4 * sigma**2 * x * x - 2) / 2
            second = first + curve * torch.stack([torch.ones_like(x), -1 - ratio, ratio])
            found = torch.where((known >= 3) & (gap != 0) & (older != 0), second, found)
        return found

    return Forecast(f"hermite {order}, sigma {sigma:g}", order + 1, weights, "HiCache, arXiv:2508.16984")


def foca() -> Forecast:
    """FoCa (arXiv:2508.16211): BDF2 predicts (eq. 7), Heun corrects (eq. 8) with the slopes at the last computed step and at
    the predicted one, which by eq. 6 is the slope that went into the prediction.

    With one slope of two residuals for both this is Taylor's first order, at any distances; so the one at the last computed
    step is that of the parabola through three.
    """

    def weights(times: Tensor, now: Tensor, known: Tensor) -> Tensor:
        gap, older = times[0] - times[1], times[1] - times[2]
        safe, safe_older = torch.where(gap == 0, 1.0, gap), torch.where(older == 0, 1.0, older)
        zero, one = torch.zeros_like(gap), torch.ones_like(gap)
        straight = torch.stack([one, -one, zero]) / safe
        curve = (straight - torch.stack([zero, one, -one]) / safe_older) / (safe + safe_older)
        distance = now - times[0]
        first = _newest(times) + distance * straight
        # The parabola's slope at its newest point, and the straight one.
        second = first + distance / 2 * safe * curve
        found = torch.where((known >= 2) & (gap != 0), first, _newest(times))
        return torch.where((known >= 3) & (gap != 0) & (older != 0), second, found)

    return Forecast("foca", 3, weights, "FoCa, arXiv:2508.16211")


def _newest(times: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(times[:1]), torch.zeros_like(times[1:])])
