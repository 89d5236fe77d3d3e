"""Observation of the operations of a model call, while the unmodified model runs on one device.

With fake tensors the model needs neither weights nor a device. The plan states which tokens attention calls consist of,
and what is sharded and gathered.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.distributed.mesh import MeshDim
from para_core.planner.traffic import CallWork, CountedAttention, Edges, Gathered, ModelCall, Product, Summed, Tokens
from para_core.plans.module_matching import as_tuple, match_modules, matching_modules, parameters_of
from para_core.plans.plan import (
    Attention,
    Count,
    Gather,
    Halo,
    LinearAttention,
    Plan,
    Replicate,
    ShardRule,
    Split,
    attention_calls,
    coarse_segments,
)
from para_core.plans.samples import number_of_samples, own_samples
from para_core.torch_internals import FakeTensor, OpOverload, TorchDispatchMode, pytree, schema_of, storage_id
from para_core.weights.tensor_plan import TensorPlan

# Operators besides views that launch nothing on a device.
_NO_LAUNCH = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::linear"}
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


class _Dispatched(TorchDispatchMode):
    """Mode that counts launches, the bytes that they move, and the peak of bytes held.

    Bytes are counted in two bins: while ``active()``, when tensors are sharded (0), and otherwise (1).
    """

    def __init__(self, active: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._active = active
        self.launches, self.moved, self.peak = 0, [0, 0], [0, 0]
        self.in_attention = False
        self._held = [0, 0]
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = _tensors_in((args, kwargs))
        out = func(*args, **(kwargs or {}))
        bin_, name = int(not self._active()), schema_of(func).name
        results = _tensors_in(out)
        self._hold(results, {storage_id(x.untyped_storage()) for x in operands}, bin_)
        is_launch = name not in _NO_LAUNCH and func.namespace != "prim" and not _is_view(func)
        if is_launch and not self.in_attention:
            self.launches += 1
            if name not in _PRODUCTS:
                self.moved[bin_] += sum(_bytes_of(x) for x in (*operands, *results))
        return out

    def _hold(self, results: Sequence[Tensor], operands: set[int], bin_: int) -> None:
        for x in results:
            storage = x.untyped_storage()
            key = storage_id(storage)
            if key not in self._storages and key not in operands:
                self._storages.add(key)
                weakref.finalize(storage, self._free, key, storage.nbytes(), bin_)
                self._held[bin_] += storage.nbytes()
        if sum(self._held) > sum(self.peak):
            self.peak = list(self._held)

    def _free(self, key: int, size: int, bin_: int) -> None:
        self._storages.discard(key)
        self._held[bin_] -= size


def _bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor, of an expanded one those in memory."""
    return int(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()))


