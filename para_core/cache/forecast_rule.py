"""The description of a rule that forecasts residuals, and the rule of plain First Block Cache."""

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


def _repeat_weights(times: Tensor, now: Tensor, num_computed: Tensor) -> Tensor:
    return torch.ones(1, dtype=torch.float64, device=times.device)


# The forecast of plain First Block Cache: the residual of the last computed step.
REPEATED = Forecast("taylor 0", 1, _repeat_weights, "First Block Cache")
