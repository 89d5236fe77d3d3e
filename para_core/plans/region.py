"""Apply a plan to one module: its calls shard their inputs, run with attention intercepted, and gather their
outputs.

The region fills a slot of the module and its submodules (:mod:`para_core.instance.record`), which leaves
their code, hooks and ``forward`` unchanged. A call passes here in this order:

- :meth:`Region.call_outer` is around ``__call__``, outside of a compiled graph: it checks arguments and code.
- :meth:`Region.run` is around what ``Module.compile`` compiles: it shards, intercepts and gathers. In a graph
  it is traced, so it must read nothing that changes from call to call, which would be a guard of the graph.
- The functions of :mod:`.submodule_calls` are around the submodules that the plan names.

How a tensor is split is in :mod:`.apply_rules`, and how an attention call is computed in
:mod:`.planned_attention`. Only :mod:`.apply` makes regions. Tests: tests/plans/test_exactness.py,
tests/plans/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, replace
from functools import cache, partial
from itertools import repeat
from typing import Any

import torch
from torch import nn

from para_core.attention.attention_options import AttnOptions
from para_core.attention.local import AttnFunc
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.instance.modules import ModuleTree, submodules_of
from para_core.instance.private_class import is_entry
from para_core.instance.record import Wrapper, empty_slots, fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.layout.sequence import Segment
from para_core.modes import fused_encoder
from para_core.modes.foreign_operators import has_other_builds
from para_core.modes.handwritten import HandwrittenAttention
from para_core.modes.interceptor import dispatcher_is_available, without_interception
from para_core.modes.registry import (
    PLANNED_CALLS,
    bind_recomputation,
    check_exchanges,
    explain,
    needs_mode,
)
from para_core.option_values import Backend
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.attention_check import AttentionCheck
from para_core.plans.exchange import PAST, CachesOfCall
from para_core.plans.foreign_code import PACKAGES_OF_MODELS
from para_core.plans.interception import Interception
from para_core.plans.module_matching import gathers_as_tuple, match_modules, parameters_of
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    Gather,
    LinearAttention,
    Plan,
    ShardRule,
    Split,
)
from para_core.plans.plan_queries import coarse_segments
from para_core.plans.planned_attention import (
    BindRecomputation,
    PlannedAttention,
    PreparedAttention,
)
from para_core.plans.recomputation import bind_to_call
from para_core.plans.samples import gather_samples, select_arguments
from para_core.plans.submodule_calls import SubmoduleCalls
from para_core.plans.whole_arguments import explain_whole_tensor
from para_core.torch_internals import (
    COMPILED_CALL,
    ORIGINAL_CALLABLE,
    function_mode_stack,
)
from para_core.user_warnings import WarningLog

# The flags among arguments, by their ids: a comparison with == would compare the values of tensors.
_FLAGS = {id(flag): flag for flag in (True, False)}


@dataclass(eq=False)
class Region:
    """A plan applied to one module, and the state of its current call.

    The fields are as in :func:`apply_plan`, but ``batch`` becomes None if no samples are split: the dim has
    one rank, or ``plan.batched`` is empty.
    """

    module: InitVar[nn.Module]
    plan: Plan
    mesh: SequenceMesh
    batch: MeshDim | None
    agree_on_inputs: AgreeOnInputs | None
    options: AttnOptions
    attn_func: AttnFunc | None
    cross_backend: Backend | None
    call_context: Callable[[], AbstractContextManager[None]]
    written_for: type | None = None

    def __post_init__(self, module: nn.Module) -> None:
        # -- Settings, which use(), all_samples() and assume_agreed() change between calls.
        self.attn_func = without_interception(self.attn_func)
        if self.batch is not None and (self.batch.size == 1 or not self.plan.batched):
            self.batch = None
        # Kept by (options, cross_backend), so that nothing is compiled again if earlier options are set
        # again.
        self._prepared_for: dict[tuple[AttnOptions, Backend | None], PreparedAttention] = {}
        self.use(self.options, self.cross_backend)
        # Whether the caller has verified that all ranks pass equal arguments (agreed_inputs.assume_agreed
        # sets it). Such a caller also calls check_new_code(), which call_outer() then leaves out.
        self.inputs_agreed = False

        self._read_plan()
        self._read_module(module)

        # -- The submodules, which attach() reads again once one was replaced: loading a LoRA replaces some.
        # The wrapped submodules by name.
        self.submodules: dict[str, nn.Module] = {}
        self._tree: ModuleTree | None = None
        # Those of them whose attention the plan describes.
        self._attention_modules: dict[str, nn.Module] = {}
        # For each module of an AttentionByHeads, the name of its attribute for the number of heads, and the
        # number on all ranks. During a call the attribute holds this rank's number; in a graph with
        # flex_attention also after the call, because Dynamo 2.13 loses the new value of an attribute that is
        # set before flex_attention and after it.
        self.heads: dict[nn.Module, tuple[str, int]] = {}

        # -- What was seen and said in earlier calls.
        self._warnings = WarningLog()
        # The kinds of arguments with which a call has passed, and those of the current call if they are others.
        self._kinds: set[tuple[Any, ...]] = set()
        self._new_kinds: tuple[Any, ...] | None = None

        # -- The state of the current call: `interceptions`, `executor.segments` and `sharing_samples`.
        # All three are empty outside of a call. run() owns them: it and what it calls fill them, and it empties
        # them at the end. A recomputation, which a backward runs, appends an interception and sets other
        # segments, and puts the former ones back (recomputation.py). Others only read them: current_call.py,
        # the cache's block_run.py, stale_keys.py, and SubmoduleCalls and AttentionCheck, which hold the same list
        # `interceptions`. So the two lists are emptied and never replaced. They are lists and dicts, because
        # Dynamo 2.13 loses an attribute that is set before torch.cond (which a cache adds) and again after it.
        #
        # The last interception counts. There are two if a backward inside of the call recomputes.
        self.interceptions: list[Interception] = []
        self.executor = RuleExecutor(self.mesh, coarse_segments(self.plan))
        # The mesh dim over which the samples of the call are split, if any.
        self.sharing_samples: list[MeshDim] = []

        # Binds a function to a call of this region, for the recomputation of activation checkpointing.
        self.bind: BindRecomputation = partial(bind_to_call, self)
        self.check = AttentionCheck(self.mesh.ranks, self.written_for, self.interceptions)
        calls = SubmoduleCalls(
            self.mesh, self.executor, self.check, self.interceptions, self.intercept_if_sharded
        )
        # Submodules of equal rules share a function, and so their graphs.
        self._hook_of = cache(calls.hook)

    def _read_plan(self) -> None:
        """Look up what calls need of the plan and the mesh, which never change."""
        self.is_parallel = self.mesh.ranks > 1
        attention_rules = self.plan.attention.values()
        # Parameters that ranks do not compare, because each rank fills in the cached keys of its own heads.
        self._caches_by_heads = {
            name
            for attention in attention_rules
            if isinstance(attention, AttentionByHeads)
            for name, _ in attention.caches
        }
        has_sums = any(map(isinstance, attention_rules, repeat(LinearAttention)))
        self._mixes_over_ranks = self.is_parallel and (bool(self.plan.halos) or has_sums)
        # The rules for the output of the module itself.
        self._gathers: tuple[Gather | None, ...] = ()
        if self.plan.outputs.get("") is not None:
            self._gathers = gathers_as_tuple(self.plan.outputs[""])
        self._joint_attention = (Attention(self.plan.joint_order),)

    def _read_module(self, module: nn.Module) -> None:
        """Look up what calls need of the module: its signature, whether it has encoder layers or operators
        that only a mode sees, and whether it was compiled before.

        These must not change while the plan is applied. Other submodules may be replaced: see :meth:`attach`.
        """
        self.parameters = parameters_of(module)
        encoders = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
        self.has_encoders = any(map(isinstance, submodules_of(module), repeat(encoders)))
        # Only a mode intercepts attention in fused encoder layers, and in operators that run functions:
        # flex_attention.
        self._must_use_mode = self.has_encoders or needs_mode(module)
        # The compiled call of a module that Module.compile() compiled before. That graph would bypass the
        # slot of _call_impl, so call_outer shards and gathers outside of the graph.
        self._compiled_before: Callable[..., Any] | None = getattr(module, COMPILED_CALL)
        if is_entry(getattr(self._compiled_before, ORIGINAL_CALLABLE, None)):
            self._compiled_before = None

    def use(self, options: AttnOptions, cross_backend: Backend | None = None) -> None:
        """Use these attention options, and this backend for cross-attention, from the next call on.
        ``adapters/parallel/scheduled_attention.py`` calls this between steps, and
        ``adapters/inspect/attention_names.py`` for the backend that the model itself names.

        Without ``cross_backend``, sharded keys use ``options.backend`` and replicated keys plain SDPA. A
        compiled module is compiled once for each pair (``options``, ``cross_backend``), and keeps the graphs.
        """
        self.options = options
        self.cross_backend = cross_backend
        cross = None
        if cross_backend is not None:
            cross = replace(options, backend=cross_backend)
        prepared = PreparedAttention(self.mesh, options, cross, self.attn_func)
        self._prepared = self._prepared_for.setdefault((options, cross_backend), prepared)

    @property
    def interception(self) -> Interception | None:
        """The :class:`Interception` of the current call, or of its part that a backward runs again; None outside."""
        if not self.interceptions:
            return None
        return self.interceptions[-1]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the current call, sharded and replicated."""
        return tuple(self.executor.segments.values())

    def call_outer(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Verify the arguments, and return the result of ``call``. ``Module.compile`` does not compile this.
        Collective.
        """
        call_context: Callable[[], AbstractContextManager[None]] = nullcontext
        # While tracing, read none of these attributes: each would be a guard of the graph.
        if not torch.compiler.is_compiling():
            self._verify_call(module, args, kwargs)
            if not self.inputs_agreed:
                call_context = self.call_context
        with call_context():
            compiled = self._compiled_before
            if compiled is None or getattr(module, COMPILED_CALL) is not compiled:
                output = call(module, *args, **kwargs)
            else:
                output = self.run(
                    lambda _, *args, **kwargs: compiled(*args, **kwargs), module, *args, **kwargs
                )
        # A call that raised is checked again.
        if not torch.compiler.is_compiling() and self._new_kinds is not None:
            self._kinds.add(self._new_kinds)
            self._new_kinds = None
        return output

    def _verify_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare an eager call: wrap new submodules, refuse arguments, compare them between ranks, and have
        the model's code checked if it or the kinds of the arguments are new. Collective.
        """
        if self._tree is None or not self._tree.is_unchanged():
            self.attach(module)
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        # Before a call that may be compiled, because Dynamo buries errors that are raised in a graph.
        if self.plan.refused:
            self._check_arguments(module, arguments)
        kinds = _kinds_of(arguments)
        self._new_kinds = None
        if kinds not in self._kinds:
            self._new_kinds = kinds
            self.check.require()
        if self.agree_on_inputs is not None and not self.inputs_agreed:
            self.agree_on_inputs(
                {name: x for name, x in arguments.items() if name not in self._caches_by_heads}
            )
        if self._new_kinds is not None or not self.inputs_agreed:
            self.check_new_code(module)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``call`` with sharded inputs and intercepted attention, and return its gathered outputs.
        Collective.

        Raises:
            RuntimeError: A call of the module already runs, or the module made no attention call that can be
                intercepted although its tokens are sharded.
            ValueError: An argument is refused by the plan or does not fit it, or a block mask was not
                sharded.
        """
        if self.interceptions:
            raise RuntimeError(
                f"this {type(module).__name__} is already running, in another thread or around this call, on the same "
                "ranks: their collectives would mix. Use one thread, or a copy of the model with its own mesh."
            )
        if torch.compiler.is_compiling() and self.plan.refused:
            self._check_arguments(module, {**dict(zip(self.parameters, args, strict=False)), **kwargs})
        if self._mixes_over_ranks:
            check_exchanges(module)
        planned = PlannedAttention(self._prepared, self._joint_attention, self.bind)
        if not torch.compiler.is_compiling() and self.is_parallel and self._new_kinds is not None:
            planned.compared = set()
        # Test is_compiling() first: every attribute that is read while tracing becomes a guard of the graph.
        by_hand = None
        if not torch.compiler.is_compiling() and self.check.due:
            by_hand = HandwrittenAttention(PACKAGES_OF_MODELS, ignores_graphs=self.attn_func is not None)
        interception = Interception(planned, at_dispatcher=self.may_use_dispatcher(module), by_hand=by_hand)
        self.interceptions.append(interception)
        try:
            return self._run_sharded(interception, call, module, args, kwargs)
        # flex_attention raises a ValueError for a wrong mask size, and a RuntimeError since torch 2.15.
        except (ValueError, RuntimeError, IndexError) as error:
            explain(error)
            name = type(module).__name__
            explain_whole_tensor(error, name, self.parameters, args, kwargs, self.segments, self.mesh)
            raise
        finally:
            self.interceptions.clear()
            self.sharing_samples.clear()
            self.executor.segments.clear()

    def _run_sharded(
        self,
        interception: Interception,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take this rank's samples and tokens, run ``call`` with them, and gather the output. Collective."""
        planned = interception.planned
        samples = None
        if self.batch is not None:
            args, kwargs, samples = select_arguments(
                self.plan, self.parameters, args, kwargs, self.batch, self._warnings
            )
            if samples is not None:
                self.sharing_samples.append(self.batch)
        args, kwargs = self.executor.apply_to_arguments(self.plan.inputs, self.parameters, args, kwargs)
        encoders: AbstractContextManager[None] = nullcontext()
        if self.has_encoders:
            encoders = fused_encoder.disable_if(True)
        with encoders, interception.intercept_calls():
            inputs = [*args, *kwargs.values()]
            caches = None
            # In a graph, too: a cache that a compiled call left with this rank's tokens would go unnoticed.
            if self.is_parallel:
                caches = CachesOfCall(inputs)
            interception.continues = caches is not None and caches.hold_tokens
            self.intercept_if_sharded(self.plan.inputs.values())
            if interception.mode is None:
                output = call(module, *args, **kwargs)
            else:
                with bind_recomputation(partial(self.bind, planned), module):
                    output = call(module, *args, **kwargs)
            if caches is not None:
                caches.gather(inputs, output, self.segments, self.mesh)
            # A graph sets `intercepted`, too: it replays the attributes that were set while it was traced.
            if self.is_parallel and (interception.by_hand is not None or not planned.intercepted[0]):
                self._conclude(module, planned, interception.by_hand)
        if self._gathers:
            output = self.executor.gather_outputs(output, self._gathers)
        if samples is None or self.batch is None:
            return output
        return gather_samples(output, samples, self.batch)

    def _conclude(
        self, module: nn.Module, planned: PlannedAttention, by_hand: HandwrittenAttention | None
    ) -> None:
        """Raise ``RuntimeError`` if the finished call sharded tokens and none of its attention was intercepted."""
        if any([not segment.replicated for segment in self.segments]):  # noqa: C419 - Dynamo evaluates generators whole
            has_graphs = self._tree is not None and self._tree.has_compiled_parts()
            self.check.conclude(module, planned, by_hand, has_graphs=has_graphs)

    def check_new_code(self, module: nn.Module) -> None:
        """Check attention in the next eager call if code inside the model has changed, and warn of code that
        sees this rank's tokens only: :meth:`AttentionCheck.begin`.
        """
        self.check.begin(module, self._attention_modules)

    def may_use_dispatcher(self, module: nn.Module) -> bool:
        """Whether the next call of ``module`` can be intercepted at the dispatcher, which is cheaper than a mode."""
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or self._must_use_mode
            or has_other_builds()
        ):
            return False
        # Attention by hand is seen by a mode only.
        if self.check.due:
            return False
        # An active function mode sees calls before the dispatcher does, and could hide them from the
        # dispatcher.
        if function_mode_stack() or self._tree is None or self._tree.has_compiled_parts():
            return False
        return dispatcher_is_available()

    def _check_arguments(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if one of the parameters in ``Plan.refused`` is given and not None."""
        for name, reason in self.plan.refused.items():
            if arguments.get(name) is not None:
                raise ValueError(
                    f"{type(module).__name__} was given {name}, which cannot be computed on several ranks: {reason}. "
                    "Leave it out, or undo it: unparallelize_pipe(pipe), unparallelize_transformer(transformer)."
                )

    def intercept_if_sharded(self, rules: Collection[ShardRule]) -> None:
        """Start to intercept attention if one of the applied ``rules`` has split the tokens of a segment."""
        if not self.interceptions:
            return
        interception = self.interceptions[-1]
        planned = interception.planned
        for rule in rules:
            if isinstance(rule, Split) and rule.segment in self.executor.segments:
                segments = [*self.executor.segments.values()]
                if interception.continues:
                    segments.append(Segment(PAST, 0, replicated=True))
                planned.set_segments(tuple(segments))
                planned.active[0] = True
                return

    def attach(self, module: nn.Module) -> None:
        """Wrap the submodules that the plan names, unless they are wrapped.
        Raise ``ValueError`` if one is missing.
        """
        if self._tree is not None and self._tree.is_unchanged():
            return
        matches = match_modules(module, self.plan)
        submodules = {name: submodule for name, (submodule, _) in matches.items()}
        if submodules != self.submodules:
            # Look everything up before anything changes: a call after an error would take half of the hooks
            # for all.
            hooks: list[tuple[nn.Module, Wrapper]] = []
            for submodule, rules in matches.values():
                if isinstance(rules.attention, AttentionByHeads):
                    attribute = rules.attention.heads
                    self.heads.setdefault(submodule, (attribute, getattr(submodule, attribute)))
                _, heads = self.heads.get(submodule, ("", 0))
                hooks.append((submodule, self._hook_of(rules, parameters_of(submodule), heads)))
            empty_slots(self.submodules.values(), Slot.PLAN)
            self.submodules = submodules
            for submodule, hook in hooks:
                # The hook runs around __call__, so that it stays outside of the graph of a compiled
                # submodule.
                fill_slot(submodule, Slot.PLAN, {"__call__": hook})
            self._attention_modules = {
                name: part for name, (part, rules) in matches.items() if rules.attention
            }
        if self._tree is not None:
            self.check.reset()
        self._tree = ModuleTree(module)

    @contextmanager
    def all_heads(self) -> Iterator[None]:
        """Give modules of an :class:`AttentionByHeads` the number of heads of all ranks inside the ``with`` block."""
        before = [(part, attribute, getattr(part, attribute)) for part, (attribute, _) in self.heads.items()]
        for part, (attribute, heads) in self.heads.items():
            setattr(part, attribute, heads)
        try:
            yield
        finally:
            for part, attribute, heads in before:
                setattr(part, attribute, heads)

    @contextmanager
    def all_samples(self) -> Iterator[None]:
        """Compute all samples on each rank inside the ``with`` block, so that ranks along batch exchange none."""
        before, self.batch = self.batch, None
        try:
            yield
        finally:
            self.batch = before


PLANNED_CALLS.add(Region.run.__code__)


def _kinds_of(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the names and types of ``arguments``, and the values of flags among them.

    Which code a model runs may depend on them: attention by hand if it has to return weights, attention to
    other tokens if there is no text. Code that a size or a number switches on is not noticed: ``verify=True``
    compares each size. Each step comes here, so the work is that of functions in C.
    """
    names = sorted(arguments)
    values = [*map(arguments.get, names)]
    return (*names, *map(type, values), *map(_FLAGS.get, map(id, values)))


def mesh_of_plan(module: nn.Module) -> SequenceMesh | None:
    """Return the mesh of the plan that is applied to ``module``; None without a plan."""
    region = region_of(module)
    if region is None:
        return None
    return region.mesh


def region_of(module: nn.Module) -> Region | None:
    """Return the :class:`Region` of the plan that is applied to ``module``; None without a plan."""
    return slot_owner(module, Slot.PLAN, Region)
