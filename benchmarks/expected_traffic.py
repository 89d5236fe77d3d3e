"""What each rank sends on a mesh, foretold from one run of the unmodified model on one device.

Seen there: its attention calls, of which the plan says what tokens they consist of, and what the plan gathers. So the
formula (:func:`sent_in_call`, :func:`sent_in_rounds`) needs no ranks; on the ``meta`` device it needs no weights either.
The small exchanges with which ranks agree on what they were given are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from para_core.adapters.foreseen import foreseen_output
from para_core.adapters.supported import plan_for, transformers_of
from para_core.mesh import MeshDim
from para_core.plans.places import as_tuple, find_boundaries, parameters_of
from para_core.plans.plan import Attention, Cut, Gather, Plan, Replicate, Split
from para_core.plans.samples import number_of_samples, own_samples

# (batch, ring, ulysses)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one kind: cut over the sequence ranks, or whole on each."""

    total: int
    cut: bool

    def held(self, rank: int, ranks: int) -> int:
        """Of those that are sharded, how many ``rank`` has; fewer than there are ranks are not sharded."""
        return part(self.total, rank, ranks) if self.cut and self.total >= ranks else 0

    def whole(self, ranks: int) -> int:
        return 0 if self.cut and self.total >= ranks else self.total


@dataclass(frozen=True)
class AttentionCall:
    """One call of ``scaled_dot_product_attention``.

    Args:
        of_mask: bytes of the mask for each key, where its columns are of a rank's own keys.
    """

    samples: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    element_size: int
    queries: tuple[Tokens, ...]
    keys: tuple[Tokens, ...]
    of_mask: int = 0


@dataclass(frozen=True)
class Gathered:
    """An output, or the input of a module, whose tokens are put together, and its bytes for each token."""

    tokens: Tokens
    bytes_per_token: int


@dataclass
class Part:
    """What one share of a call's samples does, and the bytes of what it returns."""

    events: list[AttentionCall | Gathered] = field(default_factory=list)
    returned: int = 0


@dataclass
class ModelCall:
    """One call of a model; ``parts``: several where the ranks along ``batch`` share its samples.

    Args:
        inputs: the model and the sizes that it was given: what calls whose results have the same sizes have in common.
        foreseen: what it gives is known before it is computed.
    """

    inputs: Any
    parts: list[Part]
    foreseen: bool = False


# -- the formula


def part(total: int, rank: int, ranks: int) -> int:
    """What ``rank`` has of ``total``, cut as ``torch.tensor_split`` cuts."""
    return total // ranks + (rank < total % ranks)


