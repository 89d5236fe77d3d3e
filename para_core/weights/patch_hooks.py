"""Run a model on one PipeFusion patch: apply the rules of its plan to patch m of M as on rank m of M ranks.

The attention of a patch in a compiled block is an opaque operator, so that the graph does not hold stored
keys. It calls the function that :func:`patch_attention_handler` has set. Therefore one graph serves all
patches of equal length, and all blocks with equal attention calls.

:mod:`.pipefusion` installs the hooks and calls :meth:`PatchHooks.begin` around each patch; how a patch
attends is in :mod:`.stale_keys`. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.collectives import define_collective, done
from para_core.distributed.mesh import MeshDim, SequenceMesh, dim_of_one
from para_core.instance.record import Wrapper, empty_slots, fill_slot
from para_core.instance.slots import Slot
from para_core.layout.sequence import Run, Segment, SequenceLayout
from para_core.modes.interceptor import intercept
from para_core.modes.registry import SdpaOwner
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.module_matching import ModuleRules, match_modules, parameters_of
from para_core.plans.plan import Attention, Plan, ShardRule, Split
from para_core.torch_internals import no_frame_of_its_own
from para_core.weights.patch_plan import PatchPlan


class PatchRuleExecutor(RuleExecutor):
    """An executor of plan rules that shards tensors as on rank ``index`` of ``num_patches`` ranks, but sends
    nothing.

    ``num_frames`` is the number of frames of a video, whose patches consist of whole frames; None for an
    image.
    """

    def __init__(self, plan: PatchPlan, index: int, num_patches: int, num_frames: int | None) -> None:
        super().__init__(
            SequenceMesh(dim_of_one("ring"), MeshDim("ulysses", num_patches, index, "", None), "cpu")
        )
        self._num_frames = num_frames
        sharded = {rule.segment for rule in plan.plan.shard_rules if isinstance(rule, Split)}
        self._in_first_patch = sharded - {None, plan.segment}

    def new_segment(self, name: str, total: int) -> Segment:
        """Return the segment ``name`` of ``total`` tokens, divided among the patches at boundaries of frames
        or tokens.

        A sharded segment other than the one that is split into patches stays whole, in the first patch. Raise
        ``ValueError`` if ``total`` is not a multiple of the number of frames.
        """
        if name in self._in_first_patch:
            return Segment(name, total, together=max(total, 1))
        num_frames = self._num_frames or max(total, 1)
        if total % num_frames:
            raise ValueError(f"{name} has {total} entries; expected a multiple of the {num_frames} frames.")
        return Segment(name, total, together=max(total // num_frames, 1))

    def fewest_on_a_rank(self, name: str) -> int:
        """Return the least number of tokens per patch with which a segment is split: always 1.

        A single token is no special case here, because the tokens of a patch attend to those of all patches.
        """
        return 1

    def put_together(self, part: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        """Return a tensor for all tokens of ``layout``: ``part`` at the tokens of this patch, and zeros
        elsewhere.
        """
        shape = list(part.shape)
        shape[dim] = layout.total
        whole = part.new_zeros(shape)
        write_runs(whole, part, dim, layout.runs(self.mesh.rank))
        return whole

    def with_equal_bits(self, value: Tensor, dim: int, segment: Segment) -> Tensor:
        """Return ``value`` itself, because no other rank computes it."""
        return value

    def splits(self, names: tuple[str, ...]) -> bool:
        """Whether one of the segments ``names`` is split into patches."""
        return any(name in self.segments and not self.segments[name].replicated for name in names)


def write_runs(whole: Tensor, part: Tensor, dim: int, runs: Sequence[Run]) -> None:
    """Copy the entries of ``part`` along ``dim`` to the positions ``runs`` of ``whole``, each (first index,
    length).
    """
    lengths = [length for _, length in runs]
    for (begin, length), chunk in zip(runs, part.split(lengths, dim), strict=True):
        whole.narrow(dim, begin, length).copy_(chunk)


class PatchHooks:
    """The wrappers of the submodules of ``module`` that apply ``plan`` to one patch.

    Attributes:
        executor: Applies the rules to the patch of the current model call. None outside of a call.
        attentions: The attention entries of the plan. The first entry is for modules that the plan does not
            name.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.executor: PatchRuleExecutor | None = None
        self._matches = match_modules(module, plan)
        attending = [
            rules.attention for _, rules in self._matches.values() if isinstance(rules.attention, tuple)
        ]
        self.attentions = tuple(dict.fromkeys([Attention(plan.joint_order), *chain.from_iterable(attending)]))
        # In eager code, one entry per running module, the innermost last: (indices of its attention entries,
        # number of its calls so far). In graphs nested modes count the calls.
        self._attending: list[tuple[tuple[int, ...], list[int]]] = []
        self._in_graphs = False

    def begin(self, executor: PatchRuleExecutor | None, *, in_graphs: bool = False) -> None:
        """Start a model call on the patch of ``executor``; for None end it.

        If ``in_graphs``, attention calls are intercepted by :class:`PatchAttnMode` instead of the dispatcher.
        """
        self.executor, self._attending, self._in_graphs = executor, [((0,), [0])], in_graphs

    def next_attention(self) -> Attention:
        """Return the plan entry of the intercepted attention call, and count the call.

        For eager code only.
        """
        indices, calls = self._attending[-1]
        calls[0] += 1
        return self.attentions[indices[min(calls[0], len(indices)) - 1]]

    @contextmanager
    def _attending_to(self, indices: tuple[int, ...]) -> Iterator[None]:
        """Use the plan entries ``indices`` for the first, second, … attention call inside the ``with`` block."""
        if self._in_graphs:
            with PatchAttnMode(indices):
                yield
            return
        self._attending.append((indices, [0]))
        try:
            yield
        finally:
            self._attending.pop()

    def install(self) -> None:
        """Wrap the submodules that the plan names."""
        hook_of = cache(self._make_hook)
        outputs_hook_of = cache(lambda rules: partial(self._split_outputs, rules.of_outputs, rules.name))
        for submodule, rules in self._matches.values():
            hook = hook_of(rules, parameters_of(submodule))
            fill_slot(submodule, Slot.PATCH_INPUTS, {"__call__": hook})
            if rules.of_outputs:
                fill_slot(submodule, Slot.PATCH_OUTPUTS, {"__call__": outputs_hook_of(rules)})

    def remove(self) -> None:
        """Undo :meth:`install`."""
        submodules = [submodule for submodule, _ in self._matches.values()]
        empty_slots(submodules, Slot.PATCH_INPUTS, Slot.PATCH_OUTPUTS)

    def _make_hook(self, rules: ModuleRules, parameters: tuple[str, ...]) -> Wrapper:
        """Return the wrapper of modules with these ``rules`` and ``parameters``.
        Modules with equal ones share it.
        """
        attention: tuple[Attention, ...] = ()
        if isinstance(rules.attention, tuple):
            attention = rules.attention
        indices, of_inputs = tuple(map(self.attentions.index, attention)), rules.of_inputs

        def use_entries(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # A compiler may trace this function, and one graph serves all patches, so nothing may depend on
            # the patch.
            if self.executor is None or not indices:
                return call(module, *args, **kwargs)
            with self._attending_to(indices):
                return call(module, *args, **kwargs)

        def split_and_gather(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            executor = self.executor
            if executor is None:
                return call(module, *args, **kwargs)
            args, kwargs = executor.apply_to_arguments(of_inputs, parameters, args, kwargs, rules.name)
            output = use_entries(call, module, *args, **kwargs)
            if rules.gathers:
                return executor.gather_outputs(output, rules.gathers)
            return output

        if of_inputs or rules.gathers:
            return split_and_gather
        return use_entries

    def _split_outputs(
        self,
        rules: Mapping[int | str, ShardRule],
        name: str,
        call: Wrapper,
        module: nn.Module,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a call of a module, and split its output into this patch's part."""
        output = call(module, *args, **kwargs)
        if self.executor is None:
            return output
        return self.executor.apply_to_outputs(output, rules, name)


# A function that computes an attention call of a patch. Its int argument is the index in
# PatchHooks.attentions of the plan entry that describes the call.
PatchHandler = Callable[[int, SdpaCall], Tensor]


class _HandlerStack(threading.local):
    """The handlers that compute ``para_core::patch_attention`` in this thread, the innermost last."""

    def __init__(self) -> None:
        self.handlers: list[PatchHandler] = []


_THREAD = _HandlerStack()


@contextmanager
def patch_attention_handler(handler: PatchHandler) -> Iterator[None]:
    """Make ``handler`` compute ``para_core::patch_attention`` in this thread inside the ``with`` block."""
    _THREAD.handlers.append(handler)
    try:
        yield
    finally:
        _THREAD.handlers.pop()


class PatchAttnMode(SdpaOwner, TorchFunctionMode):
    """Mode that replaces attention calls by ``para_core::patch_attention``, in compiled graphs and in eager
    code.

    For the first, second, … attention call, ``indices`` are those of the plan entries in
    :attr:`PatchHooks.attentions`. The last index also applies to further calls.
    """

    def __init__(self, indices: tuple[int, ...]) -> None:
        super().__init__()
        self._indices, self._calls = indices, 0

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return intercept(self, self, func, args, kwargs or {})

    def attend(self, call: SdpaCall) -> Tensor:
        """Return the output of the operator for this call and the index of its plan entry."""
        index = self._indices[min(self._calls, len(self._indices) - 1)]
        # Do not count calls that have one entry in common: the count would be a side effect of their graph.
        if len(self._indices) > 1:
            self._calls += 1
        out: Tensor = torch.ops.para_core.patch_attention(*call[:8], index)[0]
        return out


def _patch_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator: the arguments are those of :class:`SdpaCall` in its order, and the index."""
    if not _THREAD.handlers:
        raise RuntimeError(
            "a block that was compiled under PipeFusion was called on its own. Call the pipeline; or "
            "unparallelize_pipe(pipe) first."
        )
    out = _THREAD.handlers[-1](args[8], SdpaCall(*args[:8]))
    # The memory order must be [B, S, H, D], because _output_shape promises these strides to the compiler.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, done(out)


def _output_shape(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return out, done(out)


# Define the operator as a collective, which a compiler neither reorders nor removes, because sequence ranks
# exchange keys in it.
define_collective(
    "patch_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, int index, Tensor? after=None) -> (Tensor, Tensor)",
    _patch_attention,
    _output_shape,
)