def _tensors_in(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _is_view(func: OpOverload) -> bool:
    """Whether ``func`` returns memory of an argument without writing to it."""
    aliases = [returned.alias_info for returned in schema_of(func).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


class _Observer(TorchFunctionMode):
    """Mode that records the operations of one model on one device as events, by the model's plan."""

    def __init__(self, model: nn.Module, plan: Plan, tensor: TensorPlan | None) -> None:
        super().__init__()
        self._tensor_splits = {
            id(linear.weight): style.along
            for name, style in (tensor.linears.items() if tensor is not None else ())
            for linear in matching_modules(model, name).values()
            if isinstance(linear, nn.Linear)
        }
        self._plan = plan
        self._coarse = coarse_segments(plan)
        self._parameters = parameters_of(model)
        self._matches = match_modules(model, plan)
        self._start(CallWork())

    def _start(self, work: CallWork) -> None:
        self._work = work
        self._segments: dict[str, Tokens] = {}
        self._active = False
        self._dispatched = _Dispatched(lambda: self._active)
        # For each running module with attention in the plan: its attention calls, and the number of those made.
        self._attending: list[tuple[tuple[Attention, ...], list[None]]] = [((Attention(self._plan.joint_order),), [])]
        # For each running linear attention: the names of the summing functions that it called.
        self._summing: list[tuple[LinearAttention, list[str]]] = []

    def run(self, forward: Callable[..., Any], arguments: dict[str, Any], work: CallWork) -> Any:
        """Return ``forward(**arguments)``, and record its operations in ``work``."""
        self._start(work)
        self._note(self._plan.inputs, arguments)
        with ExitStack() as stack:
            for module, rules in self._matches.values():
                for hook in self._hooks(module, rules):
                    stack.callback(hook.remove)
            with self, self._dispatched as dispatched:
                output = forward(**arguments)
        work.launches, work.moved = dispatched.launches, (dispatched.moved[0], dispatched.moved[1])
        work.peak = (dispatched.peak[0], dispatched.peak[1])
        self._note_gathered(output, as_tuple(self._plan.outputs.get("", ())))
        self._note_joint_rows(work)
        leaves = pytree.tree_leaves(output)
        work.returned = sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))
        return output

    def _hooks(self, module: nn.Module, rules: Any) -> Iterator[Any]:
        parameters = parameters_of(module)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            splits = rules.of_inputs
            self._note(splits, {**dict(zip(parameters, args, strict=False)), **kwargs})
            if isinstance(rules.attention, LinearAttention):
                self._summing.append((rules.attention, []))
            elif rules.attention:
                self._attending.append((attention_calls(rules.attention, parameters, args, kwargs), []))
            if rules.halo is not None:
                self._note_edges(rules.halo, args[0])

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(rules.attention, LinearAttention):
                self._summing.pop()
            elif rules.attention:
                self._attending.pop()
            splits = rules.of_outputs
            self._note(splits, dict(enumerate([output] if isinstance(output, Tensor) else output)) if splits else {})
            if rules.gathers:
                self._note_gathered(output, rules.gathers)
                self._active = False

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _note(self, rules: Any, values: dict[Any, Any]) -> None:
        for key, rule in rules.items():
            if isinstance(rule, Count) and values.get(key) is not None:
                numbers = values[key]
                for index in rule.at:
                    numbers = numbers[index]
                self._note_sharded(rule.segment, prod(numbers))
            for value in pytree.tree_leaves(values.get(key)):
                if isinstance(rule, Gather):
                    self._note_gathered([value], (rule,))
                elif isinstance(value, Tensor):
                    self._note_tokens(key, value, rule)
        self._active |= any(isinstance(rule, Split) and rule.segment in self._segments for rule in rules.values())

    def _note_tokens(self, key: Any, value: Tensor, rule: ShardRule) -> None:
        if isinstance(rule, Replicate):
            self._segments.setdefault(rule.segment, Tokens(value.shape[rule.dim], sharded=False))
        elif isinstance(rule, Split) and not rule.then_replicated and rule.ndim in (None, value.ndim):
            first = 0 if rule.after is None else self._segments[rule.after].total
            name = rule.segment or rule.like or str(key)
            self._note_sharded(name, (value.shape[rule.dim] - first) // (rule.per or 1))

    def _note_sharded(self, segment: str, total: int) -> None:
        min_per_rank = 1 if segment in self._coarse else 2
        self._segments.setdefault(segment, Tokens(total, sharded=True, min_per_rank=min_per_rank))

    def _note_gathered(self, output: Any, gathers: Sequence[Gather | None]) -> None:
        for value, gather in zip(_tensors(output), gathers, strict=False):
            if gather is not None:
                segment = self._segments[gather.segment]
                tokens = segment.total if gather.per != 1 else value.shape[gather.dim]
                self._work.events.append(Gathered(segment, value.numel() // tokens * value.element_size()))

    def _note_edges(self, halo: Halo, x: Tensor) -> None:
        if self._active:
            rows = x.narrow(halo.dim, 0, halo.size)
            self._work.events.append(Edges(self._segments[halo.segment], rows.numel() * x.element_size()))

    def _note_sum(self, name: str, out: Tensor) -> None:
        attention, calls = self._summing[-1]
        if self._active and name in {function for function, _ in attention.sums}:
            if (name, calls.count(name)) in attention.sums:
                self._work.events.append(Summed(self._segments[attention.segment], out.numel() * out.element_size()))
            calls.append(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self._attend(*args, **(kwargs or {}))
            self._dispatched.launches += 1
            self._dispatched.in_attention = True
            try:
                return (
                    _attention_output(*args, **(kwargs or {}))
                    if _without_data(args[0] if args else kwargs["query"])
                    else func(*args, **(kwargs or {}))
                )
            finally:
                self._dispatched.in_attention = False
        out = func(*args, **(kwargs or {}))
        if self._summing:
            self._note_sum(getattr(func, "__name__", ""), out)
        if func is F.linear:
            self._multiply(*args, **(kwargs or {}))
        elif func in _CONVOLUTIONS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            rows = self._rows(out.numel() // weight.shape[0])
            self._work.events.append(Product(1, rows, weight[0].numel(), weight.shape[0], weight.element_size()))
        return out

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        rows = x.shape[-2] if x.ndim > 1 else 1
        tensor_split = self._tensor_splits.get(id(weight))
        samples = x.numel() // (rows * x.shape[-1])
        self._work.events.append(
            Product(samples, self._rows(rows), x.shape[-1], weight.shape[0], weight.element_size(), tensor_split)
        )

    def _rows(self, rows: int) -> tuple[Tokens, ...]:
        """Return the segments whose lengths add up to ``rows``, or unnamed tokens if none do."""
        segments = list(self._segments.values()) if self._active else []
        for count in range(1, len(segments) + 1):
            for some in combinations(segments, count):
                if sum(x.total for x in some) == rows:
                    return some
        # In a segment of image rows, each entry holds many tokens, so the number of tokens is a multiple of it.
        in_rows = self._active and any(rows % self._segments[name].total == 0 for name in self._coarse_segments())
        return (Tokens(rows, sharded=in_rows, min_per_rank=1),)

    def _coarse_segments(self) -> list[str]:
        """Return the active segments whose entries are image rows or frames of many tokens each."""
        rules: list[Any] = [self._plan.inputs, *self._plan.inner.values()]
        splits = [rule for of_module in rules for rule in of_module.values() if isinstance(rule, Split)]
        names = {split.segment or split.like for split in splits if split.per != 1}
        return [name for name in self._segments if name in names]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> None:
        if not self._active:
            queries, keys = ((Tokens(x.shape[-2], sharded=False),) for x in (query, key))
            sizes = (query.shape[-3], key.shape[-3], query.shape[-1], value.shape[-1], query.element_size())
            self._work.events.append(CountedAttention(query.shape[:-3].numel(), *sizes, queries, keys))
            return
        attending, calls = self._attending[-1]
        attention = attending[min(len(calls), len(attending) - 1)]
        calls.append(None)
        names = attention.queries if attention.keys is None else attention.keys
        self._work.events.append(
            CountedAttention(
                query.shape[:-3].numel(),
                query.shape[-3],
                key.shape[-3],
                query.shape[-1],
                value.shape[-1],
                query.element_size(),
                self._tokens(attention.queries, query.shape[-2]),
                self._tokens(names, key.shape[-2]),
                self._mask_bytes(attention, attn_mask),
            )
        )

    def _tokens(self, names: Sequence[str], total: int) -> tuple[Tokens, ...]:
        if any(name in self._coarse_segments() for name in names):
            return (Tokens(total, sharded=True, min_per_rank=1),)
        segments = tuple(self._segments[name] for name in names if name in self._segments)
        # The remaining tokens were never sharded.
        return (*segments, Tokens(total - sum(x.total for x in segments), sharded=False))

    def _note_joint_rows(self, work: CallWork) -> None:
        """Assign product rows that are no segments to the queries of an attention call of equal length."""
        joint = {
            sum(x.total for x in event.queries): event.queries
            for event in work.events
            if isinstance(event, CountedAttention) and any(x.sharded for x in event.queries)
        }
        for i, event in enumerate(work.events):
            if isinstance(event, Product) and not any(x.sharded for x in event.rows):
                rows = sum(x.total for x in event.rows)
                work.events[i] = replace(event, rows=joint.get(rows, event.rows))

    def _mask_bytes(self, attention: Attention, mask: Tensor | None) -> int:
        if mask is None or mask.shape[-1] == 1:
            return 0
        rows = mask[..., :1, :] if attention.mask == "pairs" else mask
        # From a mask that the plan shards, the model derives a mask of this rank's keys; other masks are for all keys.
        rules: list[Any] = [self._plan.inputs, *self._plan.inner.values()]
        shards_masks = any(str(key).endswith(_KEY_MASKS) for of_module in rules for key in of_module)
        return rows.numel() // mask.shape[-1] * mask.element_size() if attention.mask or shards_masks else 0


# Ends of the names of arguments that mask keys. Other masks select modulations, for example.
_KEY_MASKS = ("attention_mask", "attn_mask", "hidden_states_mask", "hidden_states_masks")


def _without_data(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def _attention_output(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty output like a fused kernel's, because SDPA on fake tensors may hold all scores."""
    batch, heads, queries = query.shape[:3]
    return query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)


def _tensors(output: Any) -> list[Tensor]:
    values: list[Any]
    values = [output] if isinstance(output, Tensor) else list(output.values() if hasattr(output, "values") else output)
    return [value for value in values if isinstance(value, Tensor)]


@contextmanager
def observed(
    model: nn.Module,
    plan: Plan,
    batch: int = 1,
    *,
    tensor: TensorPlan | None = None,
    is_foreseen: Callable[..., bool] = lambda *_: False,
) -> Iterator[list[ModelCall]]:
    """Record the calls of ``model`` inside this context, in the list that it yields.

    Args:
        batch (`int`, defaults to `1`): Compute the samples of a call in this number of parts, if the plan permits.
        tensor (`TensorPlan`, *optional*): Layers that tensor ranks split.
        is_foreseen (`Callable`, *optional*): Whether the output's size is known before a call, given the model, args
            and kwargs. Defaults to never.
    """
    observer, parameters, forward = _Observer(model, plan, tensor), parameters_of(model), model.forward
    calls: list[ModelCall] = []

    @functools.wraps(forward)
    def observing(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        parts = [arguments]
        if batch > 1 and plan.batched:
            name, dim = next(iter(plan.batched.items()))
            total = number_of_samples(arguments[name], dim)
            unshared = total is None or any(arguments.get(other) is not None for other in plan.unshared)
            if not unshared and total is not None and total % batch == 0:
                parts = [_part(arguments, plan, total, index, batch) for index in range(batch)]
        with _own_forward(model, own):
            foreseen = is_foreseen(model, args, kwargs)
        call = ModelCall((id(model), *_sizes(arguments)), [CallWork() for _ in parts], foreseen)
        calls.append(call)
        outputs = [observer.run(forward, part, work) for part, work in zip(parts, call.parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else _joined(outputs)

    own = dict(vars(model))
    model.forward = observing
    try:
        yield calls
    finally:
        _restore_forward(model, own)


@contextmanager
def _own_forward(model: nn.Module, own: Mapping[str, Any]) -> Iterator[None]:
    """Restore, inside this context, the ``forward`` that ``model`` had with the instance attributes ``own``."""
    observing = model.forward
    _restore_forward(model, own)
    try:
        yield
    finally:
        model.forward = observing


def _restore_forward(model: nn.Module, own: Mapping[str, Any]) -> None:
    if "forward" in own:
        model.forward = own["forward"]
    else:
        del model.forward


def _part(arguments: dict[str, Any], plan: Plan, total: int, index: int, batch: int) -> dict[str, Any]:
    dim = MeshDim("batch", batch, index, "", None)
    samples = plan.batched.items()
    own = {name: own_samples(arguments[name], of, total, dim) for name, of in samples if name in arguments}
    return {**arguments, **own}


def _joined(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of all parts, tensor by tensor. Lists have an entry per sample."""
    flat = [pytree.tree_flatten(output, is_leaf=lambda x: isinstance(x, list)) for output in outputs]
    leaves, specs = zip(*flat, strict=True)
    return pytree.tree_unflatten([_joined_leaf(parts) for parts in zip(*leaves, strict=True)], specs[0])


def _joined_leaf(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else parts[0]


def _sizes(arguments: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves(arguments)
    # Switches and strings count too, because they decide what is returned.
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, bool, str)))