def sent_in_attention(call: AttentionCall, ring: int, ulysses: int, rank: int) -> int:
    """Bytes that sequence rank ``rank`` sends to others, S_r being the cut tokens of rank r, H_u the heads of Ulysses rank u.

    Per sample and element: Ulysses Σ_{j≠u} (S_r · H_j · D + S_r · H_kv,j · (D + D_v)) in, and Σ_{j≠u} (S_j + whole tokens) · H_u · D_v
    out; the ring S_block · H_kv,u · (D + D_v) for each block that is passed on. Nothing where no key is sharded.
    """
    ranks = ring * ulysses
    queries, keys = ([sum(x.held(r, ranks) for x in kind) for r in range(ranks)] for kind in (call.queries, call.keys))
    if not any(keys):
        return 0
    block, place = divmod(rank, ulysses)
    peers = [peer for peer in range(ulysses) if peer != place]
    group = call.heads // call.kv_heads
    heads, kv_heads, start = [], [], 0
    for u in range(ulysses):
        heads.append(part(call.heads, u, ulysses))
        end = start + heads[u]
        # Neighbours that see the same key head both get it.
        kv_heads.append(-(-end // group) - start // group if heads[u] else 0)
        start = end
    both = call.head_dim + call.value_dim
    way_in = sum(queries[rank] * heads[j] * call.head_dim + keys[rank] * kv_heads[j] * both for j in peers)
    whole = sum(x.whole(ranks) for x in call.queries)
    way_out = sum(queries[block * ulysses + j] + whole for j in peers) * heads[place] * call.value_dim
    blocks = [sum(keys[i * ulysses : (i + 1) * ulysses]) for i in range(ring)]
    around = sum(blocks[(block - step) % ring] for step in range(ring - 1)) * kv_heads[place] * both
    mask = call.of_mask * _gathered(keys, ring, ulysses, rank)
    return call.samples * call.element_size * (way_in + way_out + around) + mask


def _gathered(tokens: Sequence[int], ring: int, ulysses: int, rank: int) -> int:
    """Tokens that ``rank`` sends where all are gathered: its own over Ulysses, then its block over the ring."""
    block = rank // ulysses
    return tokens[rank] * (ulysses - 1) + sum(tokens[block * ulysses : (block + 1) * ulysses]) * (ring - 1)


def sent_in_call(call: ModelCall, shape: Shape, rank: int) -> int:
    """Bytes that ``rank`` of the mesh sends in one call of a model that it computes."""
    _, ring, ulysses = shape
    index, rank = divmod(rank, ring * ulysses)
    own = call.parts[index if len(call.parts) > 1 else 0]
    total = own.returned * (len(call.parts) - 1)
    for event in own.events:
        if isinstance(event, AttentionCall):
            total += sent_in_attention(event, ring, ulysses, rank)
        else:
            tokens = [event.tokens.held(r, ring * ulysses) for r in range(ring * ulysses)]
            total += event.bytes_per_token * _gathered(tokens, ring, ulysses, rank)
    return total


def sent_in_rounds(rounds: Sequence[Sequence[ModelCall]], shape: Shape, rank: int, *, apart: bool) -> int:
    """Bytes that ``rank`` sends in all ``rounds``, each the calls of one step.

    Args:
        apart: the ranks along ``batch`` take turns in a round's calls, then exchange the results. All compute a call whose sizes
            are new, if what it gives was not foreseen.
    """
    batch, known, total = shape[0], set(), 0
    index = rank // (shape[1] * shape[2])
    for calls in rounds:
        for place, call in enumerate(calls):
            shared = apart and batch > 1 and (call.foreseen or call.inputs in known)
            known.add(call.inputs)
            if shared and place % batch != index:
                continue
            total += sent_in_call(call, shape, rank)
            if shared:
                total += call.parts[0].returned * (batch - 1)
    return total


# -- what is seen on one device


class _Observer(TorchFunctionMode):
    """Reads ``plan`` around one model as it runs on one device."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._parameters = parameters_of(model)
        self._boundaries = find_boundaries(model, plan)
        self._start(Part())

    def _start(self, found: Part) -> None:
        self._part = found
        self._segments: dict[str, Tokens] = {}
        self._active = False
        # Of each module that is running, what its attention calls consist of, and how many there were.
        self._attending: list[tuple[tuple[Attention, ...], list[None]]] = [((Attention(self._plan.joint_order),), [])]

    def run(self, forward: Callable[..., Any], arguments: dict[str, Any], found: Part) -> Any:
        """``forward(**arguments)``, noting in ``found`` what it does."""
        self._start(found)
        self._note(self._plan.inputs, arguments)
        with ExitStack() as stack:
            for module, boundary in self._boundaries.values():
                for hook in self._hooks(module, boundary):
                    stack.callback(hook.remove)
            with self:
                output = forward(**arguments)
        self._note_gathered(output, as_tuple(self._plan.outputs.get("", ())))
        leaves = pytree.tree_leaves(output)
        found.returned = sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))
        return output

    def _hooks(self, module: nn.Module, boundary: Any) -> Iterator[Any]:
        parameters = parameters_of(module)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cuts = {key: cut for key, cut in boundary.cuts if isinstance(key, str)}
            self._note(cuts, {**dict(zip(parameters, args, strict=False)), **kwargs})
            if boundary.attention:
                self._attending.append((boundary.attention, []))

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if boundary.attention:
                self._attending.pop()
            cuts = {key: cut for key, cut in boundary.cuts if isinstance(key, int)}
            self._note(cuts, dict(enumerate([output] if isinstance(output, Tensor) else output)) if cuts else {})
            if boundary.gathers:
                self._note_gathered(output, boundary.gathers)
                self._active = False

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _note(self, cuts: Any, given: dict[Any, Any]) -> None:
        for key, cut in cuts.items():
            for value in pytree.tree_leaves(given.get(key)):
                if isinstance(cut, Gather):
                    self._note_gathered([value], (cut,))
                elif isinstance(value, Tensor):
                    self._note_tokens(key, value, cut)
        self._active |= any(isinstance(cut, Split) and cut.segment in self._segments for cut in cuts.values())

    def _note_tokens(self, key: Any, value: Tensor, cut: Cut) -> None:
        if isinstance(cut, Replicate):
            self._segments.setdefault(cut.segment, Tokens(value.shape[cut.dim], cut=False))
        elif isinstance(cut, Split) and not cut.then_replicated and cut.ndim in (None, value.ndim):
            first = 0 if cut.after is None else self._segments[cut.after].total
            name = cut.segment or cut.like or str(key)
            self._segments.setdefault(name, Tokens(value.shape[cut.dim] - first, cut=True))

    def _note_gathered(self, output: Any, gathers: Sequence[Gather | None]) -> None:
        for value, gather in zip(_tensors(output), gathers, strict=False):
            if gather is not None:
                tokens = value.shape[gather.dim]
                bytes_per_token = value.numel() // tokens * value.element_size()
                self._part.events.append(Gathered(self._segments[gather.segment], bytes_per_token))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self._active:
            self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> None:
        attending, calls = self._attending[-1]
        attention = attending[min(len(calls), len(attending) - 1)]
        calls.append(None)
        names = attention.queries if attention.keys is None else attention.keys
        self._part.events.append(
            AttentionCall(
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
        known = tuple(self._segments[name] for name in names if name in self._segments)
        # What is left was never sharded.
        return (*known, Tokens(total - sum(x.total for x in known), cut=False))

    def _of_mask(self, attention: Attention, mask: Tensor | None) -> int:
        if mask is None or mask.shape[-1] == 1:
            return 0
        rows = mask[..., :1, :] if attention.mask == "pairs" else mask
        # From a mask that the plan cuts the model makes one of this rank's keys; others it makes for the whole sequence.
        cuts = [self._plan.inputs, *self._plan.inner.values()]
        cuts_masks = any("mask" in str(key) for of_module in cuts for key in of_module)
        return rows.numel() // mask.shape[-1] * mask.element_size() if attention.mask or cuts_masks else 0


def _tensors(output: Any) -> list[Tensor]:
    values = [output] if isinstance(output, Tensor) else list(output.values() if hasattr(output, "values") else output)
    return [value for value in values if isinstance(value, Tensor)]


@contextmanager
def observed(model: nn.Module, batch: int = 1) -> Iterator[list[ModelCall]]:
    """Inside, calls of ``model`` are listed; its samples are computed in ``batch`` shares if its plan would share them."""
    plan = plan_for(model)
    if plan is None:
        raise TypeError(f"there is no plan for {type(model).__name__}.")
    observer, parameters, forward = _Observer(model, plan), parameters_of(model), model.forward
    calls: list[ModelCall] = []

    @functools.wraps(forward)
    def observing(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        shares = [given]
        if batch > 1 and plan.batched:
            name, dim = next(iter(plan.batched.items()))
            total = number_of_samples(given[name], dim)
            unshared = total is None or any(given.get(other) is not None for other in plan.unshared)
            if not unshared and total % batch == 0:
                shares = [_share(given, plan, total, index, batch) for index in range(batch)]
        with mock.patch.dict(vars(model)):
            # What is put in its place here is not the model's own.
            del model.forward
            foreseen = foreseen_output(model, args, kwargs) is not None
        call = ModelCall((id(model), *_sizes(given)), [Part() for _ in shares], foreseen)
        calls.append(call)
        outputs = [observer.run(forward, share, found) for share, found in zip(shares, call.parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else _joined(outputs)

    with mock.patch.object(model, "forward", observing):
        yield calls


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
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, bool)))


def takes_turns(pipe: Any) -> bool:
    """Whether ranks along ``batch`` take turns in the calls of a step; or they share the samples of each."""
    plan = plan_for(pipe.transformer)
    # Perturbed attention guidance takes a batch apart inside of the model.
    return plan is not None and (not plan.batched or hasattr(pipe, "pag_applied_layers"))


def observe_pipeline(pipe: Any, generate: Callable[[], Any], batch: int = 1) -> list[list[ModelCall]]:
    """The calls of each step of ``generate()``, which calls ``pipe``, as :func:`observed` lists them."""
    models = list(transformers_of(pipe).values())
    batch = 1 if takes_turns(pipe) else batch
    rounds: list[list[ModelCall]] = []
    # Of the class: LTX-2 makes a copy of its scheduler for sound.
    scheduler = type(pipe.scheduler)
    step = scheduler.step
    with ExitStack() as stack:
        seen = [stack.enter_context(observed(model, batch)) for model in models]

        def end_round() -> None:
            calls = [call for calls in seen for call in calls]
            if calls:
                rounds.append(calls)
            for each in seen:
                each.clear()

        def step_and_end(*args: Any, **kwargs: Any) -> Any:
            end_round()
            return step(*args, **kwargs)

        stack.enter_context(mock.patch.object(scheduler, "step", functools.wraps(step)(step_and_end)))
        generate()
    return rounds
