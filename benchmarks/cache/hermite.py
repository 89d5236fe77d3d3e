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


def _newest(times: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(times[:1]), torch.zeros_like(times[1:])])
