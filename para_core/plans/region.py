"""Apply a plan to one module: its calls shard their inputs, run with attention intercepted, and gather their
outputs.

The region fills a slot of the module and its submodules (:mod:`para_core.instance.record`), which leaves
their code, hooks, ``forward`` and attributes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, replace
from functools import cache, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from para_core.attention.attention_options import AttnOptions
from para_core.attention.local import AttnFunc
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.instance.modules import ModuleTree, submodules_of
from para_core.instance.private_class import is_entry
from para_core.instance.record import Around, empty_slots, fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.layout.sequence import Segment
from para_core.modes import fused_encoder
from para_core.modes.foreign_operators import has_other_builds
from para_core.modes.handwritten import HandwrittenAttention
from para_core.modes.interceptor import dispatcher_is_available, without_interception
from para_core.modes.registry import check_exchanges, explain, needs_mode, recomputed_under
from para_core.option_values import Backend
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.attention_check import AttentionCheck
from para_core.plans.exchange import PAST, CachesOfCall, HeadExchange, SumsOverRanks, add_halo, drop_halo
from para_core.plans.foreign_code import PACKAGES_OF_MODELS
from para_core.plans.module_matching import ModuleRules, as_tuple, match_modules, parameters_of
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    LinearAttention,
    OneForEach,
    Plan,
    ShardRule,
    Split,
    attention_calls,
    coarse_segments,
)
from para_core.plans.planned_attention import (
    BindRecomputation,
    Interception,
    PlannedAttention,
    PreparedAttention,
)
from para_core.plans.recomputation import bind_to_call
from para_core.plans.samples import gather_samples, select_arguments
from para_core.plans.whole_arguments import explain_whole_tensor
from para_core.torch_internals import COMPILED_CALL, ORIGINAL_CALLABLE, function_mode_stack
from para_core.user_warnings import WarningLog


@dataclass(eq=False)
class Region:
    """A plan applied to one module, and the state of its current call.
    The fields are as in :func:`apply_plan`.
    """

    module: InitVar[nn.Module]
    plan: Plan
    mesh: SequenceMesh
    batch: MeshDim | None
    agree_on_inputs: AgreeOnInputs | None
    options: AttnOptions
    attn_func: AttnFunc | None
    cross_backend: Backend | None
    around: Callable[[], AbstractContextManager[None]]
    written_for: type | None = None

    def __post_init__(self, module: nn.Module) -> None:
        self.attn_func = without_interception(self.attn_func)
        if self.batch is not None and (self.batch.size == 1 or not self.plan.batched):
            self.batch = None
        # Whether the caller has verified that all ranks pass equal arguments (agreed_inputs.assume_agreed).
        self.inputs_agreed = False
        self.parameters = parameters_of(module)
        self._warnings = WarningLog()
        # The key is (options, cross_backend), so that nothing is compiled again if earlier options are set
        # again.
        self._prepared_for: dict[tuple[AttnOptions, Backend | None], PreparedAttention] = {}
        self.use(self.options, self.cross_backend)
        encoders = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
        self.has_encoders = any(map(isinstance, submodules_of(module), repeat(encoders)))
        # Only a mode intercepts attention in fused encoder layers, and in operators that run functions:
        # flex_attention.
        self._must_use_mode = self.has_encoders or needs_mode(module)
        attending = self.plan.attention.values()
        # Parameters that ranks do not compare, because each rank fills in the cached keys of its own heads.
        self._caches_by_heads = {
            name
            for attention in attending
            if isinstance(attention, AttentionByHeads)
            for name, _ in attention.caches
        }
        self._mixes_over_ranks = self.mesh.ranks > 1 and (
            bool(self.plan.halos) or any(isinstance(attention, LinearAttention) for attention in attending)
        )
        # The compiled call of a module that Module.compile() compiled before. That graph would bypass the
        # slot of _call_impl, so call_outer shards and gathers outside of the graph.
        self._compiled_before: Callable[..., Any] | None = getattr(module, COMPILED_CALL)
        if is_entry(getattr(self._compiled_before, ORIGINAL_CALLABLE, None)):
            self._compiled_before = None
        # The wrapped submodules by name. attach() looks for replaced ones, because loading a LoRA replaces
        # some.
        self.submodules: dict[str, nn.Module] = {}
        # For each module of an AttentionByHeads, the name of its attribute for the number of heads, and the
        # number on all ranks. During a call the attribute holds this rank's number; in a graph with
        # flex_attention also after the call, because Dynamo 2.13 loses the new value of an attribute that is
        # set before flex_attention and after it.
        self.heads: dict[nn.Module, tuple[str, int]] = {}
        self._tree: ModuleTree | None = None
        # Names of the modules whose attention the plan describes.
        self._named_attention: set[str] = set()
        self.check = AttentionCheck(self.mesh.ranks, self.written_for, self._current_attention)
        # Submodules of equal rules share a function, and so their graphs.
        self._hook_of = cache(self._submodule_hook)
        # State of the current call, in lists and dicts, because Dynamo 2.13 loses an attribute that is set
        # before torch.cond (which a cache adds) and again after it.
        self.interceptions: list[Interception] = []
        self.executor = RuleExecutor(self.mesh, coarse_segments(self.plan))
        # Binds a function to a call of this region, for the recomputation of activation checkpointing.
        self.bind: BindRecomputation = partial(bind_to_call, self)
        self._is_parallel = self.mesh.ranks > 1
        self._joint_attention = (Attention(self.plan.joint_order),)
        # Whether a key-value cache among the arguments already holds tokens, which precede the keys of this
        # call.
        self._continues = False
        # The HeadExchange of the attention module that is running, if its plan entry is an AttentionByHeads.
        self._head_exchanges: list[HeadExchange] = []
        self.sharing_samples: list[MeshDim] = []

    def use(self, options: AttnOptions, cross_backend: Backend | None = None) -> None:
        """Use these attention options, and this backend for cross-attention, from the next call on.

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
        """The :class:`Interception` of the current call; None outside of a call."""
        if not self.interceptions:
            return None
        return self.interceptions[-1]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the current call, sharded and replicated."""
        return tuple(self.executor.segments.values())

    def call_outer(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Verify the arguments, and return the result of ``call``.
        ``Module.compile`` does not compile this.
        """
        # Test is_compiling() first: every attribute that is read while tracing becomes a guard of the graph.
        around: Callable[[], AbstractContextManager[None]] = nullcontext
        if not torch.compiler.is_compiling():
            self.attach(module)
            # Check arguments before a call that may be compiled: Dynamo buries errors that are raised in a
            # graph.
            self._check_arguments(module, args, kwargs)
            if not self.inputs_agreed:
                around = self.around
                if self.agree_on_inputs is not None:
                    arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
                    self.agree_on_inputs(
                        {name: x for name, x in arguments.items() if name not in self._caches_by_heads}
                    )
                self.check_new_code(module)
        with around():
            compiled = self._compiled_before
            if compiled is None or getattr(module, COMPILED_CALL) is not compiled:
                return call(module, *args, **kwargs)
            return self.run(lambda _, *args, **kwargs: compiled(*args, **kwargs), module, *args, **kwargs)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``call`` with sharded inputs and intercepted attention, and return its gathered outputs.

        Raises:
            RuntimeError: The module already runs in another thread, or the module made no attention call that
                can be intercepted although its tokens are sharded.
            ValueError: An argument is refused by the plan or does not fit it, or a block mask was not
                sharded.
        """
        if self.interceptions:
            raise RuntimeError(
                f"this {type(module).__name__} is already running in another thread, on the same ranks: their "
                "collectives would mix. Use one thread, or a copy of the model with its own mesh."
            )
        if torch.compiler.is_compiling():
            self._check_arguments(module, args, kwargs)
        if self._mixes_over_ranks:
            check_exchanges(module)
        planned = PlannedAttention(self._prepared, self._joint_attention, self.bind)
        # Test is_compiling() first: every attribute that is read while tracing becomes a guard of the graph.
        is_checked = not torch.compiler.is_compiling() and self.check.due
        by_hand = None
        if is_checked:
            by_hand = HandwrittenAttention(PACKAGES_OF_MODELS)
        interception = Interception(planned, at_dispatcher=self.may_use_dispatcher(module), by_hand=by_hand)
        self.interceptions.append(interception)
        try:
            samples = None
            if self.batch is not None:
                args, kwargs, samples = select_arguments(
                    self.plan, self.parameters, args, kwargs, self.batch, self._warnings
                )
                if samples is not None:
                    self.sharing_samples.append(self.batch)
            args, kwargs = self.executor.arguments(self.plan.inputs, self.parameters, args, kwargs)
            encoders: AbstractContextManager[None] = nullcontext()
            if self.has_encoders:
                encoders = fused_encoder.disable_if(True)
            with encoders, interception.intercept_calls():
                inputs = [*args, *kwargs.values()]
                caches = None
                if self._is_parallel and not torch.compiler.is_compiling():
                    caches = CachesOfCall(inputs)
                self._continues = caches is not None and caches.hold_tokens
                self._intercept_if_sharded(self.plan.inputs.values())
                if interception.mode is None:
                    output = call(module, *args, **kwargs)
                else:
                    with recomputed_under(partial(self.bind, planned), module):
                        output = call(module, *args, **kwargs)
                if caches is not None:
                    caches.gather(inputs, output, self.segments, self.mesh)
                # A graph sets `intercepted`, too: it replays the attributes that were set while it was
                # traced.
                if self._is_parallel and (by_hand is not None or not planned.intercepted[0]):
                    self._conclude(module, planned, by_hand)
            rule = self.plan.outputs.get("")
            if rule is not None:
                output = self.executor.outputs(output, as_tuple(rule))
            if samples is None or self.batch is None:
                return output
            return gather_samples(output, samples, self.batch)
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

    def _conclude(
        self, module: nn.Module, planned: PlannedAttention, by_hand: HandwrittenAttention | None
    ) -> None:
        """Raise ``RuntimeError`` if the finished call sharded tokens and none of its attention was intercepted."""
        if any([not segment.replicated for segment in self.segments]):  # noqa: C419 - Dynamo evaluates generators whole
            has_graphs = self._tree is not None and self._tree.has_compiled_parts()
            self.check.conclude(module, planned, by_hand, has_graphs=has_graphs)

    def _current_attention(self) -> PlannedAttention | None:
        interception = self.interception
        if interception is None:
            return None
        return interception.current

    def check_new_code(self, module: nn.Module) -> None:
        """Check attention in the next eager call if code inside the model has changed, and warn of code that
        sees this rank's tokens only: :meth:`AttentionCheck.begin`.
        """
        planned = {name: part for name, part in self.submodules.items() if name in self._named_attention}
        self.check.begin(module, planned)

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

    def _check_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, reason in self.plan.refused.items():
            index = self.parameters.index(name)
            if kwargs.get(name) is not None or (index < len(args) and args[index] is not None):
                raise ValueError(
                    f"{type(module).__name__} was given {name}, which cannot be computed on several ranks: {reason}. "
                    "Leave it out, or undo it: unparallelize_pipe(pipe), unparallelize_transformer(transformer)."
                )

    def _intercept_if_sharded(self, rules: Collection[ShardRule]) -> None:
        """Start to intercept attention if one of the applied ``rules`` has split the tokens of a segment."""
        if not self.interceptions:
            return
        planned = self.interceptions[-1].planned
        for rule in rules:
            if isinstance(rule, Split) and rule.segment in self.executor.segments:
                segments = [*self.executor.segments.values()]
                if self._continues:
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
            empty_slots(self.submodules.values(), Slot.PLAN)
            self.submodules = submodules
            for submodule, rules in matches.values():
                if isinstance(rules.attention, AttentionByHeads):
                    attribute = rules.attention.heads
                    self.heads.setdefault(submodule, (attribute, getattr(submodule, attribute)))
                _, heads = self.heads.get(submodule, ("", 0))
                # The hook runs around __call__, so that it stays outside of the graph of a compiled
                # submodule.
                hook = self._hook_of(rules, parameters_of(submodule), heads)
                fill_slot(submodule, Slot.PLAN, {"__call__": hook})
            self._named_attention = {name for name, (_, rules) in matches.items() if rules.attention}
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

    def _submodule_hook(self, rules: ModuleRules, parameters: tuple[str, ...], heads: int) -> Around:
        """Return the function that runs around the call of a submodule with ``rules``.

        ``heads`` is the number of heads on all ranks, for an :class:`AttentionByHeads`.
        """
        if rules.exchange is not None:
            if rules.exchange == "enter":
                return partial(self._enter_heads, rules.parts)
            return self._leave_heads
        name = rules.name
        attention = rules.attention
        halo = rules.halo
        gathers = rules.gathers
        of_inputs = rules.of_inputs
        of_outputs = rules.of_outputs

        def attend(call: Around, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if isinstance(attention, AttentionByHeads):
                setattr(module, attention.heads, heads)
            if not attention or not self.interceptions:
                return call(module, *args, **kwargs)
            interception = self.interceptions[-1]
            interception.planned.bind_checkpoint()
            if isinstance(attention, (tuple, OneForEach)):
                with interception.attending_to(
                    attention_calls(attention, parameters, args, kwargs)
                ) as planned:
                    if not (torch.compiler.is_compiling() or self.check.due):
                        return call(module, *args, **kwargs)
                    return self.check.run(planned, call, module, args, kwargs)
            by_heads = (
                isinstance(attention, AttentionByHeads) and self._is_parallel and heads >= self.mesh.ranks
            )
            # Share the heads of a short, replicated segment too, because cached keys are those of a rank's
            # heads. With fewer heads than ranks no call shares them, since a sharded one raises.
            if not by_heads and not self._is_sharded(attention.segment):
                return call(module, *args, **kwargs)
            if isinstance(attention, LinearAttention):
                sums = SumsOverRanks(attention, self.mesh)
                with sums:
                    output = call(module, *args, **kwargs)
                sums.check_summed()
            else:
                segment = self.executor.segment(attention.segment)
                exchange = HeadExchange(attention, segment, self.mesh, module, heads)
                self._head_exchanges.append(exchange)
                try:
                    with interception.switched_off():
                        output = exchange.run(call, parameters, args, kwargs)
                finally:
                    self._head_exchanges.clear()
            interception.planned.intercepted[0] = True
            return output

        def hook(call: Around, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not self.interceptions:
                return call(module, *args, **kwargs)
            interception = self.interceptions[-1]
            rows = None
            interception.planned.bind_checkpoint()
            if of_inputs:
                args, kwargs = self.executor.arguments(of_inputs, parameters, args, kwargs, name)
                self._intercept_if_sharded(of_inputs.values())
            if halo is not None and self._is_sharded(halo.segment):
                rows = args[0].shape[halo.dim]
                args = (add_halo(args[0], halo, self.executor.segment(halo.segment), self.mesh), *args[1:])
            output = attend(call, module, *args, **kwargs)
            if halo is not None and rows is not None:
                output = drop_halo(output, halo, rows, self.mesh)
            if of_outputs:
                output = self.executor.outputs_at(output, of_outputs, name)
                self._intercept_if_sharded(of_outputs.values())
            if gathers:
                output = self.executor.outputs(output, gathers)
                interception.planned.active[0] = False
            return output

        if of_inputs or of_outputs or gathers or halo is not None:
            return hook
        # Return `attend` itself if nothing else is needed: one Python frame less per call.
        return attend

    def _is_sharded(self, segment: str) -> bool:
        return self._is_parallel and not self.executor.segment(segment).replicated

    def _enter_heads(
        self, parts: int | None, call: Around, projection: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        output = call(projection, *args, **kwargs)
        if not self._head_exchanges:
            return output
        return self._head_exchanges[-1].enter(output, parts)

    def _leave_heads(
        self, call: Around, projection: nn.Module, /, x: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self._head_exchanges:
            x = self._head_exchanges[-1].leave(x)
        return call(projection, x, *args, **kwargs)


def mesh_of_plan(module: nn.Module) -> SequenceMesh | None:
    """Return the mesh of the plan that is applied to ``module``; None without a plan."""
    region = region_of(module)
    if region is None:
        return None
    return region.mesh


def region_of(module: nn.Module) -> Region | None:
    """Return the :class:`Region` of the plan that is applied to ``module``; None without a plan."""
    return slot_owner(module, Slot.PLAN, Region)
