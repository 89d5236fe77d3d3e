"""The decision whether to skip a step inside a graph, with tensors.

It must decide as :class:`~para_core.cache.decision.NumberDecider` does: change both. Only :mod:`.graph` calls
it. Tests: tests/cache/test_options.py compares both with one reference.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from para_core.cache.decision import DecisionInput, DecisionOutcome, Verdict, limit_of
from para_core.cache.options import CacheOptions
from para_core.cache.rules import Observation

# Verdicts as floats, because a graph computes with float tensors. SCHEDULE only comes as a forced verdict.
_HIT, _MISS = float(Verdict.HIT), float(Verdict.MISS)
_WARMUP, _LIMIT = float(Verdict.WARMUP), float(Verdict.LIMIT)
_NOT_FINITE = float(Verdict.NOT_FINITE)
_MASKED, _REPEATED = float(Verdict.MASKED), float(Verdict.REPEATED)


class StepNumbers(NamedTuple):
    """The numbers of a step and of the options that decide whether a call is skipped: 0-dim float64 tensors.

    They are parts of one tensor ``[8]``, in this order, so that other values do not cause a recompilation.
    ``GraphForm.begin_call`` makes that tensor.
    """

    # The number of a Verdict, or 0 if the step must be compared.
    forced: Any
    time: Any
    step: Any
    num_steps: Any
    threshold: Any
    warmup_steps: Any
    max_consecutive_hits: Any
    max_hits: Any


def limits_of(options: CacheOptions) -> tuple[float, float, float]:
    """Return the last three of the :class:`StepNumbers`, which do not change from step to step."""
    return options.warmup_steps, limit_of(options.max_consecutive_hits), limit_of(options.max_hits)


def force_if_mixed(numbers: Tensor, mixed: Tensor) -> Tensor:
    """Return ``numbers``, forced to compute the step if ``mixed``, of one element, is not 0."""
    return torch.cat([torch.where(mixed > 0, _REPEATED, numbers[:1]), numbers[1:]])


class _BranchCounters(NamedTuple):
    """Counters of the calls of one CFG branch in a generation.

    ``times`` are the timesteps of the last computed steps, newest first, one per residual that the options
    store. Zeros stand for steps that do not exist yet.
    """

    calls: Tensor
    hits: Tensor
    hits_in_a_row: Tensor
    times: tuple[Tensor, ...]

    def after(self, skip: Tensor, time: Tensor) -> Tensor:
        """Return the counters, as one tensor, after one more call at timestep ``time``, skipped if ``skip``."""
        times = [
            torch.where(skip, old, new) for old, new in zip(self.times, (time, *self.times[:-1]), strict=True)
        ]
        hits = torch.where(skip, self.hits + 1, self.hits)
        in_a_row = torch.where(skip, self.hits_in_a_row + 1, 0.0)
        return torch.stack([self.calls + 1, hits, in_a_row, *times])


class TensorDecider:
    """A :class:`~para_core.cache.decision.NumberDecider` for graphs: it computes with tensors, and changes
    its state in place.
    """

    in_graph: ClassVar[bool] = True

    def __init__(self, inputs: DecisionInput, numbers: Tensor) -> None:
        self.first = inputs.sample.contiguous()
        # One tensor holds the numbers of calls, hits and hits in a row, then the timesteps of the stored
        # residuals.
        counters = self.first.new_tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        room = inputs.options.chosen_forecast.num_residuals
        later = torch.zeros(room - 1, dtype=torch.float64, device=self.first.device)
        self._numbers = torch.cat([counters, numbers[1:2], later])

    @property
    def _counts(self) -> _BranchCounters:
        calls, hits, hits_in_a_row, *times = self._numbers.unbind()
        return _BranchCounters(calls, hits, hits_in_a_row, tuple(times))

    def decide(self, inputs: DecisionInput, numbers: Tensor) -> tuple[Tensor, DecisionOutcome]:
        """Return whether to skip the step, and the outcome for the report. Update the counters and ``first``.
        Collective: unlike in eager code the ranks compare in every call.
        """
        params = StepNumbers(*numbers.unbind())
        counts = self._counts
        first = self.first
        differences = inputs.differences(first).double()
        largest = differences.max()
        may_skip: Any = largest < params.threshold
        if inputs.options.policy is not None:
            may_skip = inputs.options.ask_policy(
                Observation(largest, params.threshold, params.step, params.num_steps, counts.hits_in_a_row)
            )
        may_skip = torch.as_tensor(may_skip, device=first.device)
        verdict = torch.where(may_skip, _HIT, _MISS)
        verdict = torch.where(differences.isfinite().all(), verdict, _NOT_FINITE)
        fixed = _fixed_verdict(params, counts)
        verdict = torch.where(fixed > 0, fixed.to(verdict.dtype), verdict)
        skip = (verdict == _HIT) | (verdict == _MASKED)
        self._numbers.copy_(counts.after(skip, params.time))
        first.copy_(torch.where(skip, first, inputs.sample))
        return skip, DecisionOutcome(differences, verdict, counts.calls - counts.hits, inputs.samples)

    def leave_graph(self) -> None:
        """Clone the stored tensors that a graph returned, because the next replay of a CUDA graph overwrites them."""
        self.first = self.first.clone()
        self._numbers = self._numbers.clone()

    def weights(self, options: CacheOptions, numbers: Tensor) -> list[Any]:
        """Return the weights of the stored residuals in the forecast, newest first.
        Call :meth:`decide` before.
        """
        forecast = options.chosen_forecast
        if forecast.num_residuals == 1:
            return [1.0]
        counts = self._counts
        return list(forecast.weights(self._numbers[3:], numbers[1], counts.calls - counts.hits).unbind())


def _fixed_verdict(params: StepNumbers, counts: _BranchCounters) -> Tensor:
    """Return the number of the verdict if limits, warm-up or the schedule determine it; 0 if the step is compared."""
    verdict = torch.where(counts.hits_in_a_row >= params.max_consecutive_hits, _LIMIT, 0.0)
    verdict = torch.where(counts.hits >= params.max_hits, _LIMIT, verdict)
    verdict = torch.where(counts.calls < params.warmup_steps, _WARMUP, verdict)
    return torch.where(params.forced > 0, params.forced, verdict)
