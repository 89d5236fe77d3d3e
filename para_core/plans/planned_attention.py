"""Attention of a model with a plan: compute each intercepted call over the segments that the plan names.

A call of the model goes through the files of this folder: :mod:`.region` makes a :class:`PlannedAttention`
and sets its segments, :mod:`.interception` passes the model's attention calls to it, and
:mod:`.submodule_calls` copies it for modules that the plan describes. Tests: tests/plans/test_exactness.py
and test_plan.py. Models with masks of the forms ``"keys"`` (LTX, Allegro) and ``"pairs"`` (HunyuanVideo) are
in tests/adapters/test_transformers.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false

from para_core.attention.attention_options import AttnOptions
from para_core.attention.local import AttnFunc
from para_core.attention.mesh_attention import MeshAttention
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.agree import exchange, together
from para_core.distributed.mesh import SequenceMesh
from para_core.instance.private_class import original_class
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.layout.tokens import gather_tokens
from para_core.modes.registry import RECOMPUTATION, MeshAccess
from para_core.modes.sharding_mode import TraceSafeLayout, segments_of, to_trace_safe
from para_core.plans.exchange import PAST
from para_core.plans.plan import Attention
from para_core.torch_internals import top_saved_tensors_hooks

# Number of entries from which each of the two caches of a PreparedAttention, `attentions` and `computed_by`,
# is emptied: the first before it gets another, the second only when segments are set, so that one call may
# add more.
_MOST_KNOWN = 64

# Segments that no call shards count as replicated. mesh.single_rank() needs such segments, in a layout of all
# ranks: it keeps this rank's index in the full mesh, and a layout of one rank has no tokens for the indices
# from 1 on.
_UNKNOWN_SEGMENTS = Attention(("queries",), ("keys",))

# About how many entries of the keys ranks compare, at least.
_ENTRIES_COMPARED = 64

BindRecomputation = Callable[["PlannedAttention", Callable[..., Any]], Callable[..., Any]]


@dataclass(eq=False)
class PreparedAttention:
    """The attention settings of a plan, with the :class:`MeshAttention` objects kept between calls of the
    model.

    It is not a plain dict, because a graph with a dict argument is traced again whenever the length of the
    dict changes.

    Attributes:
        options: The options of self-attention, and of cross-attention to sharded keys unless ``cross`` is
            set.
        cross: The options of cross-attention. Without them attention to replicated keys is plain SDPA on one
            device.
        attn_func: Computes local attention in place of SDPA, if it is not None.
        attentions: The :class:`MeshAttention` of each plan entry and the segments of a call.
        segments: In eager code, the segments of the last call, for which the next two hold.
        trace_safe: ``segments`` in a form that Dynamo can trace.
        computed_by: What computes each plan entry, by the id of the entry, which is cheaper than hashing it;
            None for SDPA on one device. The values refer to the entries, so that the ids stay valid.
        pairs_checked: The plan entries for which a mask of the form ``"pairs"`` has passed its check. Equal
            on all ranks, because they make the same attention calls.
    """

    mesh: SequenceMesh
    options: AttnOptions
    cross: AttnOptions | None
    attn_func: AttnFunc | None
    attentions: dict[tuple[Attention, tuple[Segment, ...]], MeshAttention] = field(default_factory=dict)
    segments: tuple[Segment, ...] | None = None
    trace_safe: TraceSafeLayout = ()
    computed_by: dict[int, tuple[Attention, MeshAttention | None]] = field(default_factory=dict)
    pairs_checked: set[Attention] = field(default_factory=set)

    def begin(self, segments: tuple[Segment, ...]) -> None:
        """Set :attr:`trace_safe`, and begin a new :attr:`computed_by`, for calls with these ``segments``."""
        self.segments = segments
        self.trace_safe = to_trace_safe(segments, self.mesh.device_type)
        # A new dict: each PlannedAttention keeps that of its own segments, which may be earlier ones.
        self.computed_by = {}


class PlannedAttention:
    """The attention function of one call of a model, or of a module in it. Inactive until the plan has
    sharded tokens.

    A call of the model has one, and a copy of it (:meth:`copy_for_calls`) for each module whose attention the
    plan describes. A copy has the segments and the flag ``active`` of the moment of the module's call, and
    nobody changes them later. So no segment may be split for the first time inside such a module, which
    :func:`~para_core.plans.module_matching.match_modules` refuses.

    It is an :class:`~para_core.modes.registry.AttentionOwner`: the interceptor calls ``attend``,
    ``begin_other_call`` and ``fail``.

    Args:
        prepared: The settings, and what is kept between calls of the model.
        calls: The segments of the first, second, … attention call. The last entry also applies to further
            calls.
        bind: Binds a function to this call of the model, for the recomputation of activation checkpointing.

    Attributes:
        segments: The segments that the call has sharded or replicated so far. Set by ``Region``, before ``active``.
        active: Whether attention is intercepted; one for each copy. Set by ``Region.intercept_if_sharded``;
            reset by :mod:`.submodule_calls` after an output was gathered, and by ``Interception.switch_off``
            for a while.
        intercepted: Whether a call was intercepted; shared by the copies of a model call.
            :class:`~para_core.plans.attention_check.AttentionCheck` has a table of what sets and resets it.
        skipped: Whether other code of this package computes or skips attention, so that calls may be missing;
            shared. Set by ``allow_skipped_attention`` of :mod:`.current_call`.
        compared: In the first call with such arguments, the plan entries whose keys the ranks have compared;
            shared. None in other calls, in which nothing is compared.
        on_one_device: Whether SDPA on one device has computed a call of this copy.
        hooks_outside: The number of ``saved_tensors_hooks`` around the call of the model. A checkpoint that
            set some of them runs the whole call again, which shards and intercepts by itself. Set by
            ``Interception``.
    """

    def __init__(
        self, prepared: PreparedAttention, calls: tuple[Attention, ...], bind: BindRecomputation
    ) -> None:
        self.prepared = prepared
        self.calls = calls
        self.bind = bind
        self.mesh = prepared.mesh
        self.segments: TraceSafeLayout = ()
        # These are one-element lists, because Dynamo 2.13 loses an attribute that is set before torch.cond
        # (which a cache uses) and again after it.
        self.active = [False]
        self.intercepted = [False]
        self.skipped = [False]
        self.compared: set[Attention] | None = None
        self.hooks_outside = 0
        self._num_calls = 0
        self.on_one_device = False
        # In eager code, PreparedAttention.computed_by for the current segments.
        self._known_computations: dict[int, tuple[Attention, MeshAttention | None]] = {}

    def set_segments(self, segments: tuple[Segment, ...]) -> None:
        """Set the segments that the current call has sharded or replicated so far."""
        if torch.compiler.is_compiling():
            self.segments = to_trace_safe(segments, self.mesh.device_type)
            return
        prepared = self.prepared
        if prepared.segments != segments or len(prepared.computed_by) >= _MOST_KNOWN:
            prepared.begin(segments)
        self.segments = prepared.trace_safe
        self._known_computations = prepared.computed_by

    def copy_for_calls(self, calls: tuple[Attention, ...]) -> PlannedAttention:
        """Return a copy that uses the plan entries ``calls``, one per attention call, and counts calls from
        0.

        It is active if this one is now; whether it intercepted a call, both know.
        """
        inner = PlannedAttention(self.prepared, calls, self.bind)
        inner.segments = self.segments
        inner.active = [self.active[0]]
        inner._known_computations = self._known_computations
        inner.intercepted = self.intercepted
        inner.skipped = self.skipped
        inner.compared = self.compared
        inner.hooks_outside = self.hooks_outside
        return inner

    def needs_other_ranks(self) -> bool:
        """Whether an attention call that is made now would attend to keys that other ranks hold."""
        return self.active[0] and any(map(self._has_sharded_keys, self.calls))

    def numbers_of_tokens(self) -> set[int]:
        """Return how many tokens this rank holds of each sharded segment, and of those that attention joins."""
        sizes = {
            segment.name: segment.size(self.mesh.rank, self.mesh.ranks)
            for segment in segments_of(self.segments)
        }
        numbers = {sizes[name] for name, _, replicated, *_ in self.segments if not replicated}
        if numbers:
            numbers |= {sum([sizes.get(name, 0) for name in attention.queries]) for attention in self.calls}
        return numbers

    def bind_checkpoint(self) -> None:
        """Make all ``torch.utils.checkpoint`` calls of the model whose forward is running recompute with this
        attention.

        The caller has found that ``top_saved_tensors_hooks(True)`` is not None, outside of a compiled
        function: some hooks for saved tensors are set, and a checkpoint sets such hooks. That test stands in
        front of each call of this method, because it costs less than the call.
        """
        for recomputation in RECOMPUTATION:
            recomputation.attention_called(self.prepared, partial(self.bind, self), self.hooks_outside)

    def __call__(self, call: SdpaCall) -> Tensor:
        """Return the attention output for this rank's queries, over all keys of the mesh, or by SDPA on one
        device if no key is sharded. Collective, unless no key is sharded.

        Raises:
            ValueError: The number of queries or keys, or the mask, does not fit the plan. Ranks compare
                nothing here; they all raise because they run one plan with equal arguments.
            RuntimeError: The keys are not those of the plan: :meth:`_compare_keys`.
        """
        if not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is not None:
            self.bind_checkpoint()
        attention = self.calls[min(self._num_calls, len(self.calls) - 1)]
        if len(self.calls) > 1:
            self._num_calls += 1
        self.intercepted[0] = True
        if not torch.compiler.is_compiling() and self.compared is not None:
            self._compare_keys(attention, call.key)
        over_mesh = self._computed_by(attention)
        if over_mesh is None:
            if not torch.compiler.is_compiling():
                self.on_one_device = True
            if call.lengths is not None:
                call.lengths.check(call.query.shape[-2], call.key.shape[-2])
            return call.on_one_device()
        if call.attn_mask is None or attention.mask is None or not self._has_sharded_keys(attention):
            return over_mesh(call)
        if attention.mask == "keys":
            return self._attend_with_key_mask(attention, over_mesh, call, call.attn_mask)
        return self._attend_with_pair_mask(attention, over_mesh, call, call.attn_mask)

    attend = __call__

    def _compare_keys(self, attention: Attention, key: Tensor) -> None:
        """Raise ``RuntimeError`` on every rank if sharded queries attend to keys that the plan says all ranks
        hold, and these are not equal. Collective, once for each plan entry and kind of call.

        A module that gets no text attends to its own tokens, with keys in any number.
        """
        sharded = {name for name, _, replicated, *_ in self.segments if not replicated}
        compared = self.compared
        if compared is None or attention in compared or self._has_sharded_keys(attention):
            return
        if not sharded & set(attention.queries):
            return
        compared.add(attention)
        some = key.detach().flatten()
        some = some[:: max(1, some.numel() // _ENTRIES_COMPARED)].float().cpu()
        (first, *others) = exchange((key.shape, some), self.mesh)
        for shape, entries in others:
            # Rounding may differ, because ranks may multiply other numbers of rows.
            if shape != first[0] or (entries - first[1]).norm() > 0.05 * first[1].norm():
                raise RuntimeError(
                    f"{_name_of_caller()} attends to keys that differ between {self.mesh.ranks} ranks, and the plan "
                    f"says that each rank holds all of them ({' + '.join(attention.keys or ())}): they may be this "
                    "rank's own tokens. Did the call leave out an argument, such as the text, or an attention call? "
                    "Pass it, describe the call in Plan.attention (propose_plan, with an example of it), or run on one "
                    "rank: unparallelize_transformer(transformer)."
                )

    def check_num_calls(self) -> None:
        """Raise ``RuntimeError`` if the module of this copy made fewer attention calls than the plan
        describes, one of them on one device, and an entry for sharded keys is left over: which call was left
        out is unknown.
        """
        left = self.calls[self._num_calls :]
        if not self.skipped[0] and any(map(self._has_sharded_keys, left)):
            raise RuntimeError(
                f"{_name_of_caller()} made {self._num_calls} of the {len(self.calls)} attention calls that the plan "
                "describes, and which it left out is unknown, so it may have attended to this rank's tokens only. Give "
                "each attention a module of its own, which Plan.attention names, or run on one rank: "
                "unparallelize_transformer(transformer)."
            )

    def fail(self, error: Exception) -> NoReturn:
        """Raise ``error``. Ranks that run one plan make the same calls, so it is raised on all of them."""
        raise error

    def _attend_with_key_mask(
        self, attention: Attention, over_mesh: MeshAttention, call: SdpaCall, mask: Tensor
    ) -> Tensor:
        """Return the output of a call whose mask has the form ``"keys"`` of :attr:`Attention.mask`.
        Raise ``ValueError`` if it has another. Collective.
        """
        query = call.query
        key = call.key
        if guard_or_false(mask.shape[-1] != key.shape[-2]):
            raise ValueError(
                f"attn_mask has {mask.shape[-1]} columns, and Attention(mask='keys') is for those of this rank's "
                f"{key.shape[-2]} keys. Expand the mask along the keys, or leave mask='keys' out of the plan."
            )
        # Its rows may be this rank's, too, and a MeshAttention takes at most one dim of a mask that is local.
        _, key_layout = planned_layouts(
            attention, segments_of(self.segments), self.mesh, query.shape[-2], key.shape[-2]
        )
        whole_mask = gather_tokens(mask, -1, key_layout, self.mesh)
        return over_mesh(call.with_tensors(query, key, call.value, whole_mask))

    def _attend_with_pair_mask(
        self, attention: Attention, over_mesh: MeshAttention, call: SdpaCall, mask: Tensor
    ) -> Tensor:
        """Return the output of a call whose mask has the form ``"pairs"`` of :attr:`Attention.mask`.
        Raise ``ValueError`` if it has another. Collective.
        """
        if mask.dtype != torch.bool or guard_or_false(mask.shape[-2] != mask.shape[-1]):
            raise ValueError(
                f"attn_mask is {mask.dtype} of shape {list(mask.shape)}, and Attention(mask='pairs') is for a bool "
                "mask with a row and a column for each token of this rank. Leave mask='pairs' out of the plan."
            )
        # A single row is left, so that only the keys are this rank's, and the MeshAttention gathers them.
        valid = mask.diagonal(dim1=-2, dim2=-1)
        # Not AttentionCheck.due, which depends on the hooks and processors of this process: the check is
        # collective.
        if not torch.compiler.is_compiling() and attention not in self.prepared.pairs_checked:
            with together(self.mesh, "a mask of the plan"):
                _check_pairs(mask, valid)
            self.prepared.pairs_checked.add(attention)
        out = over_mesh(call.with_tensors(call.query, call.key, call.value, valid[..., None, :]))
        # The mask forbids an invalid token, such as padding, to attend to anything, so its output is zero.
        return out.masked_fill(~valid[..., None], 0.0)

    def begin_other_call(self, *, counts: bool) -> MeshAccess | None:
        """Return the mesh and the layouts for an attention call that is no SDPA; None if no key is sharded.

        The form of a mask (:attr:`Attention.mask`) is ignored: such a call is one of ``flex_attention``,
        which has no tensor as a mask, but a BlockMask that a :class:`~para_core.plans.plan.SplitMask` has
        sharded.
        """
        attention = self.calls[min(self._num_calls, len(self.calls) - 1)]
        if len(self.calls) > 1 and counts:
            self._num_calls += 1
        self.intercepted[0] = True
        if self._computed_by(attention) is None:
            return None
        layouts = partial(planned_layouts, attention, segments_of(self.segments), self.mesh)
        return MeshAccess(self.mesh, layouts, self.prepared.options, assume_equal=True)

    def _computed_by(self, attention: Attention) -> MeshAttention | None:
        """Return the :class:`MeshAttention` for a plan entry, or None if SDPA on one device computes it."""
        if torch.compiler.is_compiling():
            return self._kept_mesh_attention(attention)
        entry = self._known_computations.get(id(attention))
        if entry is None:
            # The entry keeps the plan entry alive, so that no other one gets its id.
            entry = (attention, self._kept_mesh_attention(attention))
            self._known_computations[id(attention)] = entry
        return entry[1]

    def _kept_mesh_attention(self, attention: Attention) -> MeshAttention | None:
        """Return what :meth:`_computed_by` returns, without its cache. In eager code the
        :class:`MeshAttention` for sharded keys is kept between calls of the model.
        """
        if not self._has_sharded_keys(attention):
            if attention.keys is None or self.prepared.cross is None:
                return None
            # Without sharded keys a rank attends alone, and the positions of its queries in the sequence do
            # not matter.
            layouts = partial(planned_layouts, _UNKNOWN_SEGMENTS, (), self.mesh)
            func = self.prepared.attn_func
            return MeshAttention(
                self.mesh.single_rank(), layouts, self.prepared.cross, assume_equal=True, attn_func=func
            )
        segments = segments_of(self.segments)
        if torch.compiler.is_compiling():
            return self._new_mesh_attention(attention, segments)
        attentions = self.prepared.attentions
        if (attention, segments) not in attentions:
            if len(attentions) >= _MOST_KNOWN:
                attentions.clear()
            attentions[attention, segments] = self._new_mesh_attention(attention, segments)
        return attentions[attention, segments]

    def _has_sharded_keys(self, attention: Attention) -> bool:
        sharded = [name for name, _, replicated, *_ in self.segments if not replicated]
        keys = attention.queries if attention.keys is None else attention.keys
        return bool(set(sharded) & set(keys))

    def _new_mesh_attention(self, attention: Attention, segments: tuple[Segment, ...]) -> MeshAttention:
        layouts = partial(planned_layouts, attention, segments, self.mesh)
        options = self.prepared.options
        if attention.keys is not None and self.prepared.cross is not None:
            options = self.prepared.cross
        return MeshAttention(
            self.mesh, layouts, options, assume_equal=True, attn_func=self.prepared.attn_func
        )


def _check_pairs(mask: Tensor, valid: Tensor) -> None:
    """Raise ``ValueError`` if ``mask`` ``[..., S, S]`` hides a pair of tokens that are both ``valid``
    ``[..., S]``, or shows another. The host waits for the device.
    """
    if not torch.equal(mask, valid[..., :, None] & valid[..., None, :]):
        raise ValueError(
            f"attn_mask {list(mask.shape)} hides pairs of tokens that its diagonal says are valid, or shows others, as "
            "a causal mask does; Attention(mask='pairs') reads the diagonal only. Leave mask='pairs' out of the plan, "
            "and give the model a mask over all tokens."
        )


def planned_layouts(
    attention: Attention,
    segments: tuple[Segment, ...],
    mesh: SequenceMesh,
    num_queries: int,
    num_keys: int,
    ordered: bool = True,
) -> tuple[SequenceLayout, SequenceLayout]:
    """Return the layouts of ``num_queries`` queries and ``num_keys`` keys on this rank, for one attention
    call.

    ``ordered`` is ignored, because a plan always fixes the order of the segments. Raise ``ValueError`` if the
    numbers of tokens do not fit the segments.
    """
    query_layout = layout_of_segments(attention.queries, segments, mesh, num_queries, "query")
    if attention.keys is not None:
        return query_layout, layout_of_segments(attention.keys, segments, mesh, num_keys, "key")
    if any(segment.name == PAST for segment in segments) and num_keys > num_queries:
        past = Segment(PAST, num_keys - num_queries, replicated=True)
        return query_layout, SequenceLayout((past, *query_layout.segments), mesh.ranks)
    if guard_or_false(num_keys != num_queries):
        caller = _name_of_caller()
        raise ValueError(
            f"{caller} attends from {num_queries} queries to {num_keys} keys on this rank, where the tokens are "
            f"sharded; expected equal numbers, those of {' + '.join(attention.queries)}. Something inside the model "
            "adds keys or tokens: an argument (given images whose keys are cached, an adapter), or code of your own (a "
            "subclass, a processor, a hook). Leave it out, or run this pipeline on one rank: unparallelize_pipe(pipe). "
            "If you wrote the plan, say in Plan.attention what this module attends to."
        )
    return query_layout, query_layout


def layout_of_segments(
    names: tuple[str, ...], segments: tuple[Segment, ...], mesh: SequenceMesh, num_tokens: int, kind: str
) -> SequenceLayout:
    """Return the layout of a sequence that consists of the segments ``names`` and has ``num_tokens`` tokens
    on this rank.

    One of ``names`` may be missing in ``segments``, those of the current model call. It counts as replicated,
    with the remaining tokens. If several are missing, no tokens may remain, and each is empty. ``kind`` is
    used in error messages. Raise ``ValueError`` if ``num_tokens`` does not fit the segments.
    """
    by_name = {segment.name: segment for segment in segments}
    local = sum([by_name[name].size(mesh.rank, mesh.ranks) for name in names if name in by_name])
    remaining = num_tokens - local
    unknown = [name for name in names if name not in by_name]
    misfits = remaining != 0
    expected = f"{local}"
    if len(unknown) == 1:
        misfits = remaining < 0
        expected = f"at least {local}"
    # A length that depends on data is unknown while tracing, so guard_or_false skips the check for it.
    if guard_or_false(misfits):
        caller = _name_of_caller()
        raise ValueError(
            f"{caller} attends with {num_tokens} {kind} tokens on this rank; expected {expected}, the rank's part "
            f"of {' + '.join(names)}. Something inside the model adds or drops tokens where they are sharded: code of "
            "your own (a subclass, a processor, a hook), or an argument. Add them before the transformer is called and "
            "drop them from its output, leave them out, or run this pipeline on one rank: unparallelize_pipe(pipe). If "
            "you wrote the plan, say in Plan.attention what this module attends to."
        )
    parts = []
    for name in names:
        if name in by_name:
            parts.append(by_name[name])
        else:
            parts.append(Segment(name, remaining, replicated=True))
    return SequenceLayout(tuple(parts), mesh.ranks)


def _name_of_caller() -> str:
    """Return the class of the module that makes the attention call, or of its processor, for messages."""
    if torch.compiler.is_compiling():
        return "a module"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        variables = frame.f_locals
        # A processor of diffusers gets its module as ``attn``.
        if isinstance(variables.get("self"), nn.Module) or isinstance(variables.get("attn"), nn.Module):
            return original_class(variables.get("self", variables.get("attn"))).__name__
        frame = frame.f_back
    return "a module"
