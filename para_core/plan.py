"""Sharding plans: where a model's tensors are split and gathered, and how a plan is applied to one module.

A plan is data. Applied, it cuts the inputs that it names, runs the module with attention intercepted, and gathers the
outputs; the module's code does not know. Published plans (diffusers' ``_cp_plan``) are taken as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from para_core.instance import is_entry, is_wrapped, original_class, unwrap, wrap_method, wrapper
from para_core.layout import Segment, SequenceLayout
from para_core.mesh import SequenceMesh
from para_core.modes import UnifiedAttnMode
from para_core.sharding import gather_tokens, shard_tokens

_KEY = "parallel"


@dataclass(frozen=True)
class Split:
    """Cut a tensor (or each tensor of a list) along ``dim`` to this rank's part.

    ``segment`` names the tokens that it holds: all splits of one segment must have the same length. None: a sequence of
    its own. ``ndim``, if given, is the number of dims that the tensor must have.
    """

    dim: int
    segment: str | None = None
    ndim: int | None = None


@dataclass(frozen=True)
class Gather:
    """Put the parts of a tensor along ``dim`` together again: all tokens of ``segment``."""

    dim: int
    segment: str


@dataclass(frozen=True)
class Plan:
    """What one model splits and gathers.

    Args:
        inputs: parameters of the model's ``forward`` that are split, wherever they are given and not None.
        outputs: module name (``""``: the model itself) to what is gathered of its output; of a tuple, the first tensor.
        joint_order: the segments of which one attention call consists, in that order; a segment that a call was not
            given is left out.
        inner: module name (``*`` stands for any part of it) to splits of its inputs (by parameter) or outputs (by index).
    """

    inputs: Mapping[str, Split]
    outputs: Mapping[str, Gather | Sequence[Gather | None]]
    joint_order: tuple[str, ...]
    inner: Mapping[str, Mapping[str | int, Split]] = field(default_factory=dict)


# The token streams in the models of diffusers that publish a plan: what attention sees is made of these.
_PUBLISHED_STREAMS = ("encoder_hidden_states", "hidden_states")


def published_plan(cp_plan: Mapping[str, Any]) -> Plan:
    """Read a diffusers ``_cp_plan``: ``ContextParallelInput`` and ``ContextParallelOutput`` by module name.

    Raises:
        ValueError: the plan never splits ``hidden_states`` or gathers nothing, or holds something else.
    """
    inner: dict[str, dict[str | int, Split]] = {}
    outputs: dict[str, Sequence[Gather | None]] = {}
    for name, entry in cp_plan.items():
        if isinstance(entry, Mapping):
            inner[name] = {key: _published_split(name, key, value) for key, value in entry.items()}
        else:
            entries = entry if isinstance(entry, (list, tuple)) else [entry]
            outputs[name] = tuple(
                None if value is None else Gather(_attribute(name, value, "gather_dim"), "hidden_states")
                for value in entries
            )
    inputs = {key: split for key, split in inner.get("", {}).items() if isinstance(key, str)}
    later = {key: split for key, split in inner.pop("", {}).items() if isinstance(key, int)}
    if later:
        raise ValueError(f"the plan splits outputs {sorted(later)} of the model itself; expected only inputs there.")
    every_split = [*inputs.values(), *[split for splits in inner.values() for split in splits.values()]]
    segments = {split.segment for split in every_split}
    if "hidden_states" not in segments or not outputs:
        raise ValueError(f"a plan must split 'hidden_states' and gather an output; got {dict(cp_plan)}.")
    return Plan(inputs, outputs, tuple(name for name in _PUBLISHED_STREAMS if name in segments), inner)


def _published_split(module: str, key: str | int, value: Any) -> Split:
    if isinstance(value, (list, tuple)):
        raise ValueError(f"plan entry {module!r}[{key!r}] splits a list of tensors one by one; expected one split.")
    if isinstance(key, int) != bool(_attribute(module, value, "split_output")):
        raise ValueError(
            f"plan entry {module!r}[{key!r}]: an output is named by its index and has split_output=True, an input by "
            f"its parameter and split_output=False; got {value}."
        )
    segment = key if isinstance(key, str) and key in _PUBLISHED_STREAMS else None
    return Split(_attribute(module, value, "split_dim"), segment, value.expected_dims)


def _attribute(module: str, value: Any, name: str) -> Any:
    if not hasattr(value, name):
        raise ValueError(f"plan entry {module!r} is {value!r}; expected something with {name!r}.")
    return getattr(value, name)


class _Region:
    """One plan applied to one module: what is split of a call, and whether a call is under way."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        mesh: SequenceMesh,
        check_call: CheckCall | None,
        require_equal: CheckCall | None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.check_call = check_call
        self.require_equal = require_equal
        # The caller has seen to it that all ranks call alike.
        self.known_equal = False
        self.parameters = _parameters(module)
        # What torch.compile made of this module in place, before a plan was applied: it does not look up _call_impl.
        self.compiled_before: Callable[..., Any] | None = module._compiled_call_impl
        if is_entry(getattr(self.compiled_before, "_torchdynamo_orig_callable", None)):
            self.compiled_before = None
        self.running = False
        self.mode: UnifiedAttnMode | None = None
        # Of the call under way: tokens of each segment, in the whole sequence.
        self.totals: dict[str, int] = {}

    def run_from_outside(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What goes around the ``__call__`` of the module: outside of what ``Module.compile`` compiles."""
        # In this order: what is read while tracing becomes a guard.
        if not torch.compiler.is_compiling() and self.require_equal is not None and not self.known_equal:
            self.require_equal(self._given(args, kwargs))
        compiled = self.compiled_before
        if compiled is None or module._compiled_call_impl is not compiled:
            return call(module, *args, **kwargs)
        # Compiled before: the graph inside, splitting and gathering around it.
        return self.run(module, lambda module, **given: compiled(**given), args, kwargs)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.parameters, args, strict=False)), **kwargs}

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``call`` with its inputs split, attention intercepted, and its outputs gathered."""
        if self._is_too_short(args, kwargs):
            return call(module, *args, **kwargs)
        if self.running:
            raise RuntimeError(
                f"this {type(module).__name__} is already running in another thread, on the same ranks: their "
                "collectives would mix. Use one thread, or a copy of the model with its own mesh."
            )
        self.running = True
        self.totals = {}
        try:
            given = self._given(args, kwargs)
            if self.check_call is not None:
                self.check_call(given)
            for name, split in self.plan.inputs.items():
                if given.get(name) is not None:
                    given[name] = self._split(given[name], split, name)
            with UnifiedAttnMode(self.mesh, assume_equal=True) as mode:
                self.mode = mode
                mode.active = False
                self._activate()
                with _recomputed_under(mode, module):
                    output = call(module, **given)
                # Compiled parts set it too, at every call: their graphs repeat what the handler did to the mode.
                if not mode.intercepted:
                    raise RuntimeError(
                        f"{type(module).__name__} ran on {self.mesh.ranks} ranks and called no "
                        "scaled_dot_product_attention, so each rank attended to its own tokens only. Switch its attention "
                        "to a native backend: transformer.set_attention_backend('native'), or reset_attention_backend()."
                    )
            return self._gather_outputs(output, "")
        finally:
            self.running = False
            self.mode = None
            self.totals = {}

    def _is_too_short(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the last rank would hold no token at all, which models fail on: each rank then computes everything."""
        given = self._given(args, kwargs)
        streams = [
            (split.segment, given[name].shape[split.dim])
            for name, split in self.plan.inputs.items()
            if split.segment in self.plan.joint_order and isinstance(given.get(name), Tensor)
        ]
        if {segment for segment, _ in streams} != set(self.plan.joint_order):
            return False
        return all(total < self.mesh.ranks for _, total in streams)

    def _activate(self) -> None:
        """Intercept from here on, if the tokens have been cut."""
        if self.mode is None or self.plan.joint_order[-1] not in self.totals:
            return
        present = [name for name in self.plan.joint_order if name in self.totals]
        segments = tuple([Segment(name, self.totals[name]) for name in present])
        self.mode.set_layout(SequenceLayout(segments, self.mesh.ranks))
        self.mode.active = True

    def _split(self, value: Any, split: Split, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._split(item, split, name) for item in value]
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}; the plan splits it: expected a tensor, or a list of such."
            )
        if split.ndim is not None and value.ndim != split.ndim:
            raise ValueError(
                f"{name} has {value.ndim} dims {list(value.shape)}; the plan splits a tensor of {split.ndim}."
            )
        total = value.shape[split.dim]
        if split.segment is not None:
            known = self.totals.setdefault(split.segment, total)
            if known != total:
                raise ValueError(
                    f"{name} has {total} tokens in dim {split.dim}; expected {known}, as the other {split.segment} inputs."
                )
        layout = SequenceLayout((Segment(split.segment or name, total),), self.mesh.ranks)
        return shard_tokens(value, split.dim, layout, self.mesh)

    def _gather_outputs(self, output: Any, module_name: str) -> Any:
        rule = self.plan.outputs.get(module_name)
        if rule is None:
            return output
        gathers = (rule,) if isinstance(rule, Gather) else tuple(rule)
        if isinstance(output, Tensor):
            return self._gather(output, gathers[0])
        if isinstance(output, (tuple, list)):
            done = [self._gather(value, gather) for value, gather in zip(output, gathers, strict=False)]
            return type(output)([*done, *output[len(done) :]])
        # A ModelOutput: an ordered mapping whose values are also attributes.
        for key, gather in zip(list(output.keys()), gathers, strict=False):
            output[key] = self._gather(output[key], gather)
        return output

    def _gather(self, value: Any, gather: Gather | None) -> Any:
        if gather is None or value is None:
            return value
        layout = SequenceLayout((Segment(gather.segment, self.totals[gather.segment]),), self.mesh.ranks)
        return gather_tokens(value, gather.dim, layout, self.mesh)

    def run_inner(self, name: str, splits: Mapping[str | int, Split]) -> Any:
        """What goes around the ``__call__`` of a submodule that the plan names."""

        def around(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.running:
                return call(module, *args, **kwargs)
            parameters = _parameters(module)
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            for key, split in splits.items():
                if isinstance(key, str) and given.get(key) is not None:
                    given[key] = self._split(given[key], split, f"{name}.{key}")
            self._activate()
            output = call(module, **given)
            for key, split in splits.items():
                if isinstance(key, int):
                    if isinstance(output, Tensor):
                        output = self._split(output, split, f"{name}[{key}]")
                    else:
                        parts = list(output)
                        parts[key] = self._split(parts[key], split, f"{name}[{key}]")
                        output = tuple(parts)
            self._activate()
            if name in self.plan.outputs:
                output = self._gather_outputs(output, name)
                if self.mode is not None:
                    self.mode.active = False
            return output

        return around


@contextmanager
def _recomputed_under(mode: UnifiedAttnMode, module: nn.Module) -> Iterator[None]:
    """Inside, what diffusers' activation checkpointing will run again in the backward will do so under ``mode``.

    While a graph is traced nothing is to be done: it holds its own recomputation.
    """
    checkpointing: list[tuple[Any, Any]] = []
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        checkpointing = [
            (submodule, submodule._gradient_checkpointing_func)
            for submodule in module.modules()
            if getattr(submodule, "gradient_checkpointing", False)
        ]
    for submodule, checkpoint in checkpointing:
        submodule._gradient_checkpointing_func = _bind_first(mode, checkpoint)
    try:
        yield
    finally:
        for submodule, checkpoint in checkpointing:
            submodule._gradient_checkpointing_func = checkpoint


def _bind_first(mode: UnifiedAttnMode, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args: checkpoint(mode.bound(function), *args)


# What an adapter looks for in the arguments of a call, by name; raises where it cannot be computed in parallel.
CheckCall = Callable[[Mapping[str, Any]], None]


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of ``forward``; of what torch.compile wraps, those of the module inside."""
    cls = original_class(getattr(module, "_orig_mod", module))
    return tuple(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]


def apply_plan(
    module: nn.Module,
    plan: Plan | Mapping[str, Any],
    mesh: SequenceMesh,
    *,
    check_call: CheckCall | None = None,
    require_equal: CheckCall | None = None,
) -> None:
    """Run this one module over ``mesh`` from now on; a plan applied before is replaced.

    Args:
        plan: ours, or a diffusers ``_cp_plan``.
        check_call: called with the arguments of each call, by name, before anything is split.
        require_equal: called with them in eager code, outside of what is compiled in place and of :func:`known_equal`.

    Raises:
        ValueError: the plan names a module that is not there.
    """
    remove_plan(module)
    if mesh.ranks == 1:
        return
    if not isinstance(plan, Plan):
        plan = published_plan(plan)
    region = _Region(module, plan, mesh, check_call, require_equal)
    inner: dict[str, Mapping[str | int, Split]] = {name: {} for name in plan.outputs if name}
    for name, submodule_splits in plan.inner.items():
        inner[name] = submodule_splits
    found = [(name, _matching(module, name)) for name in inner]
    for name, submodules in found:
        for submodule in submodules:
            # __call__: outside of what Module.compile makes of the submodule, before or after this.
            wrap_method(submodule, "__call__", _KEY, region.run_inner(name, inner[name]))
    wrap_method(module, "_call_impl", _KEY, region.run)
    wrap_method(module, "__call__", _KEY, region.run_from_outside)


def remove_plan(module: nn.Module) -> None:
    """Give ``module`` back as it was before :func:`apply_plan`; nothing happens if none was applied."""
    for submodule in module.modules():
        if is_wrapped(submodule, _KEY):
            unwrap(submodule, _KEY)


def plan_mesh(module: nn.Module) -> SequenceMesh | None:
    """The mesh over which a plan runs ``module``; None if none was applied."""
    region = _region_of(module)
    return None if region is None else region.mesh


@contextmanager
def known_equal(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is called alike on all ranks, so its calls do not ask."""
    region = _region_of(module)
    before = region is None or region.known_equal
    try:
        if region is not None:
            region.known_equal = True
        yield
    finally:
        if region is not None:
            region.known_equal = before


def _region_of(module: nn.Module) -> _Region | None:
    region = getattr(wrapper(module, "_call_impl", _KEY), "__self__", None)
    return region if isinstance(region, _Region) else None


def _matching(module: nn.Module, pattern: str) -> list[nn.Module]:
    found = [submodule for name, submodule in module.named_modules() if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"the plan names the module {pattern!r}, which {type(module).__name__} does not have.")
    return found
