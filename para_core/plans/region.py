"""A plan applied to one module: its calls shard what they are given, run with attention intercepted, and gather.

The module's code does not know. What runs around it lives in private subclasses (``para_core.instance_patching``), so hooks,
``forward`` and attributes stay untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from para_core.attention.mesh_attention import AttnFunc
from para_core.attention.options import AttnOptions
from para_core.attention.sdpa_call import SdpaCall, SdpaHandler
from para_core.distributed.layout import Segment
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.instance_patching import (
    Around,
    ModuleTree,
    WrapperPriority,
    is_entry,
    is_wrapped,
    unwrap,
    wrap_alike,
    wrap_method,
    wrapper,
)
from para_core.modes import fused_encoder
from para_core.modes.flash_attention import has_other_builds
from para_core.modes.flex_attention import explain_unsharded_mask, uses_flex_attention
from para_core.modes.interceptor import dispatcher_is_available, unintercepted
from para_core.modes.recomputation import is_in_backward
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.attention import Interception, KnownAttention, PlannedAttention
from para_core.plans.checkpointing import recomputed_under, refuse_checkpointing
from para_core.plans.halo import add_halo, drop_halo
from para_core.plans.heads import HeadExchange
from para_core.plans.kv_cache import PAST, CachesOfCall
from para_core.plans.linear import SumsOverRanks
from para_core.plans.module_matching import ModuleRules, as_tuple, is_at, match_modules, parameters_of
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    Halo,
    LinearAttention,
    Plan,
    ShardRule,
    Split,
    attention_calls,
    coarse_segments,
)
from para_core.plans.published import published_plan
from para_core.plans.samples import all_samples, holds_tensor, number_of_samples, own_samples
from para_core.torch_internals import (
    CALL_WITH_HOOKS,
    COMPILED_CALL,
    ORIGINAL_CALLABLE,
    count_function_modes,
    function_mode_stack,
)
from para_core.user_warnings import ParallelWarning, WarningLog

_KEY = "parallel"

# Called with the arguments of a call, by name; raises where ranks differ.
RequireEqual = Callable[[Mapping[str, Any]], None]


class _Region:
    """One plan applied to one module, and the call of it that is under way."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        mesh: SequenceMesh,
        batch: MeshDim | None,
        require_equal: RequireEqual | None,
        options: AttnOptions,
        attn_func: AttnFunc | None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.batch = batch
        self.warnings = WarningLog()
        self.options, self.attn_func = options, unintercepted(attn_func)
        # What is known of attention calls, kept from call to call.
        self.known = KnownAttention()
        self.require_equal = require_equal
        # The caller has seen to it that all ranks call alike.
        self.inputs_verified = False
        self.parameters = parameters_of(module)
        self.encoders = any(
            isinstance(found, (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention))
            for found in module.modules()
        )
        # Parameters in which each rank keeps keys of its own heads, so what they hold differs.
        self.kept_by_heads = {
            name
            for attention in plan.attention.values()
            if isinstance(attention, AttentionByHeads)
            for name, _ in attention.caches
        }
        # The dispatcher has no way to hand on what operators of torch run that run functions.
        self.uses_flex_attention = uses_flex_attention(module)
        self.mixes_over_ranks = mesh.ranks > 1 and (
            bool(plan.halos) or any(isinstance(attention, LinearAttention) for attention in plan.attention.values())
        )
        # What torch.compile made of this module in place, before a plan was applied: it does not look up _call_impl.
        self.compiled_before: Callable[..., Any] | None = getattr(module, COMPILED_CALL)
        if is_entry(getattr(self.compiled_before, ORIGINAL_CALLABLE, None)):
            self.compiled_before = None
        # The submodules at which something is done, by name. Loading a LoRA puts others in their place.
        self.submodules: dict[str, nn.Module] = {}
        self._tree: ModuleTree | None = None
        # Lists and dicts where something changes during a call: what is set of an attribute before torch.cond (which a cache
        # brings) and again behind it, Dynamo 2.13 forgets.
        self._interceptions: list[Interception] = []
        self._executor = RuleExecutor(mesh, coarse_segments(plan))
        # The call under way was given a key-value cache that holds tokens.
        self._continues = False
        # Of the attention module under way, if it runs by heads.
        self._head_exchanges: list[HeadExchange] = []
        self._sharing_samples: list[MeshDim] = []

    @property
    def sharing_samples(self) -> MeshDim | None:
        """The ranks that each compute a part of the samples of the call under way."""
        return self._sharing_samples[-1] if self._sharing_samples else None

    @property
    def interception(self) -> Interception | None:
        """Of the call under way."""
        return self._interceptions[-1] if self._interceptions else None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of the call under way."""
        return tuple(self._executor.segments.values())

    # -- around the module

    def call_outer(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """What goes around the ``__call__`` of the module: outside of what ``Module.compile`` compiles."""
        # In this order: what is read while tracing becomes a guard.
        if not torch.compiler.is_compiling():
            self.attach(module)
            # Before the call, which may be compiled in place: an error inside of a graph is buried in Dynamo's.
            self._check_given(module, args, kwargs)
            if self.require_equal is not None and not self.inputs_verified:
                given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
                self.require_equal({name: value for name, value in given.items() if name not in self.kept_by_heads})
        compiled = self.compiled_before
        if compiled is None or getattr(module, COMPILED_CALL) is not compiled:
            return call(module, *args, **kwargs)
        # Compiled before: the graph inside, splitting and gathering around it.
        return self.run(lambda _, *args, **kwargs: compiled(*args, **kwargs), module, *args, **kwargs)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """``call`` with its inputs split, attention intercepted, and its outputs gathered."""
        if self.interception is not None:
            raise RuntimeError(
                f"this {type(module).__name__} is already running in another thread, on the same ranks: their "
                "collectives would mix. Use one thread, or a copy of the model with its own mesh."
            )
        if torch.compiler.is_compiling():
            self._check_given(module, args, kwargs)
        if self.mixes_over_ranks:
            refuse_checkpointing(module)
        attending = (Attention(self.plan.joint_order),)
        planned = PlannedAttention(self.mesh, self.options, attending, self.known, self.attn_func, self._bound)
        interception = Interception(planned, at_dispatcher=self._may_use_the_dispatcher(module))
        self._interceptions.append(interception)
        try:
            args, kwargs, samples = self._own_samples(args, kwargs)
            if samples is not None and self.batch is not None:
                self._sharing_samples.append(self.batch)
            args, kwargs = self._executor.arguments(self.plan.inputs, self.parameters, args, kwargs)
            with fused_encoder.held_off(self.encoders), interception.entered():
                given = [*args, *kwargs.values()]
                caches = None if torch.compiler.is_compiling() or self.mesh.ranks == 1 else CachesOfCall(given)
                self._continues = caches is not None and caches.hold_tokens
                self._intercept(self.plan.inputs.values())
                bind = None if interception.mode is None else partial(self._bound, planned)
                with recomputed_under(bind, module):
                    output = call(module, *args, **kwargs)
                if caches is not None:
                    caches.gather(given, output, self.segments, self.mesh)
                # Compiled parts set it too, at every call: their graphs repeat what the handler did to the mode.
                sharded = self.mesh.ranks > 1 and any(
                    not segment.replicated for segment in self._executor.segments.values()
                )
                if sharded and not planned.intercepted[0]:
                    raise RuntimeError(
                        f"{type(module).__name__} ran on {self.mesh.ranks} ranks and called no "
                        "scaled_dot_product_attention, so each rank attended to its own tokens only. Switch its attention "
                        "to a native backend: transformer.set_attention_backend('native')."
                    )
            rule = self.plan.outputs.get("")
            if rule is not None:
                output = self._executor.outputs(output, as_tuple(rule))
            return self._all_samples(output, samples)
        except (ValueError, RuntimeError) as error:  # A RuntimeError since torch 2.15.
            explain_unsharded_mask(error)
            raise
        finally:
            self._interceptions.clear()
            self._sharing_samples.clear()
            self._executor.segments.clear()

    def _bound(self, planned: PlannedAttention, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` so that in a backward it runs as it would now: submodules shard, attend and gather by the plan."""
        planned, segments = planned.within(planned.attending), dict(self._executor.segments)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_in_backward():
                return function(*args, **kwargs)
            with self._resumed(planned.within(planned.attending), segments):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _resumed(self, planned: PlannedAttention, segments: Mapping[str, Segment]) -> Iterator[None]:
        """Inside, a call of the module is under way again that had sharded ``segments``."""
        before = dict(self._executor.segments)
        interception = Interception(planned, at_dispatcher=False)
        self._interceptions.append(interception)
        self._executor.segments.clear()
        self._executor.segments.update(segments)
        try:
            with fused_encoder.held_off(self.encoders), interception.entered():
                yield
        finally:
            self._interceptions.pop()
            self._executor.segments.clear()
            self._executor.segments.update(before)

    def _may_use_the_dispatcher(self, module: nn.Module) -> bool:
        """Whether all attention of this call is dispatched, here and now, by eager code that keeps no gradient."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.encoders or has_other_builds():
            return False
        if self.uses_flex_attention:
            return False
        # The innermost mode counts, so one around this call would count more than the plan.
        if count_function_modes() > 0 or self._tree is None or self._tree.has_compiled_parts():
            return False
        return dispatcher_is_available()

    def _check_given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, reason in self.plan.refused.items():
            place = self.parameters.index(name)
            if kwargs.get(name) is not None or (place < len(args) and args[place] is not None):
                raise ValueError(
                    f"{type(module).__name__} was given {name}, which cannot be computed on several ranks: {reason}. Leave it "
                    "out, or undo it: unparallelize_pipe(pipe), unparallelize_transformer(transformer)."
                )

    def _intercept(self, cuts: Iterable[ShardRule]) -> None:
        """Intercept from here on, if tokens that attention sees are among what was just sharded."""
        interception = self.interception
        if interception is not None and any(
            isinstance(cut, Split) and cut.segment in self._executor.segments for cut in cuts
        ):
            past = [Segment(PAST, 0, replicated=True)] if self._continues else []
            interception.planned.set_segments((*self._executor.segments.values(), *past))
            interception.planned.active[0] = True

    # -- the samples of a batch, over the ``batch`` mesh dim

    def _own_samples(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
        """The arguments for this rank's samples, and how many they are; None: all of them."""
        if self.batch is None or self.batch.size == 1 or not self.plan.batched:
            return args, kwargs, None
        batch = self.batch
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        name, dim = next(iter(self.plan.batched.items()))
        total = number_of_samples(given.get(name), dim)
        if total is None or any(given.get(other) is not None for other in self.plan.unshared):
            # The model says what is wrong with that, if anything is.
            return args, kwargs, None
        self._check_declared(given)
        if total % batch.size != 0:
            if not torch.compiler.is_compiling():
                self.warnings.warn(
                    "batch",
                    f"a call has {total} sample(s), which {batch.size} ranks along 'batch' cannot share: all compute all of "
                    "them. Guide, or give these ranks to the sequence.",
                    ParallelWarning,
                )
            return args, kwargs, None

        def own(name: str, value: Any) -> Any:
            batched = self.plan.batched
            return own_samples(value, batched[name], total, batch) if name in batched else value

        # Each stays where it was given, and the model binds them: it refuses what is unknown, or given twice.
        positional = [own(name, value) for name, value in zip(self.parameters, args, strict=False)]
        named = {name: own(name, value) for name, value in kwargs.items()}
        return (*positional, *args[len(positional) :]), named, total // batch.size

    def _check_declared(self, given: Mapping[str, Any]) -> None:
        declared = (*self.plan.batched, *self.plan.common, *self.plan.unshared)
        unknown = [name for name, value in given.items() if name not in declared and holds_tensor(value)]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} of the model hold(s) tensors, and its plan does not say whether each sample of a batch "
                "has its part of them. Name them in Plan.batched, or, if they are for all samples, in Plan.common; or use a "
                "mesh without a 'batch' dim."
            )

    def _all_samples(self, output: Any, samples: int | None) -> Any:
        if samples is None or self.batch is None:
            return output
        return all_samples(output, samples, self.batch)

    # -- around its submodules

    def attach(self, module: nn.Module) -> None:
        """Put what the plan says around the submodules that it names, if others stand there now.

        Raises:
            ValueError: the plan shards or gathers at a module that is not there.
        """
        if self._tree is not None and self._tree.is_unchanged():
            return
        if self.submodules and all(is_at(module, name, found) for name, found in self.submodules.items()):
            self._tree = ModuleTree(module)
            return
        matches = match_modules(module, self.plan)
        for found in self.submodules.values():
            unwrap(found, _KEY)
        self.submodules = {name: found for name, (found, _) in matches.items()}
        alike: dict[tuple[ModuleRules, tuple[str, ...], int], list[nn.Module]] = {}
        for found, rules in matches.values():
            # Read here: while a call is traced, the module has this rank's number.
            heads = getattr(found, rules.attention.heads) if isinstance(rules.attention, AttentionByHeads) else 0
            alike.setdefault((rules, parameters_of(found), heads), []).append(found)
        for (rules, parameters, heads), submodules in alike.items():
            # __call__: outside of what Module.compile makes of the submodule, before or after this.
            wrap_alike(
                submodules, "__call__", _KEY, self._module_hook(rules, parameters, heads), order=WrapperPriority.PLAN
            )
        self._tree = ModuleTree(module)

    def _module_hook(self, rules: ModuleRules, parameters: tuple[str, ...], heads: int) -> Around:
        name, attention = rules.name, rules.attention
        of_inputs = {key: cut for key, cut in rules.cuts if isinstance(key, str)}
        of_outputs = {key: cut for key, cut in rules.cuts if isinstance(key, int)}

        def cut_and_gather(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            interception = self.interception
            if interception is None:
                return call(module, *args, **kwargs)
            interception.planned.bind_checkpoint()
            args, kwargs = self._executor.arguments(of_inputs, parameters, args, kwargs, name)
            self._intercept(of_inputs.values())
            output = inside(call, module, *args, **kwargs)
            output = self._executor.outputs_at(output, of_outputs, name)
            self._intercept(of_outputs.values())
            if rules.gathers:
                output = self._executor.outputs(output, rules.gathers)
                interception.planned.active[0] = False
            return output

        def attend(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            interception = self.interception
            if interception is None or not attention:
                return call(module, *args, **kwargs)
            interception.planned.bind_checkpoint()
            if isinstance(attention, LinearAttention):
                return self._sum(attention, interception, call, module, *args, **kwargs)
            if isinstance(attention, AttentionByHeads):
                return self._by_heads(attention, heads, interception, parameters, call, module, *args, **kwargs)
            with interception.attending_to(attention_calls(attention, parameters, args, kwargs)):
                return call(module, *args, **kwargs)

        def mix(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.interception is None or rules.halo is None:
                return attend(call, module, *args, **kwargs)
            self.interception.planned.bind_checkpoint()
            return self._with_halo(rules.halo, attend, call, module, *args, **kwargs)

        if rules.exchange is not None:
            return self._exchange_heads(rules.exchange)
        inside = attend if rules.halo is None else mix
        return cut_and_gather if rules.cuts or rules.gathers else inside

    def _is_sharded(self, segment: str) -> bool:
        return self.mesh.ranks > 1 and not self._executor.segment(segment).replicated

    def _sum(
        self,
        attention: LinearAttention,
        interception: Interception,
        call: Callable[..., Any],
        module: nn.Module,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._is_sharded(attention.segment):
            return call(module, *args, **kwargs)
        sums = SumsOverRanks(attention, self.mesh)
        with sums:
            output = call(module, *args, **kwargs)
        sums.require_summed()
        interception.planned.intercepted[0] = True
        return output

    def _by_heads(
        self,
        attention: AttentionByHeads,
        heads: int,
        interception: Interception,
        parameters: tuple[str, ...],
        call: Callable[..., Any],
        module: nn.Module,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._is_sharded(attention.segment):
            return call(module, *args, **kwargs)
        segment = self._executor.segment(attention.segment)
        exchange = HeadExchange(attention, segment, self.mesh, heads)
        args, kwargs = exchange.own_caches(parameters, args, kwargs)
        self._head_exchanges.append(exchange)
        try:
            with interception.switched_off(), exchange.own_heads(module):
                output = call(module, *args, **kwargs)
        finally:
            self._head_exchanges.clear()
        interception.planned.intercepted[0] = True
        return output

    def _exchange_heads(self, direction: Literal["enter", "leave"]) -> Around:
        def enter(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            output = call(module, *args, **kwargs)
            return self._head_exchanges[-1].enter(output) if self._head_exchanges else output

        def leave(call: Callable[..., Any], module: nn.Module, /, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            x = self._head_exchanges[-1].leave(x) if self._head_exchanges else x
            return call(module, x, *args, **kwargs)

        return enter if direction == "enter" else leave

    def _with_halo(
        self,
        halo: Halo,
        attend: Around,
        call: Callable[..., Any],
        module: nn.Module,
        /,
        x: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._is_sharded(halo.segment):
            return attend(call, module, x, *args, **kwargs)
        segment = self._executor.segment(halo.segment)
        output = attend(call, module, add_halo(x, halo, segment, self.mesh), *args, **kwargs)
        return drop_halo(output, halo, x.shape[halo.dim], self.mesh)


# -- applying and removing


def apply_plan(
    module: nn.Module,
    plan: Plan | Mapping[str, Any],
    mesh: SequenceMesh,
    *,
    batch: MeshDim | None = None,
    require_equal: RequireEqual | None = None,
    options: AttnOptions | None = None,
    attn_func: AttnFunc | None = None,
) -> None:
    """Run this one module over ``mesh`` from now on; a plan applied before is replaced.

    On one rank nothing is done, unless it is said what computes attention.

    Args:
        plan: ours, or a diffusers ``_cp_plan``.
        batch: ranks that share the samples of a batch, if the plan says which arguments hold them.
        require_equal: called with the arguments of each call in eager code, outside of what is compiled in place and of
            :func:`inputs_verified`.
        options: how attention is computed.
        attn_func: computes it on one device, in place of SDPA.

    Raises:
        ValueError: the plan names a module that is not there.
    """
    remove_plan(module)
    if not isinstance(plan, Plan):
        plan = published_plan(plan)
    options = options or AttnOptions()
    as_it_is = options.backend is None and attn_func is None
    if mesh.ranks == 1 and as_it_is and (batch is None or batch.size == 1 or not plan.batched):
        return
    region = _Region(module, plan, mesh, batch, require_equal, options, attn_func)
    region.attach(module)
    wrap_method(module, CALL_WITH_HOOKS, _KEY, region.run, order=WrapperPriority.PLAN)
    wrap_method(module, "__call__", _KEY, region.call_outer, order=WrapperPriority.PLAN)


def remove_plan(module: nn.Module) -> None:
    """Give ``module`` back as it was before :func:`apply_plan`; nothing happens if none was applied."""
    region = _region_of(module)
    submodules = [] if region is None else list(region.submodules.values())
    for submodule in {*module.modules(), *submodules}:
        if is_wrapped(submodule, _KEY):
            unwrap(submodule, _KEY)


def mesh_of_plan(module: nn.Module) -> SequenceMesh | None:
    """The mesh over which a plan runs ``module``; None if none was applied."""
    region = _region_of(module)
    return None if region is None else region.mesh


def ranks_sharing_samples(module: nn.Module) -> MeshDim | None:
    """Return the mesh dim whose ranks each compute a part of the samples of the call of ``module`` under way; None if none do."""
    region = _region_of(module)
    return None if region is None else region.sharing_samples


def plan_options(module: nn.Module) -> AttnOptions | None:
    """How a plan's attention is computed in ``module``; None if no plan was applied."""
    region = _region_of(module)
    return None if region is None else region.options


def segments_under_way(module: nn.Module) -> tuple[SequenceMesh, tuple[Segment, ...]] | None:
    """During a call of ``module`` on several sequence ranks: their mesh, and which tokens were sharded, or found to be replicated."""
    region = _region_of(module)
    if region is None or region.mesh.ranks == 1 or region.interception is None:
        return None
    return region.mesh, region.segments


def planned_attention(module: nn.Module, attention: Attention) -> SdpaHandler:
    """During a call of ``module``, what an attention call becomes that consists of ``attention``."""
    region = _region_of(module)
    if region is None or region.interception is None:
        return SdpaCall.on_one_device
    return region.interception.planned.within((attention,))


def intercepts_by_mode(module: nn.Module) -> bool:
    """Whether a call of ``module`` that began now would intercept attention by a mode: inside of a mode of the user's, for example."""
    region = _region_of(module)
    return region is not None and not region._may_use_the_dispatcher(module)


@contextmanager
def suspend_interception(module: nn.Module) -> Iterator[None]:
    """Inside, during a call of ``module``, its plan intercepts nothing: what is around that does."""
    region = _region_of(module)
    if region is None or region.interception is None:
        yield
        return
    active = region.interception.planned.active
    before, active[0] = active[0], False
    try:
        yield
    finally:
        active[0] = before


def attention_is_skipped(module: nn.Module) -> None:
    """During a call of ``module`` in eager code: nothing of it is intercepted this time, for a cache computes none of its blocks, or patches
    attend in a way of their own."""
    region = _region_of(module)
    interception = None if region is None else region.interception
    if interception is not None:
        interception.planned.intercepted[0] = True
    for mode in function_mode_stack():
        if isinstance(mode, UnifiedAttnMode):
            mode.intercepted = True


def reattach_plan(module: nn.Module) -> None:
    """Put the plan of ``module`` around submodules that were put in the place of others since (a LoRA's layers)."""
    region = _region_of(module)
    if region is not None:
        region.attach(module)


@contextmanager
def inputs_verified(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is called alike on all ranks, so its calls do not ask."""
    region = _region_of(module)
    before = region is None or region.inputs_verified
    try:
        if region is not None:
            region.inputs_verified = True
        yield
    finally:
        if region is not None:
            region.inputs_verified = before


def _region_of(module: nn.Module) -> _Region | None:
    region = getattr(wrapper(module, CALL_WITH_HOOKS, _KEY), "__self__", None)
    return region if isinstance(region, _Region) else None
