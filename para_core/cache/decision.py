"""Whether the blocks behind the first are skipped at a step: decided by Python's numbers, or by tensors in a graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from para_core.cache.blocks import CachedBlocks
from para_core.cache.options import CacheOptions, Number, Observation, rule_of
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim, SequenceMesh


class Verdict(IntEnum):
    """Why a step was skipped or computed."""

    HIT = 0
    MISS = 1
    # The first step of a branch, or one of warmup_steps.
    WARMUP = 2
    # max_consecutive_hits or max_hits was reached.
    LIMIT = 3
    # Outside of start and end, the last step, or one that compute_steps names.
    SCHEDULE = 4
    # The difference was no finite number.
    NOT_FINITE = 5
    # compute_steps leaves the step out, so it was skipped.
    MASKED = 6

    @property
    def skips(self) -> bool:
        return self in (Verdict.HIT, Verdict.MASKED)


# As numbers, which a graph can hold.
_HIT, _MISS, _WARMUP, _LIMIT, _, _NOT_FINITE, _MASKED = map(float, Verdict)


@dataclass(frozen=True)
class Step:
    """Where in the schedule a call is.

    Args:
        index, total: of the steps of the schedule; a call by hand has no schedule.
        time: on the schedule's own scale.
        forced: the verdict, where the step is not asked for.
    """

    index: int = 0
    total: int = 1
    time: float = 0.0
    forced: Verdict | None = None


def step_of(options: CacheOptions, index: int, total: int, time: float) -> Step:
    """Return the step ``index`` of ``total``, with the verdict that ``options`` fixes for it, if any."""
    if options.compute_steps is not None:
        return Step(index, total, time, Verdict.SCHEDULE if options.computes(index, total) else Verdict.MASKED)
    outside = not options.start <= index / total < options.end
    computed = outside or (options.always_compute_last and index == total - 1)
    return Step(index, total, time, Verdict.SCHEDULE if computed else None)


class DecisionParams(NamedTuple):
    """By what a call is decided. In a graph 0-dim float64 tensors, so that one graph serves all values."""

    forced: Number  # a Verdict; 0: it is to be asked
    time: Number
    step: Number
    num_steps: Number
    threshold: Number
    warmup_steps: Number
    max_consecutive_hits: Number
    max_hits: Number

    @staticmethod
    def of(step: Step, options: CacheOptions, threshold: float) -> DecisionParams:
        limits = [math.inf if x is None else x for x in (options.max_consecutive_hits, options.max_hits)]
        forced = float(step.forced or 0)
        return DecisionParams(forced, step.time, step.index, step.total, threshold, options.warmup_steps, *limits)

    def tensor(self, device: torch.device) -> Tensor:
        """Float64, one number per field."""
        return torch.tensor(self, dtype=torch.float64).to(device, non_blocking=True)


class Counts(NamedTuple):
    """What is counted of one branch.

    Args:
        calls, hits, hits_in_a_row: so far; the last since the last computed call.
        times: of the last computed steps, newest first; 0 where there are none yet.
    """

    calls: Number
    hits: Number
    hits_in_a_row: Number
    times: tuple[Number, ...]

    @property
    def computed(self) -> Number:
        return self.calls - self.hits

    def after(self, skip: Any, time: Number, where: Where) -> Counts:
        """Behind a call at ``time`` that was skipped, or computed."""
        return Counts(
            self.calls + 1,
            where(skip, self.hits + 1, self.hits),
            where(skip, self.hits_in_a_row + 1, 0.0),
            tuple([where(skip, old, new) for old, new in zip(self.times, (time, *self.times[:-1]), strict=True)]),
        )


# where(condition, one, other): of numbers, or of 0-dim tensors.
Where = Callable[[Any, Any, Any], Any]


def _where(condition: bool, one: Any, other: Any) -> Any:
    return one if condition else other


def _unasked(terms: DecisionParams, counts: Counts, where: Where) -> Number:
    """The verdict for which the residual need not be looked at; 0 if it must be."""
    found: Number = where(counts.hits_in_a_row >= terms.max_consecutive_hits, _LIMIT, 0.0)
    found = where(counts.hits >= terms.max_hits, _LIMIT, found)
    found = where(counts.calls < terms.warmup_steps, _WARMUP, found)
    return where(terms.forced > 0, terms.forced, found)  # type: ignore[no-any-return]


class Observed(NamedTuple):
    """What a call was decided by; tensors if a graph decided.

    Args:
        differences: of each sample; None: not asked for.
        verdict: a ``Verdict``, or its number.
        computed: steps of the branch that were computed before, from whose residuals this one may be forecast.
        samples: number of samples of the call, on all ranks that share them.
    """

    differences: Any
    verdict: Any
    computed: Any
    samples: int

    def outside_graph(self) -> Observed:
        """Return copies of the tensors, which the next replay of a CUDA graph overwrites."""
        values: list[Any] = [x.clone() if isinstance(x, Tensor) else x for x in self]
        return Observed(*values)


class Stopwatch:
    """Seconds of what runs until :meth:`stop`, without waiting for an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> Stopwatch:
        self._seconds = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()
        return self

    @property
    def seconds(self) -> float:
        if self._events is None:
            return self._seconds
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class StepRecord:
    """A call as it was observed; reading its tensors, or its seconds, may wait for an accelerator.

    Args:
        branches: those that the call held, each with as many of the ``samples``.
        room: so many residuals are stored at most.
    """

    step: int
    branches: list[str]
    samples: int
    threshold: float
    observed: Observed
    room: int
    stopwatch: Stopwatch


