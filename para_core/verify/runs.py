"""Run a model on one rank, or on virtual ranks under a mode, a plan or a user's ``forward`` function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from para_core.distributed.layout import Segment, SequenceLayout
from para_core.distributed.mesh import SequenceMesh
from para_core.modes.sharding_mode import TraceSafeLayout
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.current_call import segments_under_way
from para_core.plans.plan import Plan
from para_core.plans.region import apply_plan
from para_core.verify.first_difference import Recording
from para_core.verify.model_inputs import ModelInputs
from para_core.verify.virtual_ranks import RankOutcome, device_of, outcomes_on_virtual_ranks, with_same_weights

# The mesh dim over which ranks share attention.
Method = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class ParallelRun:
    """The settings of a run on several ranks.

    Without ``plan``, inputs are sharded under a ``UnifiedAttnMode``, where ``forward``, if given, replaces the model.
    ``dims`` is the token dim of each sharded tensor of the inputs, keyed by its index in ``inputs.leaves()``.
    """

    plan: Plan | None
    forward: Callable[..., Any] | None
    dims: Mapping[int, int]


@dataclass
class RankRun:
    """The outcome of one rank's run, and the segments, tensors and events that were recorded.

    ``sharded`` has an entry for each tensor that ``cp.shard`` sharded: (index in ``inputs.leaves()``, or None if it is
    not an input; token dim; number of tokens).
    """

    outcome: RankOutcome = field(default_factory=RankOutcome)
    segments: list[Segment] = field(default_factory=list)
    sharded: list[tuple[int | None, int, int]] = field(default_factory=list)
    recording: Recording = field(default_factory=Recording)

    def note_segments(self, segments: tuple[Segment, ...]) -> None:
        self.segments += [segment for segment in segments if segment not in self.segments]


def run_alone(module: nn.Module, inputs: ModelInputs, recording: Recording | None = None) -> RankOutcome:
    """Call copies of ``module`` and ``inputs`` on one rank, and return the output or the exception.

    ``recording`` gets the events of the call.
    """
    copied = with_same_weights(module).eval()

    def run(_: SequenceMesh) -> Any:
        own_inputs = inputs.copied()
        with nullcontext() if recording is None else recording.around(copied):
            return copied(*own_inputs.args, **own_inputs.kwargs)

    # Run in a thread of its own, as virtual ranks do. The recording hooks enter modes, which must not stay on in the
    # caller's thread if the model raises.
    return outcomes_on_virtual_ranks(run, device=device_of(module, inputs.leaves()))[0]


def run_parallel(
    module: nn.Module, inputs: ModelInputs, run: ParallelRun, method: Method, ranks: int, *, record: bool = False
) -> list[RankRun]:
    """Call copies of ``module`` and ``inputs`` on ``ranks`` virtual ranks along ``method``, and return their results.

    Exceptions are not raised but part of the results. ``record`` says whether to record modules and attention calls.
    """
    copies = [with_same_weights(module).eval() for _ in range(ranks)]
    results = [RankRun() for _ in copies]

    def run_plan(copied: nn.Module, plan: Plan, mesh: SequenceMesh, own_inputs: ModelInputs, result: RankRun) -> Any:
        def note() -> None:
            under_way = segments_under_way(copied)
            if under_way is not None:
                result.note_segments(under_way[1])

        result.recording.at_each_event = note
        apply_plan(copied, plan, mesh)
        return copied(*own_inputs.args, **own_inputs.kwargs)

    def run_mode(copied: nn.Module, mesh: SequenceMesh, own_inputs: ModelInputs, result: RankRun) -> Any:
        with _NotingMode(mesh, result, own_inputs) as cp, result.recording.notes_attention():
            if run.forward is not None:
                return run.forward(cp, copied, *own_inputs.args, **own_inputs.kwargs)
            sharded = own_inputs.with_leaves(lambda i, leaf: cp.shard(leaf, run.dims[i]) if i in run.dims else leaf)
            return copied(*sharded.args, **sharded.kwargs)

    def run_rank(mesh: SequenceMesh) -> Any:
        copied, result, own_inputs = copies[mesh.rank], results[mesh.rank], inputs.copied()
        with result.recording.around(copied) if record else nullcontext():
            if run.plan is not None:
                return run_plan(copied, run.plan, mesh, own_inputs, result)
            return run_mode(copied, mesh, own_inputs, result)

    device = device_of(module, inputs.leaves())
    outcomes = outcomes_on_virtual_ranks(run_rank, device=device, **{method: ranks})
    for result, outcome in zip(results, outcomes, strict=True):
        result.outcome = outcome
    return results


class _NotingMode(UnifiedAttnMode):
    """A :class:`UnifiedAttnMode` that notes in ``result`` the tensors that it has sharded and the segments that it
    knows.
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
        self._result.sharded.append((index, dim % x.ndim, x.shape[dim]))
        return part

    def _remember(self, segment: Segment) -> None:
        self._result.note_segments((segment,))
        super()._remember(segment)

    def _trace_safe(self, layout: SequenceLayout) -> TraceSafeLayout:
        self._result.note_segments(layout.segments)
        return super()._trace_safe(layout)


# Give the class the name of its base class, because the name appears in error messages of the mode.
_NotingMode.__name__ = UnifiedAttnMode.__name__
