"""Forecasts: how the residual of a skipped step is computed from those of computed steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Forecast:
    """A rule that forecasts the residual of a skipped step as a weighted sum of the last computed ones.

    Args:
        name (`str`): Name in reports and messages.
        num_residuals (`int`): Number of residuals that are stored, at least 1.
        weights (`Callable`): ``weights(times, now, known)`` returns the weights ``[num_residuals]``. ``times``
            ``[num_residuals]`` are the timesteps of the stored residuals, newest first, ``now`` is that of the step to
            forecast, and ``known`` the number of residuals so far. All are float64 tensors, in a compiled graph on the
            device, so the function must not branch on their values.
        source (`str`): Who published it.

    Raises:
        TypeError, ValueError: ``num_residuals`` is not a positive integer, or ``weights`` is not callable.
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
            raise TypeError(f"weights is {self.weights!r}; expected a function weights(times, now, known).")


def taylor(order: int) -> Forecast:
    """Return the forecast that extrapolates the last ``order + 1`` residuals in the schedule's time. Order 0 repeats
    the last one.
    """
    source = "First Block Cache" if order == 0 else "TaylorSeer (arXiv:2503.06923), eq. 9"
    return Forecast(f"taylor {order}", order + 1, forecast_weights, source)


def forecast_weights(times: Tensor, now: Tensor, known: Tensor) -> Tensor:
    """Return the weights ``[n]`` of the last n residuals: those of the Lagrange polynomial through them at ``now``.

    Exact for a residual that is a polynomial of degree n - 1 in time, with any distances between the times. With equal
    distances it is the Taylor forecast with finite differences (TaylorSeer, arXiv:2503.06923, eq. 9).

    Args:
        times: ``[n]``, the times of the residuals, newest first, in any unit.
        now: The time to forecast for.
        known: Number of residuals. With fewer than n, or with two at the same time (schedulers that call the model
            twice per step), the polynomial goes through the newest ones only.

    Returns:
        Float64 weights whose sum is 1.
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
    """Return the weights of FoCa (arXiv:2508.16211): a BDF2 prediction (eq. 7), corrected by Heun's method (eq. 8).

    Heun's method averages the slopes at the last computed step and at the predicted one; by eq. 6 the latter is the
    slope of the prediction. With the slope between two residuals for both, the result would be Taylor's first order.
    Therefore the slope at the last computed step is that of the parabola through three residuals. Arguments and result
    as in :func:`forecast_weights`.
    """
    gap, older = times[0] - times[1], times[1] - times[2]
    safe, safe_older = torch.where(gap == 0, 1.0, gap), torch.where(older == 0, 1.0, older)
    zero, one = torch.zeros_like(gap), torch.ones_like(gap)
    straight = torch.stack([one, -one, zero]) / safe
    curve = (straight - torch.stack([zero, one, -one]) / safe_older) / (safe + safe_older)
    newest = torch.stack([one, zero, zero])
    first = newest + (now - times[0]) * straight
    # The mean of the parabola's slope at its newest point and of the slope between two residuals.
    second = first + (now - times[0]) / 2 * safe * curve
    weights = torch.where((known >= 2) & (gap != 0), first, newest)
    return torch.where((known >= 3) & (gap != 0) & (older != 0), second, weights)


FOCA = Forecast("foca", 3, foca_weights, "FoCa, arXiv:2508.16211")

FORECASTS = {forecast.name: forecast for forecast in (FOCA,)}


def forecast_of(forecast: str | Forecast) -> Forecast:
    """Return the forecast with this name, or ``forecast`` itself if it is a :class:`Forecast`.

    Raises:
        TypeError: ``forecast`` is neither.
        ValueError: There is no forecast with this name.
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
