"""How the residual of a skipped step is forecast from those of computed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Forecast:
    """How the residual of a skipped step is forecast from those of the last computed ones.

    Args:
        name: in reports and messages.
        num_residuals: so many are stored, at least 1.
        weights: ``weights(times, now, known)``: of the stored residuals in their sum, ``[num_residuals]``. ``times``: of the
            stored ones, newest first, ``[num_residuals]``; ``now``: of the step to forecast; ``known``: how many there are so
            far, 0-dim. All float64 tensors, on the device in a compiled graph: no branch on their values.
        source: who published it.
    """

    name: str
    num_residuals: int
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    source: str

    def __post_init__(self) -> None:
        if isinstance(self.num_residuals, bool) or not isinstance(self.num_residuals, int):
            raise TypeError(f"num_residuals is {self.num_residuals!r}; expected an integer.")
        if self.num_residuals < 1:
            raise ValueError(f"num_residuals is {self.num_residuals}; expected at least 1.")
        if not callable(self.weights):
            raise TypeError(
                f"weights is {self.weights!r}; expected a function of the times, the time now, and how many are known."
            )


def taylor(order: int) -> Forecast:
    """The residuals of the last ``order + 1`` computed steps, extrapolated in the schedule's time; 0 adds the last one."""
    source = "First Block Cache" if order == 0 else "TaylorSeer (arXiv:2503.06923), eq. 9"
    return Forecast(f"taylor {order}", order + 1, forecast_weights, source)


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


def foca_weights(times: Tensor, now: Tensor, known: Tensor) -> Tensor:
    """FoCa (arXiv:2508.16211): BDF2 predicts (eq. 7), Heun corrects (eq. 8) with the slopes at the last computed step and at
    the predicted one, which by eq. 6 is the slope that went into the prediction.

    With one slope of two residuals for both this is Taylor's first order, at any distances; so the one at the last computed
    step is that of the parabola through three. Args and result as for :func:`forecast_weights`.
    """
    gap, older = times[0] - times[1], times[1] - times[2]
    safe, safe_older = torch.where(gap == 0, 1.0, gap), torch.where(older == 0, 1.0, older)
    zero, one = torch.zeros_like(gap), torch.ones_like(gap)
    straight = torch.stack([one, -one, zero]) / safe
    curve = (straight - torch.stack([zero, one, -one]) / safe_older) / (safe + safe_older)
    newest = torch.stack([one, zero, zero])
    first = newest + (now - times[0]) * straight
    # The parabola's slope at its newest point, and the straight one.
    second = first + (now - times[0]) / 2 * safe * curve
    found = torch.where((known >= 2) & (gap != 0), first, newest)
    return torch.where((known >= 3) & (gap != 0) & (older != 0), second, found)


FOCA = Forecast("foca", 3, foca_weights, "FoCa, arXiv:2508.16211")

FORECASTS = {forecast.name: forecast for forecast in (FOCA,)}


def forecast_of(forecast: str | Forecast) -> Forecast:
    """A forecast by its name, or itself.

    Raises:
        ValueError, TypeError: there is no such forecast.
    """
    if isinstance(forecast, Forecast):
        return forecast
    if not isinstance(forecast, str):
        raise TypeError(
            f"forecast is {forecast!r}; expected a name, a Forecast of para_core, or None: forecast_order=1."
        )
    if forecast not in FORECASTS:
        names = ", ".join(map(repr, FORECASTS))
        raise ValueError(f"forecast is {forecast!r}; expected one of {names}, a Forecast, or None: forecast_order=1.")
    return FORECASTS[forecast]
