"""What one call of a model does, seen as the unmodified model runs once on one device: with fake tensors it needs no weights, and no device.

The plan says of what tokens its attention calls consist, what is sharded, and what is gathered.
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

# What launches nothing on a device, beside views.
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
    """Inside, launches, bytes that they move, and bytes held at once: of tokens that are sharded while ``active()``, and of all else."""

    def __init__(self, active: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._active = active
        self.launches, self.moved, self.peak = 0, [0, 0], [0, 0]
        self.in_attention = False
        self._now = [0, 0]
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = _tensors_in((args, kwargs))
        out = func(*args, **(kwargs or {}))
        place, name = int(not self._active()), schema_of(func).name
        made = _tensors_in(out)
        self._hold(made, {storage_id(x.untyped_storage()) for x in given}, place)
        is_launch = name not in _NO_LAUNCH and func.namespace != "prim" and not _is_view(func)
        if is_launch and not self.in_attention:
            self.launches += 1
            if name not in _PRODUCTS:
                self.moved[place] += sum(_bytes_of(x) for x in (*given, *made))
        return out

    def _hold(self, made: Sequence[Tensor], given: set[int], place: int) -> None:
        for x in made:
            storage = x.untyped_storage()
            key = storage_id(storage)
            if key not in self._known and key not in given:
                self._known.add(key)
                weakref.finalize(storage, self._free, key, storage.nbytes(), place)
                self._now[place] += storage.nbytes()
        if sum(self._now) > sum(self.peak):
            self.peak = list(self._now)

    def _free(self, key: int, size: int, place: int) -> None:
        self._known.discard(key)
        self._now[place] -= size


def _bytes_of(x: Tensor) -> int:
    """Of what an expanded tensor repeats, what there is."""
    return int(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()))


def _tensors_in(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _is_view(func: OpOverload) -> bool:
    """Whether what it returns is memory of an argument, not written to."""
    aliases = [returned.alias_info for returned in schema_of(func).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


class _Observer(TorchFunctionMode):
    """Reads ``plan`` around one model as it runs on one device."""

    def __init__(self, model: nn.Module, plan: Plan, tensor: TensorPlan | None) -> None:
        super().__init__()
        self._shared = {
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

    def _start(self, found: CallWork) -> None:
        self._part = found
        self._segments: dict[str, Tokens] = {}
        self._active = False
        self._dispatched = _Dispatched(lambda: self._active)
        # Of each module that is running, what its attention calls consist of, and how many there were.
        self._attending: list[tuple[tuple[Attention, ...], list[None]]] = [((Attention(self._plan.joint_order),), [])]
        # Of each linear attention that is running, how often it called what.
        self._summing: list[tuple[LinearAttention, list[str]]] = []

    def run(self, forward: Callable[..., Any], arguments: dict[str, Any], found: CallWork) -> Any:
        """``forward(**arguments)``, noting in ``found`` what it does."""
        self._start(found)
        self._note(self._plan.inputs, arguments)
        with ExitStack() as stack:
            for module, rules in self._matches.values():
                for hook in self._hooks(module, rules):
                    stack.callback(hook.remove)
            with self, self._dispatched as dispatched:
                output = forward(**arguments)
        found.launches, found.moved = dispatched.launches, (dispatched.moved[0], dispatched.moved[1])
        found.peak = (dispatched.peak[0], dispatched.peak[1])
        self._note_gathered(output, as_tuple(self._plan.outputs.get("", ())))
        self._note_joint_rows(found)
        leaves = pytree.tree_leaves(output)
        found.returned = sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))
        return output

    def _hooks(self, module: nn.Module, rules: Any) -> Iterator[Any]:
        parameters = parameters_of(module)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cuts = {key: cut for key, cut in rules.cuts if isinstance(key, str)}
            self._note(cuts, {**dict(zip(parameters, args, strict=False)), **kwargs})
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
            cuts = {key: cut for key, cut in rules.cuts if isinstance(key, int)}
            self._note(cuts, dict(enumerate([output] if isinstance(output, Tensor) else output)) if cuts else {})
            if rules.gathers:
                self._note_gathered(output, rules.gathers)
                self._active = False

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _note(self, cuts: Any, given: dict[Any, Any]) -> None:
        for key, cut in cuts.items():
            if isinstance(cut, Count) and given.get(key) is not None:
                numbers = given[key]
                for place in cut.at:
                    numbers = numbers[place]
                self._segments.setdefault(
                    cut.segment, Tokens(prod(numbers), cut=True, fewest=self._fewest(cut.segment))
                )
            for value in pytree.tree_leaves(given.get(key)):
                if isinstance(cut, Gather):
                    self._note_gathered([value], (cut,))
                elif isinstance(value, Tensor):
                    self._note_tokens(key, value, cut)
        self._active |= any(isinstance(cut, Split) and cut.segment in self._segments for cut in cuts.values())

    def _note_tokens(self, key: Any, value: Tensor, cut: ShardRule) -> None:
        if isinstance(cut, Replicate):
            self._segments.setdefault(cut.segment, Tokens(value.shape[cut.dim], cut=False))
        elif isinstance(cut, Split) and not cut.then_replicated and cut.ndim in (None, value.ndim):
            first = 0 if cut.after is None else self._segments[cut.after].total
            name = cut.segment or cut.like or str(key)
            total = (value.shape[cut.dim] - first) // (cut.per or 1)
            self._segments.setdefault(name, Tokens(total, cut=True, fewest=self._fewest(name)))

    def _fewest(self, segment: str) -> int:
        return 1 if segment in self._coarse else 2

    def _note_gathered(self, output: Any, gathers: Sequence[Gather | None]) -> None:
        for value, gather in zip(_tensors(output), gathers, strict=False):
            if gather is not None:
                segment = self._segments[gather.segment]
                tokens = segment.total if gather.per != 1 else value.shape[gather.dim]
                self._part.events.append(Gathered(segment, value.numel() // tokens * value.element_size()))

    def _note_edges(self, halo: Halo, x: Tensor) -> None:
        if self._active:
            rows = x.narrow(halo.dim, 0, halo.size)
            self._part.events.append(Edges(self._segments[halo.segment], rows.numel() * x.element_size()))

    def _note_sum(self, name: str, out: Tensor) -> None:
        attention, called = self._summing[-1]
        if self._active and name in {one for one, _ in attention.sums}:
            if (name, called.count(name)) in attention.sums:
                self._part.events.append(Summed(self._segments[attention.segment], out.numel() * out.element_size()))
            called.append(name)

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
            self._part.events.append(Product(1, rows, weight[0].numel(), weight.shape[0], weight.element_size()))
        return out

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        rows = x.shape[-2] if x.ndim > 1 else 1
        shared = self._shared.get(id(weight))
        samples = x.numel() // (rows * x.shape[-1])
        self._part.events.append(
            Product(samples, self._rows(rows), x.shape[-1], weight.shape[0], weight.element_size(), shared)
        )

    def _rows(self, rows: int) -> tuple[Tokens, ...]:
        """Of which segments so many rows are."""
        segments = list(self._segments.values()) if self._active else []
        for count in range(1, len(segments) + 1):
            for some in combinations(segments, count):
                if sum(x.total for x in some) == rows:
                    return some
        # Where a segment is of rows of an image, a token is a part of one.
        in_rows = self._active and any(rows % self._segments[name].total == 0 for name in self._of_many_tokens())
        return (Tokens(rows, cut=in_rows, fewest=1),)

    def _of_many_tokens(self) -> list[str]:
        """Segments under way whose entries are rows of an image, or frames, of many tokens each."""
        cuts: list[Any] = [self._plan.inputs, *self._plan.inner.values()]
        splits = [cut for of_module in cuts for cut in of_module.values() if isinstance(cut, Split)]
        names = {cut.segment or cut.like for cut in splits if cut.per != 1}
        return [name for name in self._segments if name in names]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> None:
        if not self._active:
            queries, keys = ((Tokens(x.shape[-2], cut=False),) for x in (query, key))
            sizes = (query.shape[-3], key.shape[-3], query.shape[-1], value.shape[-1], query.element_size())
            self._part.events.append(CountedAttention(query.shape[:-3].numel(), *sizes, queries, keys))
            return
        attending, calls = self._attending[-1]
        attention = attending[min(len(calls), len(attending) - 1)]
        calls.append(None)
        names = attention.queries if attention.keys is None else attention.keys
        self._part.events.append(
            CountedAttention(
                query.shape[:-3].numel(),
                query.shape[-3],
                key.shape[-3],
                query.shape[-1],
                value.shape[-1],
                query.element_size(),
                self._tokens(attention.queries, query.shape[-2]),
                self._tokens(names, key.shape[-2]),
                self._of_mask(attention, attn_mask),
            )
        )

    def _tokens(self, names: Sequence[str], total: int) -> tuple[Tokens, ...]:
        if any(name in self._of_many_tokens() for name in names):
            return (Tokens(total, cut=True, fewest=1),)
        known = tuple(self._segments[name] for name in names if name in self._segments)
        # What is left was never sharded.
        return (*known, Tokens(total - sum(x.total for x in known), cut=False))

    def _note_joint_rows(self, found: CallWork) -> None:
        """Rows of a product that are no segments: as many as the queries of an attention call, they are the same tokens."""
        joint = {
            sum(x.total for x in event.queries): event.queries
            for event in found.events
            if isinstance(event, CountedAttention) and any(x.cut for x in event.queries)
        }
        for place, event in enumerate(found.events):
            if isinstance(event, Product) and not any(x.cut for x in event.rows):
                rows = sum(x.total for x in event.rows)
                found.events[place] = replace(event, rows=joint.get(rows, event.rows))

    def _of_mask(self, attention: Attention, mask: Tensor | None) -> int:
        if mask is None or mask.shape[-1] == 1:
            return 0
        rows = mask[..., :1, :] if attention.mask == "pairs" else mask
        # From a mask that the plan shards the model makes one of this rank's keys; others it makes for the whole sequence.
        cuts: list[Any] = [self._plan.inputs, *self._plan.inner.values()]
        cuts_masks = any(str(key).endswith(_MASKS_OF_KEYS) for of_module in cuts for key in of_module)
        return rows.numel() // mask.shape[-1] * mask.element_size() if attention.mask or cuts_masks else 0


# Other masks of a model say what its modulations are, say.
_MASKS_OF_KEYS = ("attention_mask", "attn_mask", "hidden_states_mask", "hidden_states_masks")


def _without_data(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def _attention_output(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """What a fused kernel holds: of tensors without data SDPA may make matrix products, with all scores."""
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
    """Inside, calls of ``model`` are listed; its samples are computed in ``batch`` shares if its plan would share them.

    Args:
        tensor: which of its layers tensor ranks would share.
        is_foreseen: of the model and the arguments of a call, whether what it gives is known before it is computed.
    """
    observer, parameters, forward = _Observer(model, plan, tensor), parameters_of(model), model.forward
    calls: list[ModelCall] = []

    @functools.wraps(forward)
    def observing(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        shares = [given]
        if batch > 1 and plan.batched:
            name, dim = next(iter(plan.batched.items()))
            total = number_of_samples(given[name], dim)
            unshared = total is None or any(given.get(other) is not None for other in plan.unshared)
            if not unshared and total is not None and total % batch == 0:
                shares = [_share(given, plan, total, index, batch) for index in range(batch)]
        with _own_forward(model, own):
            foreseen = is_foreseen(model, args, kwargs)
        call = ModelCall((id(model), *_sizes(given)), [CallWork() for _ in shares], foreseen)
        calls.append(call)
        outputs = [observer.run(forward, share, found) for share, found in zip(shares, call.parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else _joined(outputs)

    own = dict(vars(model))
    model.forward = observing
    try:
        yield calls
    finally:
        _restore_forward(model, own)


@contextmanager
def _own_forward(model: nn.Module, own: Mapping[str, Any]) -> Iterator[None]:
    """Inside, ``model`` has the ``forward`` that it had with the attributes ``own``."""
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


def _share(given: dict[str, Any], plan: Plan, total: int, index: int, batch: int) -> dict[str, Any]:
    dim = MeshDim("batch", batch, index, "", None)
    own = {name: own_samples(given[name], of, total, dim) for name, of in plan.batched.items() if name in given}
    return {**given, **own}


def _joined(outputs: Sequence[Any]) -> Any:
    """The outputs of all shares, tensor by tensor; lists have an entry for each sample."""
    flat = [pytree.tree_flatten(output, is_leaf=lambda x: isinstance(x, list)) for output in outputs]
    leaves, specs = zip(*flat, strict=True)
    return pytree.tree_unflatten([_joined_leaf(parts) for parts in zip(*leaves, strict=True)], specs[0])


def _joined_leaf(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else parts[0]


def _sizes(given: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves(given)
    # Switches, too: they decide what is returned.
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, bool, str)))