@dataclass(frozen=True)
class DecisionInput:
    """What a decider is asked at one call.

    Args:
        sample: of the first-block residual of this rank's tokens, what is compared; ``[B, ...]``. Each sample of the batch is
            compared with itself, and one that changed much is enough to compute all: a graph cannot skip half a batch.
        options: the rule, and the policy.
        terms: numbers, or for a graph the tensor of them.
        mesh: ranks that hold parts of one sequence, and decide alike.
        sharing: ranks that each have a part of the samples of the call, as many as this rank. They decide alike, too: by all
            samples, as one device does.
    """

    sample: Tensor
    options: CacheOptions
    terms: DecisionParams | Tensor
    mesh: SequenceMesh | None
    sharing: MeshDim | None = None

    @property
    def samples(self) -> int:
        """Number of samples of the call, on all ranks that share them."""
        return self.sample.shape[0] * (1 if self.sharing is None else self.sharing.size)

    def differences(self, first: Tensor) -> Tensor:
        """Return the differences to ``first`` of all samples of the call, ``[samples]``; the same on all ranks that share the call."""
        rule = rule_of(self.options.rule)
        sums = rule.sums(self.sample.flatten(1), first.flatten(1))
        # Every rank adds up the same numbers in the same order, so none decides by another rounding.
        for dim in () if self.mesh is None else self.mesh.dims:
            if dim.size > 1:
                sums = all_gather(sums[None], [1] * dim.size, 0, dim).sum(dim=0)
        differences = rule.difference(sums)
        if self.sharing is not None:
            differences = all_gather(differences, [differences.shape[0]] * self.sharing.size, 0, self.sharing)
        return differences

    def may_skip(self, largest: Number, terms: DecisionParams, counts: Counts) -> Any:
        """What the threshold says of the largest difference, or the policy."""
        if self.options.policy is None:
            return largest < terms.threshold
        return self.options.ask_policy(
            Observation(largest, terms.threshold, terms.step, terms.num_steps, counts.hits_in_a_row)
        )


class Decider(Protocol):
    """Decides for one branch; begins with a call that was computed.

    Attributes:
        first: the first-block residual that the next one is compared with, sampled.
    """

    first: Tensor

    def decide(self, inputs: DecisionInput) -> tuple[Any, Observed]:
        """Whether to skip, and by what it was decided."""

    def weights(self, options: CacheOptions, terms: Any) -> list[Any]:
        """Of the stored residuals in the forecast for the call of these terms, newest first; after :meth:`decide`."""

    def leave_graph(self) -> None:
        """Copy the tensors that it holds, which a graph has returned."""


