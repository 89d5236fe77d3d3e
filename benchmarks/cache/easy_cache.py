"""EasyCache (arXiv:2507.02860), written from the paper: a rule that sees the model from outside.

What the model did to its input, v − x, is added to the next inputs while the output is expected to have changed little:
the change of the input, times the rate at which outputs changed with inputs when last computed, added up. No block runs on a
skipped step.
"""

from __future__ import annotations

from typing import Any

from diffusers import FluxTransformer2DModel
from torch import Tensor


class EasyCache:
    """In place of ``transformer.forward``; for one prompt at a time, without branches.

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
