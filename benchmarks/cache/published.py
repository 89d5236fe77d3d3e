"""Methods of papers that neither para_core nor diffusers has: EasyCache's rule and HiCache's forecast."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from para_core import Forecast


class EasyCache:
    """EasyCache (arXiv:2507.02860) in place of ``transformer.forward``, for one prompt at a time, without CFG branches.

    What the model did to its input, v − x, is added to the next inputs while the output is expected to have changed little: the change of the
    input, times the rate at which outputs changed with inputs when last computed, added up. No block runs on a skipped step.

    Args:
        threshold: of the expected relative change of the output, added up since the last computed step.
        warmup_steps: so many first steps are computed, at least two.
    """

    def __init__(self, transformer: FluxTransformer2DModel, *, threshold: float, warmup_steps: int) -> None:
        self._compute = transformer.forward
        self._threshold, self._warmup_steps = threshold, max(warmup_steps, 2)
        self.reset()
        transformer.forward = self.forward

    def reset(self) -> None:
        """A generation begins."""
        self._calls, self._error = 0, 0.0
        self._input: Tensor | None = None
        self._computed_input: Tensor | None = None
        self._output: Tensor | None = None
        self._rate: float | None = None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
        """The velocity, computed or not."""
        if self._input is not None and self._output is not None and self._computed_input is not None:
            if self._rate is not None:
                change = (hidden_states - self._input).abs().mean()
                self._error += self._rate * float(change / self._output.abs().mean())
            if self._rate is not None and self._calls >= self._warmup_steps and self._error < self._threshold:
                self._calls, self._input = self._calls + 1, hidden_states
                return (hidden_states + (self._output - self._computed_input),)
        (output,) = self._compute(hidden_states, **kwargs)
        if self._output is not None and self._computed_input is not None:
            moved = (hidden_states - self._computed_input).abs().mean()
            self._rate = float((output - self._output).abs().mean() / moved)
        self._input = self._computed_input = hidden_states
        self._output, self._error, self._calls = output, 0.0, self._calls + 1
        return (output,)


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
