"""Whether the blocks that follow are skipped at a step: in eager code, or by tensors in a compiled graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from para_core.cache.options import CacheOptions, Observation
from para_core.cache.report import Observed, Verdict
from para_core.cache.residuals import BranchState
from para_core.collectives import all_gather
from para_core.mesh import SequenceMesh

# As numbers, which a graph can hold.
_HIT, _MISS, _WARMUP, _LIMIT, _NOT_FINITE = (
    float(verdict) for verdict in (Verdict.HIT, Verdict.MISS, Verdict.WARMUP, Verdict.LIMIT, Verdict.NOT_FINITE)
)


@dataclass(frozen=True)
class Step:
    """Where in the schedule a call is.

    Args:
        index, total: of the steps of the schedule; a call by hand has no schedule.
        time: on the schedule's own scale.
        must_compute: why this step is not to be skipped, if so.
    """

    index: int = 0
    total: int = 1
    time: float = 0.0
    must_compute: Verdict | None = None

    def numbers(self, options: CacheOptions, device: torch.device) -> Tensor:
        """For graphs, which then serve every number: whether to compute, time, index, total, threshold, warm-up, limit. Float64."""
        limit = math.inf if options.max_consecutive_hits is None else options.max_consecutive_hits
        numbers = [float(self.must_compute or 0), self.time, self.index, self.total]
        numbers += [options.residual_diff_threshold, options.warmup_steps, limit]
        return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)


@dataclass(frozen=True)
class Question:
    """
    Args:
        sample: of the first-block residual of this rank's tokens, what is compared; ``[B, ...]``. Each sample of the batch is
            compared with itself, and one that changed much is enough to compute all: a graph cannot skip half a batch.
        step, step_numbers: where in the schedule; the second for graphs.
        mesh: ranks that hold parts of one sequence, and decide alike.
    """

    sample: Tensor
    options: CacheOptions
    step: Step
    step_numbers: Tensor
    mesh: SequenceMesh | None

    @property
    def num_residuals(self) -> int:
        return self.options.forecast_order + 1


def begin(state: BranchState, asked: Question, traced: bool) -> Observed:
    """The first call of a branch: computed."""
    sample = asked.sample
    state.first, state.traced = sample.contiguous(), traced
    if traced:
        # One call, no hit in a row, one computed; the time of this one.
        counted = sample.new_tensor([1.0, 0.0, 1.0], dtype=torch.float64)
        later = torch.zeros(asked.num_residuals - 1, dtype=torch.float64, device=sample.device)
        state.numbers = torch.cat([counted, asked.step_numbers[1:2], later])
    else:
        state.calls, state.hits_in_a_row = 1, 0
        state.times = [asked.step.time]
    return None, Verdict.WARMUP


def decide_now(state: BranchState, asked: Question, first: Tensor) -> tuple[bool, Observed]:
    """In eager code. The host waits for the device at most once, and not where the residual is not asked for."""
    options, step = asked.options, asked.step
    verdict = step.must_compute
    differences: list[float] | None = None
    if verdict is None and state.calls < options.warmup_steps:
        verdict = Verdict.WARMUP
    limit = options.max_consecutive_hits
    if verdict is None and limit is not None and state.hits_in_a_row >= limit:
        verdict = Verdict.LIMIT
    if verdict is None:
        differences = _measure(asked, first).tolist()
        verdict = _verdict(state, asked, differences)
    state.calls += 1
    skip = verdict is Verdict.HIT
    state.hits_in_a_row = state.hits_in_a_row + 1 if skip else 0
    if not skip:
        state.times = [step.time, *state.times][: asked.num_residuals]
        state.first = asked.sample.contiguous()
    return skip, (differences, verdict)


def _verdict(state: BranchState, asked: Question, differences: list[float]) -> Verdict:
    if not all(math.isfinite(x) for x in differences):
        return Verdict.NOT_FINITE
    largest, threshold, step = max(differences), asked.options.residual_diff_threshold, asked.step
    may_skip: Any = largest < threshold
    if asked.options.policy is not None:
        may_skip = asked.options.ask_policy(
            Observation(largest, threshold, step.index, step.total, state.hits_in_a_row)
        )
    return Verdict.HIT if bool(may_skip) else Verdict.MISS


def decide_in_graph(state: BranchState, asked: Question, first: Tensor) -> tuple[Tensor, Observed]:
    """The same while a graph is traced: its state is changed in place."""
    options, numbers = asked.options, state.numbers
    if numbers is None:
        raise RuntimeError("the state of a cache has no numbers; reset_cache(model) makes it anew.")
    forced, time, index, total, threshold, warmup_steps, limit = asked.step_numbers.unbind()
    calls, hits_in_a_row, computed = numbers[:3].unbind()
    times = numbers[3:]
    differences = _measure(asked, first).double()
    largest = differences.max()
    may_skip: Any = largest < threshold
    if options.policy is not None:
        may_skip = options.ask_policy(Observation(largest, threshold, index, total, hits_in_a_row))
        may_skip = torch.as_tensor(may_skip, device=first.device)
    verdict = torch.where(may_skip, _HIT, _MISS)
    verdict = torch.where(differences.isfinite().all(), verdict, _NOT_FINITE)
    verdict = torch.where(hits_in_a_row >= limit, _LIMIT, verdict)
    verdict = torch.where(calls < warmup_steps, _WARMUP, verdict)
    verdict = torch.where(forced > 0, forced.to(verdict.dtype), verdict)
    skip = verdict == _HIT
    hits_in_a_row = torch.where(skip, hits_in_a_row + 1, 0.0)
    counted = torch.stack([calls + 1, hits_in_a_row, torch.where(skip, computed, computed + 1)])
    times = torch.where(skip, times, torch.cat([time[None], times[:-1]]))
    numbers.copy_(torch.cat([counted, times]))
    first.copy_(torch.where(skip, first, asked.sample))
    return skip, (differences, verdict)


def _measure(asked: Question, first: Tensor) -> Tensor:
    """``[B]`` differences, the same on all ranks that hold parts of this sequence."""
    rule = asked.options.rule
    sums = rule.sums(asked.sample.flatten(1), first.flatten(1))
    # Every rank adds up the same numbers in the same order, so none decides by another rounding.
    for dim in () if asked.mesh is None else asked.mesh.dims:
        if dim.size > 1:
            sums = all_gather(sums[None], [1] * dim.size, 0, dim).sum(dim=0)
    return rule.difference(sums)
