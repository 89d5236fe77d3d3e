"""The decision whether to skip a step: its inputs and its outcome, and :class:`NumberDecider`, which makes it
in eager code. :mod:`para_core.cache.graph_decision` makes it in a graph.

:mod:`.block_run` asks for it, and :mod:`.block_cache` sets the step before. Tests:
tests/cache/test_options.py, tests/cache/test_ranks.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from para_core.cache.blocks import CachedBlocks
from para_core.cache.options import CacheOptions
from para_core.cache.rules import Observation, rule_of
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim


class Verdict(IntEnum):
    """The reason why a step was skipped or computed.

    ``graph_decision.py`` computes with their numbers: a member for which eager code decides must be decided
    there, too. HIT must be 0, because 0 in a step's ``forced`` means there that nothing is forced.
    """

    HIT = 0
    MISS = 1
    # The step was computed, because it is the first step of a branch, also after the shape, dtype or device
    # of the compared values has changed (block_run.py), or because it is one of the branch's warmup_steps.
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
        """Whether the step was skipped."""
        return self in (Verdict.HIT, Verdict.MASKED)


@dataclass(frozen=True)
class Step:
    """The position of a model call in the denoising schedule. Calls without a schedule use the defaults.

    Args:
        index: Index of the step in the schedule.
        total: Number of steps in the schedule.
        time: The timestep, on the scale of the schedule.
        forced: The verdict, if it is determined for this step: by the options, or by ``block_cache.py``,
            which forces REPEATED; None if the step must be compared.
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


class DecisionOutcome(NamedTuple):
    """The outcome of a decision, for the report. Its values are tensors if a graph decided.

    Args:
        differences: The difference of each sample; in eager code None if the verdict did not depend on it.
        verdict: A :class:`Verdict`, or its number as a tensor.
        computed: Number of computed steps of the branch before this call, whose residuals a forecast can use.
        samples: Number of samples (entries of the batch) in the call, over all ranks that share the batch.
    """

    differences: Any
    verdict: Any
    computed: Any
    samples: int


@dataclass(frozen=True)
class DecisionInput:
    """The inputs of the decision whether to skip one call.

    Args:
        sample: ``[B, ...]``, the values of this rank's tokens that are compared, usually the first-block
            residual; with the option ``downsample`` only every n-th channel. Each entry of the batch is
            compared with its own earlier value. If one difference is large, the whole batch is computed,
            because a graph cannot skip a part of it.
        samples: The number of entries of the batch in the call, over all ranks that share the batch.
        step, threshold: The position of the call in the schedule, and the threshold.
        dims: The mesh dims over which one sequence is sharded. Their ranks decide together.
        sharing: The mesh dim along which the batch is split in equal parts, if it is split. These ranks also
            decide together, from all samples, as one device would.
    """

    sample: Tensor
    samples: int
    options: CacheOptions
    step: Step
    threshold: float
    dims: tuple[MeshDim, ...] = ()
    sharing: MeshDim | None = None

    def differences(self, first: Tensor) -> Tensor:
        """Return how much each sample differs from ``first``, its values in the last computed step, by the
        rule.

        The result, ``[samples]``, is equal on all ranks that decide together. Collective.
        """
        rule: Any = self.options.rule
        sums = rule.sums(self.sample.flatten(1), first.flatten(1))
        # Gather the sums and add them on each rank, so that all ranks add in the same order: different
        # rounding could make their decisions differ.
        for dim in self.dims:
            sums = all_gather(sums[None], [1] * dim.size, 0, dim).sum(dim=0)
        differences: Tensor = rule.difference(sums)
        if self.sharing is not None:
            differences = all_gather(differences, [differences.shape[0]] * self.sharing.size, 0, self.sharing)
        return differences


class NumberDecider:
    """The object that decides the steps of one CFG branch in eager code, with Python numbers.
    :class:`~para_core.cache.graph_decision.TensorDecider` must decide the same: change both.

    The first call of the branch creates it. ``first`` holds the compared values of the last computed step. It
    is a copy only if they are not contiguous: otherwise it may be a tensor of the model, which must not
    change it in place. The host waits for the device at most once per call, and only if the difference
    decides.
    """

    # Whether a graph keeps the state of the branch, so that its number of tensors is fixed.
    in_graph: ClassVar[bool] = False

    def __init__(self, inputs: DecisionInput) -> None:
        self.first = inputs.sample.contiguous()
        self._calls = 1
        self._hits = 0
        self._hits_in_a_row = 0
        self._most_hits = limit_of(inputs.options.max_hits)
        self._most_in_a_row = limit_of(inputs.options.max_consecutive_hits)
        # The timesteps of the computed steps whose residuals are stored, newest first. Zeros stand for steps
        # that do not exist yet.
        self._times = [inputs.step.time] + [0.0] * (inputs.options.chosen_forecast.num_residuals - 1)

    def decide(self, inputs: DecisionInput) -> tuple[bool, DecisionOutcome]:
        """Return whether to skip the step, and the outcome for the report. Update the counters and ``first``.

        Collective, unless the schedule or the counters, which are equal on all ranks, determine the verdict.
        """
        options = inputs.options
        computed = self._calls - self._hits
        verdict = Verdict.HIT
        if inputs.step.forced is not None:
            verdict = inputs.step.forced
        elif self._calls < options.warmup_steps:
            verdict = Verdict.WARMUP
        elif self._hits >= self._most_hits or self._hits_in_a_row >= self._most_in_a_row:
            verdict = Verdict.LIMIT
        differences: list[float] | None = None
        if verdict is Verdict.HIT:
            differences = inputs.differences(self.first).tolist()
            largest = max(differences)
            if not all(map(math.isfinite, differences)):
                verdict = Verdict.NOT_FINITE
            elif options.policy is not None:
                observation = Observation(
                    difference=largest,
                    threshold=inputs.threshold,
                    step=inputs.step.index,
                    num_steps=inputs.step.total,
                    hits_in_a_row=self._hits_in_a_row,
                )
                if not options.ask_policy(observation):
                    verdict = Verdict.MISS
            elif not largest < inputs.threshold:
                verdict = Verdict.MISS
        self._calls += 1
        skip = verdict.skips
        if skip:
            self._hits += 1
            self._hits_in_a_row += 1
        else:
            self._hits_in_a_row = 0
            self._times = [inputs.step.time, *self._times[:-1]]
            self.first = inputs.sample.contiguous()
        return skip, DecisionOutcome(differences, verdict, computed, inputs.samples)

    def weights(self, options: CacheOptions, step: Step) -> list[float]:
        """Return the weights of the stored residuals in the forecast of ``step``, newest first.
        Call :meth:`decide` before.
        """
        forecast = options.chosen_forecast
        if forecast.num_residuals == 1:
            return [1.0]
        times = torch.tensor(self._times, dtype=torch.float64)
        now = torch.tensor(step.time, dtype=torch.float64)
        computed = torch.tensor(self._calls - self._hits, dtype=torch.float64)
        weights: list[float] = forecast.weights(times, now, computed).tolist()
        return weights


def limit_of(option: int | None) -> float:
    """Return the limit that an option sets, or infinity if it is None."""
    if option is None:
        return math.inf
    return option


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
