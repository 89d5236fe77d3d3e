"""Optional forecasts: rules that extrapolate the residual of a skipped step from those of several computed steps.

A feature of :mod:`.registry`, which ``cache/__init__.py`` imports; without it only the last residual is
repeated. The weights must be traceable: no branch on a value. Tests: tests/cache/test_options.py,
tests/test_cache_quality.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.cache.forecast_rule import Forecast
from para_core.cache.registry import register_forecast, register_orders


def taylor(order: int) -> Forecast:
    """Return the forecast that extrapolates the last ``order + 1`` residuals by a polynomial in the timestep."""
    return Forecast(f"taylor {order}", order + 1, forecast_weights, "TaylorSeer (arXiv:2503.06923), eq. 9")


def forecast_weights(times: Tensor, now: Tensor, num_computed: Tensor) -> Tensor:
    """Return the weights ``[n]`` of the last n residuals that evaluate their Lagrange polynomial at ``now``.

    The forecast is exact if the residual is a polynomial of degree n - 1 in time, whatever the distances
    between the times. With equal distances it is the Taylor forecast with finite differences (TaylorSeer,
    arXiv:2503.06923, eq. 9).

    Args:
        times: ``[n]``, the times of the residuals, newest first, in any unit.
        now: The time to forecast for.
        num_computed: Number of residuals that exist. If there are fewer than n, or two at the same time (from
            schedulers that call the model twice per step), the polynomial only goes through the newest ones.

    Returns:
        Float64 weights whose sum is 1.
    """
    times = times.double()
    now = now.double()
    count = times.shape[0]
    weights = torch.zeros_like(times)
    weights[0] = 1.0
    for points in range(2, count + 1):
        gaps = times[:points, None] - times[None, :points]
        divisors = gaps + torch.eye(points, dtype=times.dtype, device=times.device)
        factors = (now - times[None, :points]) / divisors
        itself = torch.eye(points, dtype=torch.bool, device=times.device)
        polynomial = torch.where(itself, 1.0, factors).prod(dim=1)
        usable = (num_computed >= points) & (divisors != 0).all()
        padded = torch.cat([polynomial, torch.zeros_like(times[points:])])
        weights = torch.where(usable, padded, weights)
    return weights


def foca_weights(times: Tensor, now: Tensor, num_computed: Tensor) -> Tensor:
    """Return the weights of FoCa (arXiv:2508.16211): a BDF2 prediction (eq. 7), corrected by Heun's method
    (eq. 8).

    Heun's method averages two slopes. The slope at the predicted step is, by eq. 6, the slope between the
    last two residuals. As the slope at the last computed step, this function uses that of the parabola
    through the last three residuals, because with the slope of eq. 6 at both steps the result would be the
    Taylor forecast of order 1. Arguments and result are those of :func:`forecast_weights`, with n = 3. If
    two of the three times are equal, the forecast is the straight line through the newest two residuals, or
    the newest residual if these two have one time.
    """
    times = times.double()
    now = now.double()
    gap = times[0] - times[1]
    older_gap = times[1] - times[2]
    span = times[0] - times[2]
    zero = torch.zeros_like(gap)
    unit = torch.ones_like(gap)
    # Quotients by a distance of 0 are not finite, and then not chosen below.
    slope = torch.stack([unit, -unit, zero]) / gap
    older_slope = torch.stack([zero, unit, -unit]) / older_gap
    curve = (slope - older_slope) / span
    newest = torch.stack([unit, zero, zero])
    linear = newest + (now - times[0]) * slope
    # Extrapolate with the mean of two slopes: of the parabola at its newest point, and between the last two
    # residuals.
    corrected = linear + (now - times[0]) / 2 * gap * curve
    weights = torch.where((num_computed >= 2) & (gap != 0), linear, newest)
    # A loop that adds noise again returns to an earlier time, so the oldest time may equal the newest.
    has_three_times = (num_computed >= 3) & (gap != 0) & (older_gap != 0) & (span != 0)
    return torch.where(has_three_times, corrected, weights)


FOCA = Forecast("foca", 3, foca_weights, "FoCa, arXiv:2508.16211")

register_forecast(FOCA)
# Of the orders that docs/measured/cache_quality.md compares, 1 is the best where few steps are computed.
register_orders(taylor, on_schedule=1)
