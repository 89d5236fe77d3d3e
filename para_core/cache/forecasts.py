"""Forecasts: rules that compute the residual of a skipped step from the residuals of computed steps.

The operators that compare and forecast residuals use Triton kernels on a GPU (few launches) and PyTorch
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import residual_reference
from para_core.triton_support import are_floats, load_kernel, needs_plain, on_device_of


@dataclass(frozen=True)
class Forecast:
    """A rule that forecasts the residual of a skipped step as a weighted sum of the last computed residuals.

    Args:
        name (`str`): The name of the rule in reports and messages.
        num_residuals (`int`): Number of residuals that are stored, at least 1.
        weights (`Callable`): ``weights(times, now, num_computed)`` returns the weights ``[num_residuals]``.
            ``times``, ``[num_residuals]``, are the timesteps of the stored residuals, newest first; ``now``
            is the timestep to forecast for; ``num_computed`` is the number of residuals that were computed so
            far. All are float64 tensors. In a compiled graph they are on the device, so the function must not
            branch on their values.
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
            raise TypeError(
                f"weights is {self.weights!r}; expected a function weights(times, now, num_computed)."
            )


def taylor(order: int) -> Forecast:
    """Return the forecast that extrapolates the last ``order + 1`` residuals by a polynomial in the timestep.

    Order 0 repeats the last residual.
    """
    source = "First Block Cache" if order == 0 else "TaylorSeer (arXiv:2503.06923), eq. 9"
    return Forecast(f"taylor {order}", order + 1, forecast_weights, source)


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
    Taylor forecast of order 1. Arguments and result are those of :func:`forecast_weights`, with n = 3.
    """
    gap = times[0] - times[1]
    older = times[1] - times[2]
    safe = torch.where(gap == 0, 1.0, gap)
    safe_older = torch.where(older == 0, 1.0, older)
    zero = torch.zeros_like(gap)
    unit = torch.ones_like(gap)
    straight = torch.stack([unit, -unit, zero]) / safe
    curve = (straight - torch.stack([zero, unit, -unit]) / safe_older) / (safe + safe_older)
    newest = torch.stack([unit, zero, zero])
    first = newest + (now - times[0]) * straight
    # Extrapolate with the mean of two slopes: of the parabola at its newest point, and between the last two
    # residuals.
    second = first + (now - times[0]) / 2 * safe * curve
    weights = torch.where((num_computed >= 2) & (gap != 0), first, newest)
    return torch.where((num_computed >= 3) & (gap != 0) & (older != 0), second, weights)


FOCA = Forecast("foca", 3, foca_weights, "FoCa, arXiv:2508.16211")

FORECASTS = {forecast.name: forecast for forecast in (FOCA,)}


define_operator("residual_change(Tensor now, Tensor before) -> Tensor")
define_operator("forecast(Tensor entry, Tensor[] residuals, float[] weights) -> Tensor")


def change_on_gpu(now: Tensor, before: Tensor) -> Tensor:
    fused = load_kernel("residual", now.device)
    if fused is None or not are_floats(now, before):
        return residual_reference.change(now, before)
    with on_device_of(now):
        sums: Tensor = fused.change(now, before)
    return sums


def forecast_on_gpu(entry: Tensor, residuals: list[Tensor], weights: list[float]) -> Tensor:
    fused = load_kernel("residual", entry.device)
    if fused is None or not are_floats(entry, *residuals) or len(residuals) > fused.MOST_RESIDUALS:
        return residual_reference.forecast(entry, residuals, weights)
    with on_device_of(entry):
        output: Tensor = fused.forecast(entry, residuals, weights)
    return output


LIBRARY.impl("residual_change", residual_reference.change, "CompositeExplicitAutograd")
LIBRARY.impl("residual_change", change_on_gpu, "CUDA")
LIBRARY.impl("forecast", residual_reference.forecast, "CompositeExplicitAutograd")
LIBRARY.impl("forecast", forecast_on_gpu, "CUDA")
torch.library.register_fake(
    "para_core::residual_change",
    lambda now, _: now.new_empty(now.shape[0], 2, dtype=torch.float32),
    lib=LIBRARY,
)
torch.library.register_fake("para_core::forecast", lambda entry, *_: torch.empty_like(entry), lib=LIBRARY)


def change(now: Tensor, before: Tensor) -> Tensor:
    """Return ``[B, 2]`` sums that compare ``now`` with ``before``, as :func:`residual_reference.change` does."""
    if needs_plain(now, before):
        return residual_reference.change(now, before)
    sums: Tensor = torch.ops.para_core.residual_change.default(now, before)
    return sums


def forecast(entry: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return ``entry`` plus the weighted sum of ``residuals``, as :func:`residual_reference.forecast` does."""
    if needs_plain(entry, *residuals):
        return residual_reference.forecast(entry, residuals, weights)
    output: Tensor = torch.ops.para_core.forecast.default(entry, list(residuals), list(weights))
    return output
