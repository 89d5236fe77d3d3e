"""Forecasts: rules that compute the residual of a skipped step from the residuals of computed steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Forecast:
    """A rule that forecasts the residual of a skipped step as a weighted sum of the last computed residuals.

    Args:
        name (`str`): The name of the rule in reports and messages.
        num_residuals (`int`): Number of residuals that are stored, at least 1.
        weights (`Callable`): ``weights(times, now, known)`` returns the weights ``[num_residuals]``. ``times``,
            ``[num_residuals]``, are the timesteps of the stored residuals, newest first; ``now`` is the timestep to
            forecast for; ``known`` is the number of residuals that were computed so far. All are float64 tensors. In a
            compiled graph they are on the device, so the function must not branch on their values.
        source (`str`): The publication of the rule.

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
    """Return the forecast that extrapolates the last ``order + 1`` residuals by a polynomial in the timestep.

    Order 0 repeats the last residual.
    """
    source = "First Block Cache" if order == 0 else "TaylorSeer (arXiv:2503.06923), eq. 9"
    return Forecast(f"taylor {order}", order + 1, forecast_weights, source)


def forecast_weights(times: Tensor, now: Tensor, known: Tensor) -> Tensor:
    """Return the weights ``[n]`` of the last n residuals that evaluate their Lagrange polynomial at ``now``.

    The forecast is exact if the residual is a polynomial of degree n - 1 in time, whatever the distances between the
    times. With equal distances it is the Taylor forecast with finite differences (TaylorSeer, arXiv:2503.06923, eq. 9).

    Args:
        times: ``[n]``, the times of the residuals, newest first, in any unit.
        now: The time to forecast for.
        known: Number of residuals that exist. If there are fewer than n, or two at the same time (from schedulers that
            call the model twice per step), the polynomial only goes through the newest ones.

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

    Heun's method averages the slope at the last computed step and the slope at the predicted step. By eq. 6 the latter
    is the slope of the prediction, which is that between the last two residuals. If the former were this slope too, the
    result would be the Taylor forecast of order 1. It is therefore the slope of the parabola through the last three
    residuals. Arguments and result are those of :func:`forecast_weights`, with n = 3.
    """
    gap, older = times[0] - times[1], times[1] - times[2]
    safe, safe_older = torch.where(gap == 0, 1.0, gap), torch.where(older == 0, 1.0, older)
    zero, unit = torch.zeros_like(gap), torch.ones_like(gap)
    straight = torch.stack([unit, -unit, zero]) / safe
    curve = (straight - torch.stack([zero, unit, -unit]) / safe_older) / (safe + safe_older)
    newest = torch.stack([unit, zero, zero])
    first = newest + (now - times[0]) * straight
    # Extrapolate with the mean of two slopes: of the parabola at its newest point, and between the last two residuals.
    second = first + (now - times[0]) / 2 * safe * curve
    weights = torch.where((known >= 2) & (gap != 0), first, newest)
    return torch.where((known >= 3) & (gap != 0) & (older != 0), second, weights)


FOCA = Forecast("foca", 3, foca_weights, "FoCa, arXiv:2508.16211")

FORECASTS = {forecast.name: forecast for forecast in (FOCA,)}


def forecast_of(forecast: str | Forecast) -> Forecast:
    """Return the forecast with the name ``forecast``, or ``forecast`` itself if it is a :class:`Forecast`.

    Raises:
        TypeError: ``forecast`` is neither a string nor a :class:`Forecast`.
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
