"""Apply a plan to one module: its calls shard their inputs, run with attention intercepted, and gather their outputs.

The code of the module does not change. Wrappers of the module and its submodules live in private subclasses
(:mod:`para_core.instance_patching`), so hooks, ``forward`` and attributes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from para_core.attention.attention_options import AttnOptions
from para_core.attention.attn_func import AttnFunc
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

# Called with the arguments of a call by name; raises on every rank if they differ between ranks.
RequireEqual = Callable[[Mapping[str, Any]], None]


class _Region:
    """A plan that is applied to one module, and the state of the current call."""

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
        # Prepared attention calls, kept from call to call.
        self.known = KnownAttention()
        self.require_equal = require_equal
        # Whether the caller has verified that all ranks pass equal arguments.
        self.inputs_verified = False
        self.parameters = parameters_of(module)
        self.encoders = any(
            isinstance(submodule, (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention))
            for submodule in module.modules()
        )
        # Parameters in which each rank keeps the keys of its own heads, so their values differ between ranks.
        self.kept_by_heads = {
            name
            for attention in plan.attention.values()
            if isinstance(attention, AttentionByHeads)
            for name, _ in attention.caches
        }
        # The dispatcher cannot intercept inside an operator that runs functions, as that of flex_attention.
        self.uses_flex_attention = uses_flex_attention(module)
        self.mixes_over_ranks = mesh.ranks > 1 and (
            bool(plan.halos) or any(isinstance(attention, LinearAttention) for attention in plan.attention.values())
        )
        # The compiled call of a module that was compiled in place before the plan was applied. It does not look up
        # _call_impl.
        self.compiled_before: Callable[..., Any] | None = getattr(module, COMPILED_CALL)
        if is_entry(getattr(self.compiled_before, ORIGINAL_CALLABLE, None)):
            self.compiled_before = None
        # The wrapped submodules by name. Loading a LoRA replaces some of them.
        self.submodules: dict[str, nn.Module] = {}
        self._tree: ModuleTree | None = None
        # State of the current call. Lists and dicts, because Dynamo 2.13 loses an attribute that is set before and
        # after torch.cond, which a cache adds.
        self._interceptions: list[Interception] = []
        self._executor = RuleExecutor(mesh, coarse_segments(plan))
        # Whether the call was given a key-value cache with tokens.
        self._continues = False
        # The exchange of the attention module that runs now by heads.
        self._head_exchanges: list[HeadExchange] = []
        self._sharing_samples: list[MeshDim] = []

    @property
    def sharing_samples(self) -> MeshDim | None:
        """The mesh dim whose ranks each compute a part of the samples of the current call; None if none do."""
        return self._sharing_samples[-1] if self._sharing_samples else None

    @property
    def interception(self) -> Interception | None:
        """The interception of the current call; None outside of a call."""
        return self._interceptions[-1] if self._interceptions else None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the current call."""
        return tuple(self._executor.segments.values())

    # -- around the module

    def call_outer(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Wrap ``__call__`` of the module, outside of what ``Module.compile`` compiles: verify the arguments, then
        run.
        """
        # Nothing is read before this test, because what is read while tracing becomes a guard.
        if not torch.compiler.is_compiling():
            self.attach(module)
            # Before a call that may be compiled in place, because Dynamo buries errors that are raised inside a graph.
            self._refuse_arguments(module, args, kwargs)
            if self.require_equal is not None and not self.inputs_verified:
                arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
                self.require_equal({name: x for name, x in arguments.items() if name not in self.kept_by_heads})
        compiled = self.compiled_before
        if compiled is None or getattr(module, COMPILED_CALL) is not compiled:
            return call(module, *args, **kwargs)
        # The module was compiled before the plan was applied, so the graph is inside and sharding and gathering
        # outside.
        return self.run(lambda _, *args, **kwargs: compiled(*args, **kwargs), module, *args, **kwargs)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``call`` with sharded inputs and intercepted attention, and gather its outputs.

        Raises:
            RuntimeError: The module already runs in another thread, or it attended without a call that can be
                intercepted.
            ValueError: An argument is refused by the plan, or a block mask was not sharded.
        """
        if self.interception is not None:
            raise RuntimeError(
                f"this {type(module).__name__} is already running in another thread, on the same ranks: their "
                "collectives would mix. Use one thread, or a copy of the model with its own mesh."
            )
        if torch.compiler.is_compiling():
            self._refuse_arguments(module, args, kwargs)
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
                inputs = [*args, *kwargs.values()]
                caches = None if torch.compiler.is_compiling() or self.mesh.ranks == 1 else CachesOfCall(inputs)
                self._continues = caches is not None and caches.hold_tokens
                self._intercept(self.plan.inputs.values())
                bind = None if interception.mode is None else partial(self._bound, planned)
                with recomputed_under(bind, module):
                    output = call(module, *args, **kwargs)
                if caches is not None:
                    caches.gather(inputs, output, self.segments, self.mesh)
                # Compiled parts set `intercepted` as well, because their graphs repeat the side effects of the handler.
                sharded = self.mesh.ranks > 1 and any(
                    not segment.replicated for segment in self._executor.segments.values()
                )
                if sharded and not planned.intercepted[0]:
                    raise RuntimeError(
                        f"{type(module).__name__} ran on {self.mesh.ranks} ranks and called no "
                        "scaled_dot_product_attention, so each rank attended to its own tokens only. Switch its "
                        "attention to a native backend: transformer.set_attention_backend('native')."
                    )
            rule = self.plan.outputs.get("")
            if rule is not None:
                output = self._executor.outputs(output, as_tuple(rule))
            return self._all_samples(output, samples)
        except (ValueError, RuntimeError) as error:  # Of flex_attention; a RuntimeError since torch 2.15.
            explain_unsharded_mask(error)
            raise
        finally:
            self._interceptions.clear()
            self._sharing_samples.clear()
            self._executor.segments.clear()

    def _bound(self, planned: PlannedAttention, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` such that it can run again in a backward, with the segments and the attention of this
        moment.
        """
        planned, segments = planned.within(planned.attending), dict(self._executor.segments)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_in_backward():
                return function(*args, **kwargs)
            with self._resumed(planned.within(planned.attending), segments):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _resumed(self, planned: PlannedAttention, segments: Mapping[str, Segment]) -> Iterator[None]:
        """Restore the state of a call with these ``segments`` while the block runs."""
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
        """Whether this call can be intercepted at the dispatcher: eager code without gradients, compiled parts, modes
        or encoders.
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.encoders or has_other_builds():
            return False
        if self.uses_flex_attention:
            return False
        # A mode around this call would take precedence over interception at the dispatcher.
        if count_function_modes() > 0 or self._tree is None or self._tree.has_compiled_parts():
            return False
        return dispatcher_is_available()

    def _refuse_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ValueError`` for arguments that the plan refuses."""
        for name, reason in self.plan.refused.items():
            index = self.parameters.index(name)
            if kwargs.get(name) is not None or (index < len(args) and args[index] is not None):
                raise ValueError(
                    f"{type(module).__name__} was given {name}, which cannot be computed on several ranks: {reason}. "
                    "Leave it out, or undo it: unparallelize_pipe(pipe), unparallelize_transformer(transformer)."
                )

    def _intercept(self, cuts: Iterable[ShardRule]) -> None:
        """Start to intercept attention if one of the rules that were just applied sharded a segment."""
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
        """Return the arguments for this rank's samples, and the number of these samples, or None if the samples are not
        split.
        """
        if self.batch is None or self.batch.size == 1 or not self.plan.batched:
            return args, kwargs, None
        batch = self.batch
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        name, dim = next(iter(self.plan.batched.items()))
        total = number_of_samples(arguments.get(name), dim)
        if total is None or any(arguments.get(other) is not None for other in self.plan.unshared):
            return args, kwargs, None
        self._check_declared(arguments)
        if total % batch.size != 0:
            if not torch.compiler.is_compiling():
                self.warnings.warn(
                    "batch",
                    f"a call has {total} sample(s), which do not divide evenly over the {batch.size} ranks along "
                    "'batch', so all of these ranks compute all samples. Use guidance, or give these ranks to the "
                    "sequence.",
                    ParallelWarning,
                )
            return args, kwargs, None

        def own(name: str, value: Any) -> Any:
            batched = self.plan.batched
            return own_samples(value, batched[name], total, batch) if name in batched else value

        # Positional arguments stay positional, so that the model itself raises for unknown or repeated arguments.
        positional = [own(name, value) for name, value in zip(self.parameters, args, strict=False)]
        named = {name: own(name, value) for name, value in kwargs.items()}
        return (*positional, *args[len(positional) :]), named, total // batch.size

    def _check_declared(self, arguments: Mapping[str, Any]) -> None:
        declared = (*self.plan.batched, *self.plan.common, *self.plan.unshared)
        unknown = [name for name, value in arguments.items() if name not in declared and holds_tensor(value)]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} of the model hold(s) tensors, and its plan does not say whether they hold all "
                "samples. Name them in Plan.batched if they do, or in Plan.common if they apply to all samples; or "
                "use a mesh without a 'batch' dim."
            )

    def _all_samples(self, output: Any, samples: int | None) -> Any:
        if samples is None or self.batch is None:
            return output
        return all_samples(output, samples, self.batch)

    # -- around its submodules

    def attach(self, module: nn.Module) -> None:
        """Wrap the submodules that the plan names, unless they are wrapped.

        Raises:
            ValueError: The plan has a rule for a module that does not exist.
        """
        if self._tree is not None and self._tree.is_unchanged():
            return
        if self.submodules and all(is_at(module, name, submodule) for name, submodule in self.submodules.items()):
            self._tree = ModuleTree(module)
            return
        matches = match_modules(module, self.plan)
        for submodule in self.submodules.values():
            unwrap(submodule, _KEY)
        self.submodules = {name: submodule for name, (submodule, _) in matches.items()}
        groups: dict[tuple[ModuleRules, tuple[str, ...], int], list[nn.Module]] = {}
        for submodule, rules in matches.values():
            # Read here, because during a call the attribute is the number of this rank's heads.
            heads = getattr(submodule, rules.attention.heads) if isinstance(rules.attention, AttentionByHeads) else 0
            groups.setdefault((rules, parameters_of(submodule), heads), []).append(submodule)
        for (rules, parameters, heads), submodules in groups.items():
            # The wrapper of __call__ is outside of what Module.compile compiles, before or after this.
            wrap_alike(
                submodules, "__call__", _KEY, self._module_hook(rules, parameters, heads), order=WrapperPriority.PLAN
            )
        self._tree = ModuleTree(module)

    def _module_hook(self, rules: ModuleRules, parameters: tuple[str, ...], heads: int) -> Around:
        name, attention = rules.name, rules.attention
        of_inputs, of_outputs = rules.of_inputs, rules.of_outputs

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
        return cut_and_gather if rules.shard_rules or rules.gathers else inside

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
    """Run ``module`` over ``mesh``. Replaces a plan that was applied before.

    On one rank this has an effect only if ``options.backend`` or ``attn_func`` is given.

    Args:
        plan: A plan of ours, or a ``_cp_plan`` of diffusers.
        batch: Ranks that share the samples of a batch, if ``plan.batched`` is set.
        require_equal: Called with the arguments of each eager call, before the call, except inside
            :func:`inputs_verified`. Raises if they differ between ranks.
        options: Options of attention.
        attn_func: Computes local attention instead of SDPA.

    Raises:
        ValueError: The plan has a rule for a module that does not exist.
    """
    remove_plan(module)
    if not isinstance(plan, Plan):
        plan = published_plan(plan)
    options = options or AttnOptions()
    is_default_attention = options.backend is None and attn_func is None
    if mesh.ranks == 1 and is_default_attention and (batch is None or batch.size == 1 or not plan.batched):
        return
    region = _Region(module, plan, mesh, batch, require_equal, options, attn_func)
    region.attach(module)
    wrap_method(module, CALL_WITH_HOOKS, _KEY, region.run, order=WrapperPriority.PLAN)
    wrap_method(module, "__call__", _KEY, region.call_outer, order=WrapperPriority.PLAN)


def remove_plan(module: nn.Module) -> None:
    """Undo :func:`apply_plan`. Does nothing if no plan is applied."""
    region = _region_of(module)
    submodules = [] if region is None else list(region.submodules.values())
    for submodule in {*module.modules(), *submodules}:
        if is_wrapped(submodule, _KEY):
            unwrap(submodule, _KEY)


def mesh_of_plan(module: nn.Module) -> SequenceMesh | None:
    """Return the mesh of the plan that is applied to ``module``; None without a plan."""
    region = _region_of(module)
    return None if region is None else region.mesh


def ranks_sharing_samples(module: nn.Module) -> MeshDim | None:
    """Return the mesh dim whose ranks each compute a part of the samples of the current call of ``module``; None if
    none do.
    """
    region = _region_of(module)
    return None if region is None else region.sharing_samples


def plan_options(module: nn.Module) -> AttnOptions | None:
    """Return the attention options of the plan that is applied to ``module``; None without a plan."""
    region = _region_of(module)
    return None if region is None else region.options


def segments_under_way(module: nn.Module) -> tuple[SequenceMesh, tuple[Segment, ...]] | None:
    """Return the mesh and the segments of the current call of ``module``; None outside of a call, or on one sequence
    rank.
    """
    region = _region_of(module)
    if region is None or region.mesh.ranks == 1 or region.interception is None:
        return None
    return region.mesh, region.segments


def planned_attention(module: nn.Module, attention: Attention) -> SdpaHandler:
    """Return the function that computes an attention call with the segments ``attention`` in the current call of
    ``module``.
    """
    region = _region_of(module)
    if region is None or region.interception is None:
        return SdpaCall.on_one_device
    return region.interception.planned.within((attention,))


def intercepts_by_mode(module: nn.Module) -> bool:
    """Whether a call of ``module`` would intercept attention by a mode now, and not at the dispatcher."""
    region = _region_of(module)
    return region is not None and not region._may_use_the_dispatcher(module)


@contextmanager
def suspend_interception(module: nn.Module) -> Iterator[None]:
    """Switch off the interception by the plan of ``module`` while the block runs, during a call of ``module``."""
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
    """Note that the current eager call of ``module`` intercepts no attention, because a cache skips all blocks or
    patches compute their own.

    Without this, the call would raise because nothing was intercepted.
    """
    region = _region_of(module)
    interception = None if region is None else region.interception
    if interception is not None:
        interception.planned.intercepted[0] = True
    for mode in function_mode_stack():
        if isinstance(mode, UnifiedAttnMode):
            mode.intercepted = True


def reattach_plan(module: nn.Module) -> None:
    """Wrap submodules of ``module`` that have replaced others since the plan was applied, such as the layers of a
    LoRA.
    """
    region = _region_of(module)
    if region is not None:
        region.attach(module)


@contextmanager
def inputs_verified(module: nn.Module) -> Iterator[None]:
    """Skip the comparison of arguments in calls of ``module`` while the block runs, because the caller has verified
    them.
    """
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
