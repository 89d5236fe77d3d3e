"""Run a model on one rank, or on virtual ranks under a mode, a plan or a user's ``forward`` function.

The ranks themselves are in :mod:`.virtual_ranks`. :mod:`para_core.verify.check` and :mod:`.difference` run
models by this; outputs are compared there. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from para_core.comparison.call_record import CallRecord, record_call
from para_core.comparison.model_inputs import ModelInputs
from para_core.comparison.virtual_ranks import (
    RankOutcome,
    device_of,
    outcomes_on_virtual_ranks,
    with_same_weights,
)
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.modes.sharding_mode import TraceSafeLayout
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.apply import apply_plan
from para_core.plans.current_call import segments_under_way
from para_core.plans.plan import Plan

# The mesh dim over which ranks share attention.
AttentionDim = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class ParallelRun:
    """The settings of a run on several ranks.

    Without ``plan``, inputs are sharded under a ``UnifiedAttnMode``, where ``forward``, if given, replaces
    the model.

    Args:
        plan: The plan that shards the inputs.
        forward: A user's function, which shards inputs itself; None with a plan.
        dims: The token dim of each sharded tensor of the inputs, by its index in ``inputs.leaves()``. Inputs
            are sharded by it only if there is neither ``plan`` nor ``forward``. With a plan,
            :mod:`para_core.verify.check` reads from it which lengths to try.

    Raises:
        ValueError: ``plan`` and ``forward`` are both given.
    """

    plan: Plan | None
    forward: Callable[..., Any] | None
    dims: Mapping[int, int]

    def __post_init__(self) -> None:
        if self.plan is not None and self.forward is not None:
            raise ValueError(f"plan and forward={self.forward!r} are both given; expected at most one.")


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor that ``cp.shard`` has sharded.

    Args:
        index: Its index in ``inputs.leaves()``; None if it is not an input.
        dim: The dim of its tokens.
        tokens: Number of tokens.
    """

    index: int | None
    dim: int
    tokens: int


@dataclass
class RankRun:
    """The outcome of one rank's run, the segments and sharded tensors that were seen, and the record of the
    call.
    """

    outcome: RankOutcome = field(default_factory=RankOutcome)
    segments: list[Segment] = field(default_factory=list)
    sharded: list[ShardedTensor] = field(default_factory=list)
    record: CallRecord = field(default_factory=CallRecord)

    def note_segments(self, segments: tuple[Segment, ...]) -> None:
        """Add the segments that are not known yet."""
        self.segments += [segment for segment in segments if segment not in self.segments]

    def note_segments_of(self, module: nn.Module) -> None:
        """Add the segments of the current call of ``module`` under its plan."""
        under_way = segments_under_way(module)
        if under_way is not None:
            _, segments = under_way
            self.note_segments(segments)


def run_on_one_rank(module: nn.Module, inputs: ModelInputs, record: CallRecord | None = None) -> RankOutcome:
    """Call copies of ``module``, in eval mode, and ``inputs`` on one rank, and return the output or the
    exception.

    ``record`` gets the entries of the call.
    """
    model = with_same_weights(module).eval()

    def run(_: SequenceMesh) -> Any:
        arguments = inputs.copy()
        with ExitStack() as stack:
            if record is not None:
                stack.enter_context(record_call(model, record))
            return model(*arguments.args, **arguments.kwargs)

    # Run in a thread of its own, as virtual ranks do, without the modes of the caller.
    return outcomes_on_virtual_ranks(run, device=device_of(module, inputs.leaves()))[0]


def run_parallel(
    module: nn.Module,
    inputs: ModelInputs,
    run: ParallelRun,
    method: AttentionDim,
    ranks: int,
    *,
    record: bool = False,
) -> list[RankRun]:
    """Call copies of ``module``, in eval mode because dropout would differ, and ``inputs`` on ``ranks`` virtual
    ranks along ``method``, and return their results.

    Exceptions are not raised but part of the results. ``record`` says whether to record modules and attention
    calls.
    """
    models = [with_same_weights(module).eval() for _ in range(ranks)]
    results = [RankRun() for _ in range(ranks)]

    def run_rank(mesh: SequenceMesh) -> Any:
        return _run_rank(models[mesh.rank], inputs.copy(), run, mesh, results[mesh.rank], record=record)

    device = device_of(module, inputs.leaves())
    outcomes = outcomes_on_virtual_ranks(run_rank, device=device, **{method: ranks})
    for result, outcome in zip(results, outcomes, strict=True):
        result.outcome = outcome
    return results


def _run_rank(
    model: nn.Module,
    inputs: ModelInputs,
    run: ParallelRun,
    mesh: SequenceMesh,
    result: RankRun,
    *,
    record: bool,
) -> Any:
    """Return the output of ``model``, this rank's own copy, on the rank of ``mesh``, and note in ``result``
    what it sharded.
    """
    with ExitStack() as stack:
        recorder = None
        if record:
            recording = record_call(model, result.record, before_entry=lambda: result.note_segments_of(model))
            recorder = stack.enter_context(recording)
        if run.plan is not None:
            # The end of the call empties the segments, and a hook of the model runs before it.
            model.register_forward_hook(lambda *_: result.note_segments_of(model), always_call=True)
            apply_plan(model, run.plan, mesh)
            return model(*inputs.args, **inputs.kwargs)
        cp = stack.enter_context(_NotingMode(mesh, result, inputs))
        if recorder is not None:
            # Functions outside of modules, as in forward=, may call attention, and only the innermost mode
            # sees it.
            stack.enter_context(recorder)
        if run.forward is not None:
            return run.forward(cp, model, *inputs.args, **inputs.kwargs)

        def shard(index: int, leaf: Any) -> Any:
            return cp.shard(leaf, run.dims[index]) if index in run.dims else leaf

        sharded = inputs.change_leaves(shard)
        return model(*sharded.args, **sharded.kwargs)


class _NotingMode(UnifiedAttnMode):
    """A :class:`UnifiedAttnMode` that notes in ``result`` the tensors that it has sharded and the segments
    that it knows.

    It overrides two private methods: the mode calls ``_remember`` for each segment of a tensor that it
    shards, and ``_trace_safe`` with each layout that it uses. If they were renamed, no segment would be
    noted: ``test_difference_is_located`` of tests/verify/test_check_parallel.py then fails for an exception.
    """

    def __init__(self, mesh: SequenceMesh, result: RankRun, inputs: ModelInputs) -> None:
        self._result, self._inputs = result, inputs
        super().__init__(mesh)

    def shard(self, x: Any, dim: int | None = None, **options: Any) -> Any:
        if dim is None:
            # Do not note x, which is a BlockMask, because its tokens are also sharded as tensors.
            return super().shard(x, **options)
        part = super().shard(x, dim, **options)
        index = next((i for i, leaf in enumerate(self._inputs.leaves()) if leaf is x), None)
        self._result.sharded.append(ShardedTensor(index, dim % x.ndim, x.shape[dim]))
        return part

    def _remember(self, segment: Segment) -> None:
        self._result.note_segments((segment,))
        super()._remember(segment)

    def _trace_safe(self, layout: SequenceLayout) -> TraceSafeLayout:
        self._result.note_segments(layout.segments)
        return super()._trace_safe(layout)


# Give the class the name of its base class, because the name appears in error messages of the mode.
_NotingMode.__name__ = UnifiedAttnMode.__name__