class NumberDecider:
    """In eager code. The host waits for the device at most once per call, and not where the residual is not asked for."""

    def __init__(self, inputs: DecisionInput) -> None:
        terms: Any = inputs.terms
        later = [0.0] * (inputs.options.num_residuals - 1)
        self.first = inputs.sample.contiguous()
        self._counts = Counts(1, 0, 0, (terms.time, *later))

    def decide(self, inputs: DecisionInput) -> tuple[bool, Observed]:
        terms: Any = inputs.terms
        counts = self._counts
        verdict = Verdict(int(_unasked(terms, counts, _where)))
        differences: list[float] | None = None
        if verdict is Verdict.HIT:
            differences = inputs.differences(self.first).tolist()
            verdict = Verdict.NOT_FINITE
            if all(math.isfinite(x) for x in differences):
                verdict = Verdict.HIT if bool(inputs.may_skip(max(differences), terms, counts)) else Verdict.MISS
        skip = verdict.skips
        self._counts = counts.after(skip, terms.time, _where)
        if not skip:
            self.first = inputs.sample.contiguous()
        return skip, Observed(differences, verdict, counts.computed, inputs.samples)

    def leave_graph(self) -> None:
        """Do nothing: it was made in eager code."""

    def weights(self, options: CacheOptions, terms: Any) -> list[float]:
        if options.num_residuals == 1:
            return [1.0]
        numbers = self._counts.times, terms.time, self._counts.computed
        times, now, computed = (torch.tensor(x, dtype=torch.float64) for x in numbers)
        found: list[float] = options.forecasts.weights(times, now, computed).tolist()
        return found


class TensorDecider:
    """In a graph, where what it holds is changed in place."""

    def __init__(self, inputs: DecisionInput) -> None:
        self.first = inputs.sample.contiguous()
        # Calls, hits, hits in a row; times.
        begun = self.first.new_tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        later = torch.zeros(inputs.options.num_residuals - 1, dtype=torch.float64, device=self.first.device)
        given: Any = inputs.terms
        self._numbers = torch.cat([begun, given[1:2], later])

    @property
    def _counts(self) -> Counts:
        calls, hits, hits_in_a_row, *times = self._numbers.unbind()
        return Counts(calls, hits, hits_in_a_row, tuple(times))

    def decide(self, inputs: DecisionInput) -> tuple[Tensor, Observed]:
        given: Any = inputs.terms
        terms, counts, first = DecisionParams(*given.unbind()), self._counts, self.first
        differences = inputs.differences(first).double()
        may_skip = torch.as_tensor(inputs.may_skip(differences.max(), terms, counts), device=first.device)
        verdict = torch.where(may_skip, _HIT, _MISS)
        verdict = torch.where(differences.isfinite().all(), verdict, _NOT_FINITE)
        unasked: Any = _unasked(terms, counts, torch.where)
        verdict = torch.where(unasked > 0, unasked.to(verdict.dtype), verdict)
        skip = (verdict == _HIT) | (verdict == _MASKED)
        counted: Any = counts.after(skip, terms.time, torch.where)
        self._numbers.copy_(torch.stack([*counted[:3], *counted.times]))
        first.copy_(torch.where(skip, first, inputs.sample))
        return skip, Observed(differences, verdict, counts.computed, inputs.samples)

    def leave_graph(self) -> None:
        self.first, self._numbers = self.first.clone(), self._numbers.clone()

    def weights(self, options: CacheOptions, terms: Any) -> list[Any]:
        if options.num_residuals == 1:
            return [1.0]
        computed: Any = self._counts.computed
        return list(options.forecasts.weights(self._numbers[3:], terms[1], computed).unbind())


def blocks_before_deciding(model: str, blocks: CachedBlocks, options: CacheOptions) -> int:
    """So many first blocks of ``model`` always run, before a step is decided.

    Raises:
        ValueError: the rule decides before any block, and that does not go with what is known, or was asked for.
    """
    if not options.decides_before_blocks:
        return options.first_blocks
    name = rule_of(options.rule).name
    if blocks.modulated is None:
        raise ValueError(
            f"rule {name} compares the modulated input of the first block, and that of {model} is not known. Describe it in "
            "CachedBlocks(modulated=...), or take rule='first_block'."
        )
    if options.first_blocks != 1:
        raise ValueError(
            f"rule {name} runs no block before it decides, so first_blocks={options.first_blocks} has no effect."
        )
    return 0


def policy_cannot_be_compiled(options: CacheOptions) -> RuntimeError:
    """What to raise where :func:`~para_core.foreign_errors.is_data_dependent`."""
    return RuntimeError(
        f"policy={options.as_text()['policy']} cannot be compiled. In a graph the numbers of an Observation are 0-dim tensors: "
        "write & and | in place of `and` and `or`, and torch.where in place of `if`."
    )
