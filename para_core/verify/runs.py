"""Run a model on one rank, or on virtual ranks under a mode, a plan or a user's ``forward`` function."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from para_core.dataclass_fields import by_path, leaves_of, map_leaves
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.modes.sharding_mode import TraceSafeLayout
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.current_call import segments_under_way
from para_core.plans.plan import Plan, Split
from para_core.plans.region import apply_plan
from para_core.torch_internals import crop_block_mask
from para_core.verify.first_difference import AttentionRecorder, Recording
from para_core.verify.virtual_ranks import RankOutcome, device_of, outcomes_on_virtual_ranks, with_same_weights

# The mesh dim over which ranks share attention.
Method = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model call: ``args`` by position and ``kwargs`` by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> list[Any]:
        return leaves_of((self.args, dict(self.kwargs)))

    def with_leaves(self, change: Callable[[int, Any], Any]) -> ModelInputs:
        """Return new inputs in which each leaf (a tensor or other value in nested containers) is replaced by
        ``change(index, leaf)``.
        """
        indices = count()
        return ModelInputs(*map_leaves(lambda leaf: change(next(indices), leaf), (self.args, dict(self.kwargs))))

    def copied(self) -> ModelInputs:
        """Return new inputs with a copy of every leaf, because a model may change its inputs in place."""

        def copied(_: int, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.detach().clone()
            try:
                return copy.deepcopy(leaf)
            except Exception:
                # deepcopy may raise any exception. Pass on an object that cannot be copied, as an ordinary call does.
                return leaf

        return self.with_leaves(copied)

    def shortened(self, dims: Mapping[int, int], total: int, length: int, *, only_tokens: bool) -> ModelInputs:
        """Return new inputs with only the first ``length`` of their ``total`` tokens.

        Args:
            dims: The token dim of each sharded tensor, by its index in :meth:`leaves`. Other tensors are shortened
                along all dims of size ``total``, such as the rows and columns of a mask.
            only_tokens: Whether to shorten sharded tensors along their token dim only, which is right if another dim of
                size ``total`` holds channels. If False, they are shortened along every dim of size ``total``, which is
                right for a mask with sharded rows.
        """

        def shorten(index: int, leaf: Any) -> Any:
            if isinstance(leaf, BlockMask):
                lengths = [length if size == total else size for size in leaf.seq_lengths]
                return leaf if lengths == [*leaf.seq_lengths] else crop_block_mask(leaf, *lengths)
            if not isinstance(leaf, Tensor):
                return leaf
            one_dim = index in dims and only_tokens
            for dim in [dims[index]] if one_dim else range(leaf.ndim):
                leaf = leaf.narrow(dim, 0, length) if leaf.shape[dim] == total else leaf
            return leaf

        return self.with_leaves(shorten)


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

    def note_segments_of(self, module: nn.Module) -> None:
        """Note the segments of the current call of ``module`` under its plan."""
        under_way = segments_under_way(module)
        if under_way is not None:
            self.note_segments(under_way[1])


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

    def run_rank(mesh: SequenceMesh) -> Any:
        copied, result, own_inputs = copies[mesh.rank], results[mesh.rank], inputs.copied()
        recording = result.recording
        with recording.around(copied) if record else nullcontext():
            if run.plan is not None:
                recording.at_each_event = lambda: result.note_segments_of(copied)
                apply_plan(copied, run.plan, mesh)
                return copied(*own_inputs.args, **own_inputs.kwargs)
            with _NotingMode(mesh, result, own_inputs) as cp, AttentionRecorder(recording):
                if run.forward is not None:
                    return run.forward(cp, copied, *own_inputs.args, **own_inputs.kwargs)
                sharded = own_inputs.with_leaves(lambda i, leaf: cp.shard(leaf, run.dims[i]) if i in run.dims else leaf)
                return copied(*sharded.args, **sharded.kwargs)

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


def dims_of_tokens(module: nn.Module, inputs: ModelInputs, dim: int | Mapping[str, int] | None) -> dict[int, int]:
    """Return the token dim of each tensor that is to be sharded, keyed by its index in ``inputs.leaves()``.

    ``dim`` is the dim of the tokens, or a dim for each parameter name. None means dim 1.

    Raises:
        TypeError: ``dim`` has the wrong type.
        ValueError: ``dim`` names an unknown argument or is out of range, or no input is a tensor with this dim.
    """
    leaves = inputs.leaves()
    if isinstance(dim, Mapping):
        named = _named_leaves(module, inputs)
        unknown = [name for name in dim if name not in named]
        if unknown:
            raise ValueError(f"dim names {unknown}, which are not among the given arguments {sorted(named)}.")
        dims = {index: dim[name] for name in dim for index in named[name] if isinstance(leaves[index], Tensor)}
        bad = [list(leaves[i].shape) for i, d in dims.items() if not -leaves[i].ndim <= d < leaves[i].ndim]
        if bad or not dims:
            raise ValueError(
                f"dim is {dict(dim)}; expected the dim of the tokens of tensors, got shapes {bad or 'none'}."
            )
        return {i: d % leaves[i].ndim for i, d in dims.items()}
    dim = 1 if dim is None else dim
    if not isinstance(dim, int):
        raise TypeError(f"dim is a {type(dim).__name__}; expected an int, or a dict of parameter names to ints.")
    tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and -x.ndim <= dim < x.ndim}
    if not tensors:
        raise ValueError(f"none of the inputs is a tensor with a dim {dim}; say with dim= where the tokens are.")
    total = next(iter(tensors.values())).shape[dim]
    return {i: dim % x.ndim for i, x in tensors.items() if x.shape[dim] == total}


def dims_of_plan(module: nn.Module, inputs: ModelInputs, plan: Plan) -> dict[int, int]:
    """Return the token dim of each tensor that ``plan`` splits, keyed by its index in ``inputs.leaves()``.

    Tensors with the tokens of a segment come before tensors that only accompany tokens, such as positions, because the
    first entry gives the length of the sequence. Empty if the plan splits no argument of the model.
    """
    leaves, named = inputs.leaves(), _named_leaves(module, inputs)
    splits = {name: cut for name, cut in plan.inputs.items() if isinstance(cut, Split) and name in named}
    order = sorted(splits, key=lambda name: splits[name].segment is None)
    return {
        index: splits[name].dim % leaves[index].ndim
        for name in order
        for index in named[name]
        if isinstance(leaves[index], Tensor) and -leaves[index].ndim <= splits[name].dim < leaves[index].ndim
    }


def _named_leaves(module: nn.Module, inputs: ModelInputs) -> dict[str, list[int]]:
    """Return, for each parameter name, the indices in ``inputs.leaves()`` of the values in its argument.

    The fields of a dataclass have entries of their own, by path, such as ``"video.x"``.
    """
    signature = inspect.signature(module.forward)
    bound, kinds = signature.bind_partial(*inputs.args, **inputs.kwargs).arguments, signature.parameters
    by_identity: dict[int, list[int]] = {}
    for index, leaf in enumerate(inputs.leaves()):
        by_identity.setdefault(id(leaf), []).append(index)
    named: dict[str, list[int]] = {}
    for name, value in bound.items():
        values = value if kinds[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        for argument, of_name in {**values, **by_path(values)}.items():
            leaves = ModelInputs((of_name,), {}).leaves()
            named[argument] = [index for leaf in leaves for index in by_identity[id(leaf)]]
    return named
