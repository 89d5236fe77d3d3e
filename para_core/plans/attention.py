"""Attention inside a plan's region: the plan says of each call what its queries and keys consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.overrides import TorchFunctionMode

from para_core.attention.mesh_attention import AttnFunc, MeshAttention
from para_core.attention.options import AttnOptions
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.layout import Segment, SequenceLayout
from para_core.distributed.mesh import SequenceMesh
from para_core.distributed.sharding import gather_tokens
from para_core.modes.flex_attention import FlexOverMesh, called_in_eager_code
from para_core.modes.interceptor import at_the_dispatcher, call_original, intercept, not_at_the_dispatcher
from para_core.modes.recomputation import bind_checkpoint, bind_reentrant_checkpoint
from para_core.modes.sharding_mode import TraceSafeLayout, segments_of, to_trace_safe
from para_core.plans.kv_cache import PAST
from para_core.plans.plan import Attention
from para_core.torch_internals import no_frame_of_its_own, set_grad_enabled

# Of one model; more lengths are forgotten together.
_MOST_KNOWN = 64

BindRecomputation = Callable[["PlannedAttention", Callable[..., Any]], Callable[..., Any]]


class KnownAttention:
    """The :class:`MeshAttention` of each entry of a plan and its lengths, kept from call to call of a model.

    An object and not a dictionary, because a graph that is handed a dictionary is traced again whenever its length
    changes.
    """

    def __init__(self) -> None:
        self.attentions: dict[tuple[Attention, tuple[Segment, ...]], MeshAttention] = {}


class PlannedAttention:
    """The computation of ``scaled_dot_product_attention`` in one call of a model. Off until tokens have been sharded.

    Args:
        attending: what the first, second, … attention call consists of; the last stands for all further ones.
        known: of the model, kept from call to call.
        attn_func: as :class:`MeshAttention` takes it.
        bind: returns a function that activation checkpointing runs again in the backward, bound to this call of the
            model.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        options: AttnOptions,
        attending: tuple[Attention, ...],
        known: KnownAttention,
        attn_func: AttnFunc | None = None,
        bind: BindRecomputation | None = None,
    ) -> None:
        self.bind = bind
        self.mesh, self.options, self.known, self.attn_func = mesh, options, known, attn_func
        self.attending = attending
        # Of the call under way: what was sharded, or found to be replicated.
        self.segments: TraceSafeLayout = ()
        # Lists: what is set of an attribute before torch.cond (which a cache brings) and again behind it, Dynamo 2.13
        # forgets.
        self.active = [False]
        self.intercepted = [False]
        self._calls = 0
        # Of this call of the model, by the identity of a plan's own values.
        self._found: dict[int, MeshAttention | None] = {}

    def set_segments(self, segments: tuple[Segment, ...]) -> None:
        """Set the segments of the current call, sharded and replicated ones."""
        self.segments = to_trace_safe(segments, self.mesh.device_type)
        self._found = {}

    def within(self, attending: tuple[Attention, ...]) -> PlannedAttention:
        """Return this value for attention calls with the segments ``attending``, counted from 0."""
        inner = PlannedAttention(self.mesh, self.options, attending, self.known, self.attn_func, self.bind)
        inner.segments, inner.active, inner._found = self.segments, [self.active[0]], self._found
        return inner

    def bind_checkpoint(self) -> None:
        """Bind the function of a ``torch.utils.checkpoint`` whose forward runs right now, if one does."""
        if not torch.compiler.is_compiling() and self.bind is not None:
            bind_checkpoint(self.known, partial(self.bind, self))

    def __call__(self, call: SdpaCall) -> Tensor:
        self.bind_checkpoint()
        query, key, value, attn_mask = call.query, call.key, call.value, call.attn_mask
        attention = self.attending[min(self._calls, len(self.attending) - 1)]
        if len(self.attending) > 1:
            self._calls += 1
        self.intercepted[0] = True
        over_mesh = self._over_mesh(attention)
        if over_mesh is None:
            if call.lengths is not None:
                call.lengths.check(query.shape[-2], key.shape[-2])
            return call.on_one_device()
        if attn_mask is None or attention.mask is None:
            return over_mesh(call)
        if attention.mask == "keys":
            _, key_layout = planned_layouts(
                attention, segments_of(self.segments), self.mesh, query.shape[-2], key.shape[-2]
            )
            attn_mask = gather_tokens(attn_mask, -1, key_layout, self.mesh)
            return over_mesh(call.with_tensors(query, key, value, attn_mask))
        valid = attn_mask.diagonal(dim1=-2, dim2=-1)
        out = over_mesh(call.with_tensors(query, key, value, valid[..., None, :]))
        # A row that sees nothing is zero.
        return out.masked_fill(~valid[..., None], 0.0)

    def flex_attention(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Run the operator of ``flex_attention`` that a mode intercepted."""
        attention = self.attending[min(self._calls, len(self.attending) - 1)]
        if len(self.attending) > 1 and not (torch.compiler.is_compiling() and called_in_eager_code()):
            self._calls += 1
        self.intercepted[0] = True
        if self._over_mesh(attention) is None:
            return operator(*args, **kwargs)
        layouts = partial(planned_layouts, attention, segments_of(self.segments), self.mesh)
        return FlexOverMesh(self.mesh, layouts, self.options, assume_equal=True)(operator, args, kwargs)

    def _over_mesh(self, attention: Attention) -> MeshAttention | None:
        """None where nothing that it attends to was sharded."""
        if torch.compiler.is_compiling():
            return self._find(attention)
        if id(attention) not in self._found:
            self._found[id(attention)] = self._find(attention)
        return self._found[id(attention)]

    def _find(self, attention: Attention) -> MeshAttention | None:
        sharded = [name for name, _, replicated, _ in self.segments if not replicated]
        if not set(sharded) & set(attention.keys or attention.queries):
            return None
        segments = segments_of(self.segments)
        if torch.compiler.is_compiling():
            return self._make(attention, segments)
        attentions = self.known.attentions
        if (attention, segments) not in attentions:
            if len(attentions) >= _MOST_KNOWN:
                attentions.clear()
            attentions[attention, segments] = self._make(attention, segments)
        return attentions[attention, segments]

    def _make(self, attention: Attention, segments: tuple[Segment, ...]) -> MeshAttention:
        layouts = partial(planned_layouts, attention, segments, self.mesh)
        return MeshAttention(self.mesh, layouts, self.options, assume_equal=True, attn_func=self.attn_func)


def planned_layouts(
    attention: Attention,
    segments: tuple[Segment, ...],
    mesh: SequenceMesh,
    num_queries: int,
    num_keys: int,
    ordered: bool = True,
) -> tuple[SequenceLayout, SequenceLayout]:
    """Return the layouts of queries and keys, from this rank's numbers of tokens.

    Args:
        segments: which were sharded, or found to be replicated; any other is held by every rank.

    Raises:
        ValueError: the plan says something else of their number.
    """
    query_layout = _layout_of(attention.queries, segments, mesh, num_queries, "query")
    if attention.keys is not None:
        return query_layout, _layout_of(attention.keys, segments, mesh, num_keys, "key")
    if any(segment.name == PAST for segment in segments) and num_keys > num_queries:
        past = Segment(PAST, num_keys - num_queries, replicated=True)
        return query_layout, SequenceLayout((past, *query_layout.segments), mesh.ranks)
    if guard_or_false(num_keys != num_queries):
        raise ValueError(
            f"an attention call has {num_queries} queries and {num_keys} keys on this rank; the plan takes both to be "
            f"{' + '.join(attention.queries)}. Say in Plan.attention what the module that makes it attends to."
        )
    return query_layout, query_layout


def _layout_of(
    names: tuple[str, ...], segments: tuple[Segment, ...], mesh: SequenceMesh, held: int, kind: str
) -> SequenceLayout:
    known = {segment.name: segment for segment in segments}
    local = sum([known[name].size(mesh.rank, mesh.ranks) for name in names if name in known])
    # What is left is of the one segment that was never sharded.
    rest = held - local
    unknown = [name for name in names if name not in known]
    # Of a length that depends on data nothing is known while tracing.
    if guard_or_false(rest < 0 if len(unknown) == 1 else rest != 0):
        raise ValueError(
            f"{kind} has {held} tokens on this rank; of {' + '.join(names)} it holds {local}. The plan does not fit "
            "what "
            "the model does: say in Plan.attention what the module that makes this call attends to."
        )
    found = [known[name] if name in known else Segment(name, rest, replicated=True) for name in names]
    return SequenceLayout(tuple(found), mesh.ranks)


# -- ways to intercept


class PlannedAttnMode(TorchFunctionMode):
    """Intercepts attention for :class:`PlannedAttention`: in graphs, and where autograd runs things again later."""

    def __init__(self, planned: PlannedAttention) -> None:
        super().__init__()
        self.planned = planned

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Nothing of this is read while tracing: what is becomes a guard.
        if not torch.compiler.is_compiling() and func is set_grad_enabled and args == (False,):
            bind = self.planned.bind
            if bind is not None:
                bind_reentrant_checkpoint(partial(bind, self.planned))
        if not self.planned.active[0]:
            return call_original(func, args, kwargs or {})
        planned = self.planned
        return intercept(self, planned, planned.mesh.ranks, func, args, kwargs or {}, flex=planned.flex_attention)


class Interception:
    """The interception of attention in one call of a model, from its beginning to its end.

    Args:
        at_dispatcher: see :func:`~para_core.modes.interceptor.at_the_dispatcher`, which the host pays nothing for; else
            a mode.
    """

    def __init__(self, planned: PlannedAttention, *, at_dispatcher: bool) -> None:
        self.planned = planned
        self.mode = None if at_dispatcher else PlannedAttnMode(planned)
        # At the dispatcher: what attention becomes now, the innermost last.
        self._attending = [planned]

    def entered(self) -> AbstractContextManager[Any]:
        if self.mode is not None:
            return self.mode
        return at_the_dispatcher(self._attend, lambda: self._attending[-1].active[0])

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, attention is what it is on one device."""
        active = self.planned.active
        before, active[0] = active[0], False
        try:
            with nullcontext() if self.mode is not None else not_at_the_dispatcher():
                yield
        finally:
            active[0] = before

    def _attend(self, call: SdpaCall) -> Tensor:
        planned = self._attending[-1]
        return planned(call) if planned.active[0] else call.on_one_device()

    @contextmanager
    def attending_to(self, attending: tuple[Attention, ...]) -> Iterator[None]:
        """Inside, attention calls consist of this; they are counted anew."""
        planned = self.planned.within(attending)
        if self.mode is None:
            self._attending.append(planned)
            try:
                yield
            finally:
                self._attending.pop()
        else:
            # A mode of its own, which goes before the outer one: a branch of torch.cond may change nothing from
            # outside.
            with PlannedAttnMode(planned):
                yield
        if planned.intercepted[0]:
            self.planned.intercepted[0] = True
