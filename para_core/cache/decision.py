"""The decision whether to skip a step, with Python numbers in eager code and with tensors in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.cache.blocks import CachedBlocks
from para_core.cache.options import CacheOptions, Number, Observation, rule_of
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim, SequenceMesh


class Verdict(IntEnum):
    """The reason why a step was skipped or computed."""

    HIT = 0
    MISS = 1
    # The step was computed, because it is the first step of a branch, or one of its warmup_steps.
    WARMUP = 2
    # The step was computed, because max_consecutive_hits or max_hits was reached.
    LIMIT = 3
    # The step was computed, because it is before start or after end, the last step (always_compute_last), or
    # in compute_steps.
    SCHEDULE = 4
    # The step was computed, because the difference was not finite.
    NOT_FINITE = 5
    # The step was skipped, because compute_steps is set and does not contain it.
    MASKED = 6
    # The step was computed, because calls of its branch within one step cannot be told apart.
    REPEATED = 7

    @property
    def skips(self) -> bool:
        return self in (Verdict.HIT, Verdict.MASKED)


# The verdicts as floats, because a graph computes with float tensors.
_HIT, _MISS, _WARMUP, _LIMIT, _, _NOT_FINITE, _MASKED, _REPEATED = map(float, Verdict)


@dataclass(frozen=True)
class Step:
    """The position of a model call in the denoising schedule. Calls without a schedule use the defaults.

    Args:
        index: Index of the step in the schedule.
        total: Number of steps in the schedule.
        time: The timestep, on the scale of the schedule.
        forced: The verdict, if the options determine it for this step; None if the step must be compared.
    """

    index: int = 0
    total: int = 1
    time: float = 0.0
    forced: Verdict | None = None


def step_of(options: CacheOptions, index: int, total: int, time: float) -> Step:
    """Return the :class:`Step` with this index, number of steps and timestep, forced if ``options`` determine it."""
    if options.compute_steps is not None:
        if options.computes(index, total):
            return Step(index, total, time, Verdict.SCHEDULE)
        return Step(index, total, time, Verdict.MASKED)
    is_outside = not options.start <= index / total < options.end
    if is_outside or (options.always_compute_last and index == total - 1):
        return Step(index, total, time, Verdict.SCHEDULE)
    return Step(index, total, time)


class DecisionParams(NamedTuple):
    """The numbers of a step and of the options that decide whether a call is skipped.

    In a graph they are 0-dim float64 tensors, so that other values do not cause a recompilation.
    """

    forced: Number  # The number of a Verdict, or 0 if the step must be compared.
    time: Number
    step: Number
    num_steps: Number
    threshold: Number
    warmup_steps: Number
    max_consecutive_hits: Number
    max_hits: Number

    @staticmethod
    def of(step: Step, options: CacheOptions, threshold: float) -> DecisionParams:
        return DecisionParams(
            forced=float(step.forced or 0),
            time=step.time,
            step=step.index,
            num_steps=step.total,
            threshold=threshold,
            warmup_steps=options.warmup_steps,
            max_consecutive_hits=_limit_of(options.max_consecutive_hits),
            max_hits=_limit_of(options.max_hits),
        )

    def tensor(self, device: torch.device) -> Tensor:
        """Return the fields as a float64 tensor ``[8]`` on ``device``, for which the host does not wait."""
        return torch.tensor(self, dtype=torch.float64).to(device, non_blocking=True)


def _limit_of(option: int | None) -> float:
    if option is None:
        return math.inf
    return option


def force_if_mixed(params: Tensor, mixed: Tensor) -> Tensor:
    """Return the tensor ``params`` of a graph, forced to compute the step if ``mixed``, of one element, is not 0."""
    return torch.cat([torch.where(mixed > 0, _REPEATED, params[:1]), params[1:]])


class BranchCounters(NamedTuple):
    """Counters of the calls of one CFG branch in a generation.

    ``times`` are the timesteps of the last computed steps, newest first, one per residual that the options
    store. Zeros stand for steps that do not exist yet.
    """

    calls: Number
    hits: Number
    hits_in_a_row: Number
    times: tuple[Number, ...]

    @property
    def computed(self) -> Number:
        return self.calls - self.hits

    def after(self, skip: Any, time: Number, where: Where) -> BranchCounters:
        """Return the counters after one more call, at timestep ``time``.
        ``skip`` is whether that call was skipped.
        """
        return BranchCounters(
            self.calls + 1,
            where(skip, self.hits + 1, self.hits),
            where(skip, self.hits_in_a_row + 1, 0.0),
            tuple(
                [where(skip, old, new) for old, new in zip(self.times, (time, *self.times[:-1]), strict=True)]
            ),
        )


# A function where(condition, a, b) that returns a or b: torch.where for 0-dim tensors, _where for Python
# numbers.
Where = Callable[[Any, Any, Any], Any]


def _where(condition: bool, a: Any, b: Any) -> Any:
    if condition:
        return a
    return b


def _verdict_without_difference(params: DecisionParams, counts: BranchCounters, where: Where) -> Number:
    """Return the number of the verdict if limits, warm-up or the schedule determine it; 0 if the step is compared."""
    verdict: Number = where(counts.hits_in_a_row >= params.max_consecutive_hits, _LIMIT, 0.0)
    verdict = where(counts.hits >= params.max_hits, _LIMIT, verdict)
    verdict = where(counts.calls < params.warmup_steps, _WARMUP, verdict)
    return where(params.forced > 0, params.forced, verdict)  # type: ignore[no-any-return]


class DecisionOutcome(NamedTuple):
    """The outcome of a decision, for the report. Its values are tensors if a graph decided.

    Args:
        differences: The difference of each sample; in eager code None if the verdict did not depend on it.
        verdict: A :class:`Verdict`, or its number as a tensor.
        computed: Number of computed steps of the branch before this call, whose residuals a forecast can use.
        samples: Number of samples in the call, over all ranks that share the batch.
    """

    differences: Any
    verdict: Any
    computed: Any
    samples: int


@dataclass(frozen=True)
class DecisionInput:
    """The inputs of the decision whether to skip one call.

    Args:
        sample: ``[B, ...]``, the values of this rank's tokens that are compared, usually some channels of the
            first-block residual. Each sample of the batch is compared with its own earlier value. If one
            difference is large, the whole batch is computed, because a graph cannot skip a part of it.
        params: The numbers of the step and the options; in a graph, a tensor ``[8]`` that contains them.
        mesh: The ranks that hold parts of one sequence, which decide together; None for a single rank.
        sharing: The mesh dim along which the batch is split in equal parts, if it is split. These ranks also
            decide together, from all samples, as one device would.
    """

    sample: Tensor
    options: CacheOptions
    params: DecisionParams | Tensor
    mesh: SequenceMesh | None
    sharing: MeshDim | None = None

    @property
    def samples(self) -> int:
        """The number of samples in the call, over all ranks that share the batch."""
        if self.sharing is None:
            return self.sample.shape[0]
        return self.sample.shape[0] * self.sharing.size

    def differences(self, first: Tensor) -> Tensor:
        """Return how much each sample differs from ``first``, its values in the last computed step, by the
        rule.

        The result, ``[samples]``, is equal on all ranks that decide together. This is a collective call.
        """
        rule = rule_of(self.options.rule)
        sums = rule.sums(self.sample.flatten(1), first.flatten(1))
        # Gather the sums and add them on each rank, so that all ranks add in the same order: different
        # rounding could make their decisions differ.
        if self.mesh is not None:
            for dim in self.mesh.dims:
                if dim.size > 1:
                    sums = all_gather(sums[None], [1] * dim.size, 0, dim).sum(dim=0)
        differences = rule.difference(sums)
        if self.sharing is not None:
            differences = all_gather(differences, [differences.shape[0]] * self.sharing.size, 0, self.sharing)
        return differences

    def may_skip(self, largest: Number, params: DecisionParams, counts: BranchCounters) -> Any:
        """Return whether a step with the difference ``largest`` may be skipped, by the policy or else the threshold."""
        if self.options.policy is None:
            return largest < params.threshold
        return self.options.ask_policy(
            Observation(largest, params.threshold, params.step, params.num_steps, counts.hits_in_a_row)
        )


class NumberDecider:
    """The object that decides the steps of one CFG branch in eager code, with Python numbers.

    The first call of the branch creates it. ``first`` holds the compared values of the last computed step.
    The host waits for the device at most once per call, and only if the difference decides.
    """

    def __init__(self, inputs: DecisionInput) -> None:
        params: Any = inputs.params
        later = [0.0] * (inputs.options.num_residuals - 1)
        self.first = inputs.sample.contiguous()
        self._counts = BranchCounters(1, 0, 0, (params.time, *later))

    def decide(self, inputs: DecisionInput) -> tuple[bool, DecisionOutcome]:
        """Return whether to skip the step, and the outcome for the report.
        Update the counters and ``first``.
        """
        params: Any = inputs.params
        counts = self._counts
        verdict = Verdict(int(_verdict_without_difference(params, counts, _where)))
        differences: list[float] | None = None
        if verdict is Verdict.HIT:
            differences = inputs.differences(self.first).tolist()
            verdict = Verdict.NOT_FINITE
            if all(map(math.isfinite, differences)):
                verdict = Verdict.MISS
                if bool(inputs.may_skip(max(differences), params, counts)):
                    verdict = Verdict.HIT
        skip = verdict.skips
        self._counts = counts.after(skip, params.time, _where)
        if not skip:
            self.first = inputs.sample.contiguous()
        return skip, DecisionOutcome(differences, verdict, counts.computed, inputs.samples)

    def weights(self, options: CacheOptions, params: Any) -> list[float]:
        """Return the weights of the stored residuals in the forecast, newest first.
        Call :meth:`decide` before.
        """
        if options.num_residuals == 1:
            return [1.0]
        times = torch.tensor(self._counts.times, dtype=torch.float64)
        now = torch.tensor(params.time, dtype=torch.float64)
        computed = torch.tensor(self._counts.computed, dtype=torch.float64)
        weights: list[float] = options.chosen_forecast.weights(times, now, computed).tolist()
        return weights


class TensorDecider:
    """A :class:`NumberDecider` for graphs, which computes with tensors and changes its state in place."""

    def __init__(self, inputs: DecisionInput) -> None:
        self.first = inputs.sample.contiguous()
        # One tensor holds the numbers of calls, hits and hits in a row, then the timesteps of the stored
        # residuals.
        counters = self.first.new_tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        later = torch.zeros(inputs.options.num_residuals - 1, dtype=torch.float64, device=self.first.device)
        params: Any = inputs.params
        self._numbers = torch.cat([counters, params[1:2], later])

    @property
    def _counts(self) -> BranchCounters:
        calls, hits, hits_in_a_row, *times = self._numbers.unbind()
        return BranchCounters(calls, hits, hits_in_a_row, tuple(times))

    def decide(self, inputs: DecisionInput) -> tuple[Tensor, DecisionOutcome]:
        numbers: Any = inputs.params
        params = DecisionParams(*numbers.unbind())
        counts = self._counts
        first = self.first
        differences = inputs.differences(first).double()
        may_skip = torch.as_tensor(inputs.may_skip(differences.max(), params, counts), device=first.device)
        verdict = torch.where(may_skip, _HIT, _MISS)
        verdict = torch.where(differences.isfinite().all(), verdict, _NOT_FINITE)
        fixed: Any = _verdict_without_difference(params, counts, torch.where)
        verdict = torch.where(fixed > 0, fixed.to(verdict.dtype), verdict)
        skip = (verdict == _HIT) | (verdict == _MASKED)
        after: Any = counts.after(skip, params.time, torch.where)
        self._numbers.copy_(torch.stack([*after[:3], *after.times]))
        first.copy_(torch.where(skip, first, inputs.sample))
        return skip, DecisionOutcome(differences, verdict, counts.computed, inputs.samples)

    def leave_graph(self) -> None:
        """Clone the stored tensors that a graph returned, because the next replay of a CUDA graph overwrites them."""
        self.first = self.first.clone()
        self._numbers = self._numbers.clone()

    def weights(self, options: CacheOptions, params: Any) -> list[Any]:
        if options.num_residuals == 1:
            return [1.0]
        computed: Any = self._counts.computed
        return list(options.chosen_forecast.weights(self._numbers[3:], params[1], computed).unbind())


def blocks_before_deciding(model: str, blocks: CachedBlocks, options: CacheOptions) -> int:
    """Return the number of blocks that run before a step is decided: 0 if the rule compares the input of
    block 0.

    Raises:
        ValueError: The rule decides before block 0, but ``modulated`` is None, or ``first_blocks`` is set.
    """
    if not options.decides_before_blocks:
        return options.first_blocks
    name = rule_of(options.rule).name
    if blocks.modulated is None:
        raise ValueError(
            f"rule {name} compares the modulated input of the first block, which is not known for {model}. Describe it "
            "in CachedBlocks(modulated=...), or use rule='first_block'."
        )
    if options.first_blocks != 1:
        raise ValueError(
            f"rule {name} decides before the first block, so first_blocks={options.first_blocks} has no effect. Leave "
            "it out."
        )
    return 0
