"""The specification of one attention call over a mesh, without its tensors, as a frozen value with a JSON
form.

The JSON is a constant argument of the operators in compiled graphs: what it contains is compiled into a
graph, and what may be symbolic, lengths and numbers of heads, is passed beside it as integers.

:mod:`.mesh_attention` and flex attention make it, over the mesh that :func:`mesh_of_call` returns. What
follows from it, which tokens are sent where, is in :mod:`.attention_plan`. Tests:
tests/attention/test_exactness.py, in eager code and in graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from para_core.attention.attention_options import AttnOptions
from para_core.attention.tiles import Causal, PositionalMask
from para_core.dataclass_json import from_json, to_json
from para_core.distributed.cached_property import cached_property
from para_core.distributed.mesh import SequenceMesh, read_mesh
from para_core.layout.pieces import Layout
from para_core.layout.sequence import Segment, SequenceLayout


@dataclass(frozen=True)
class SpecRecord:
    """The content of :attr:`AttentionSpec.text`: JSON of the mesh and the options, and the kinds of segments."""

    mesh: str
    is_causal: bool
    query_kinds: str
    key_kinds: str | None  # None if keys are sharded like queries
    options: str


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """The specification of one attention call over a mesh: what it computes, and over which ranks.

    :class:`~para_core.attention.attention_plan.AttentionPlan` derives the communication from it.
    ``key_layout`` is the same object as ``query_layout`` if keys are sharded like queries: other code
    compares them by identity, because a comparison of symbolic lengths would add guards. For the same reason
    specs are compared by identity (``eq=False``). ``num_heads`` and its divisor ``num_kv_heads`` are over all
    ranks. ``options_text`` is ``options.as_text()``, written before tracing, because Dynamo would treat
    numbers as variables.
    """

    query_layout: SequenceLayout
    key_layout: SequenceLayout
    mesh: SequenceMesh
    num_heads: int
    num_kv_heads: int
    is_causal: bool = False
    scale: float | None = None
    options: AttnOptions = field(default_factory=AttnOptions)
    options_text: str = field(kw_only=True)

    @cached_property
    def text(self) -> str:
        """The JSON form of this spec without :attr:`numbers` and the scale, which may be symbolic in a graph."""
        key_kinds = None
        if self.key_layout is not self.query_layout:
            key_kinds = _kinds(self.key_layout)
        query_kinds = _kinds(self.query_layout)
        return to_json(SpecRecord(self.mesh.text, self.is_causal, query_kinds, key_kinds, self.options_text))

    @cached_property
    def positional_masks(self) -> tuple[PositionalMask, ...]:
        """The masks of this call that decide by the positions of tokens. A mask tensor applies in addition."""
        causal: tuple[PositionalMask, ...] = ()
        if self.is_causal:
            causal = (Causal(),)
        return (*causal, *[other.mask for other in self.options.others if other.mask is not None])

    @property
    def orders_queries(self) -> bool:
        """Whether the Ulysses exchange brings queries into the order of the sequence, as it does with keys
        and values.

        Otherwise they are in the order in which they arrive, rank by rank. This saves two launches, and
        changes no result, because each query has its own, unless one of the reasons below holds.
        """
        layout = self.query_layout
        # A single segment with one part per rank arrives in order, so ordering it is free.
        arrive_in_order = len(layout.segments) == 1 and not layout.segments[0].balanced
        # Every rank holds the same replicated queries. A group has them once only if it joins the pieces of
        # its ranks, which brings them into order.
        is_repeated = bool(layout.replicated)
        # Masks by position cut the queries into runs of consecutive positions, and queries in order have
        # fewer runs. SparseKVAttnMode observes the queries at some positions.
        reads_positions = self.is_causal or self.options.by_position
        return arrive_in_order or is_repeated or reads_positions

    @cached_property
    def queries(self) -> Layout:
        """The queries that each ring rank holds after the Ulysses exchange."""
        return Layout.of(self.query_layout).group_ranks(self.mesh.ulysses.size, ordered=self.orders_queries)

    @cached_property
    def keys(self) -> Layout:
        """The keys that each ring rank holds after the Ulysses exchange."""
        if self.key_layout is self.query_layout and self.orders_queries:
            return self.queries
        return Layout.of(self.key_layout).group_ranks(self.mesh.ulysses.size)

    @property
    def numbers(self) -> list[int]:
        """The integers that may be symbolic in a graph: numbers of heads, and lengths of query and key segments."""
        layouts = [self.query_layout]
        if self.key_layout is not self.query_layout:
            layouts.append(self.key_layout)
        return [
            self.num_heads,
            self.num_kv_heads,
            *[segment.total for layout in layouts for segment in layout.segments],
        ]

    @staticmethod
    def read(text: str, numbers: Sequence[int], scale: float | None) -> AttentionSpec:
        """Return the spec with this :attr:`text`, :attr:`numbers` and scale. Its mesh has only the names of
        process groups, and its segments have no names.
        """
        record = from_json(SpecRecord, text)
        mesh, ranks = read_mesh(record.mesh)
        num_heads, num_kv_heads, *totals = numbers
        query_kinds = record.query_kinds.split(",")
        query_layout = _read_layout(totals[: len(query_kinds)], query_kinds, ranks)
        key_layout = query_layout
        key_totals = totals[len(query_kinds) :]
        # While Dynamo traces a call with symbolic lengths, `is` may take one layout for two: in text, in
        # numbers, or in both. If only one of them names two layouts, there is one. If both do, two equal
        # layouts are read, with which the call is as right, and may take more copies.
        if record.key_kinds is not None and key_totals:
            key_layout = _read_layout(key_totals, record.key_kinds.split(","), ranks)
        return AttentionSpec(
            query_layout,
            key_layout,
            mesh,
            num_heads,
            num_kv_heads,
            is_causal=record.is_causal,
            scale=scale,
            options=AttnOptions.read(record.options),
            options_text=record.options,
        )


def mesh_of_call(mesh: SequenceMesh, key_layout: SequenceLayout, options: AttnOptions) -> SequenceMesh:
    """Return the mesh over which a call runs: ``mesh``, or this rank alone if all keys are replicated.

    All ranks have the same layout and options, so either all of them run the collectives of the call or none.
    """
    if key_layout.sharded or any(other.needs_all_ranks for other in options.others):
        return mesh
    return mesh.single_rank()


def _kinds(layout: SequenceLayout) -> str:
    """Return the kind of each segment: ``r`` replicated, ``b`` balanced, or the number of tokens that stay
    together.

    >>> segments = Segment("text", 3, replicated=True), Segment("video", 10, together=5)
    >>> _kinds(SequenceLayout(segments, ranks=2))
    'r,5'
    """
    return ",".join([_kind(segment) for segment in layout.segments])


def _kind(segment: Segment) -> str:
    # Whether a replicated segment has ``together`` changes nothing in what ranks hold, so it is left out.
    if segment.replicated:
        return "r"
    if segment.balanced:
        return "b"
    return str(segment.together)


def _read_layout(totals: Sequence[int], kinds: Sequence[str], ranks: int) -> SequenceLayout:
    """Return the layout whose segments have these lengths and :func:`_kinds`.

    >>> segments = Segment("", 3, replicated=True), Segment("", 10, together=5), Segment("", 7, balanced=True)
    >>> layout = SequenceLayout(segments, ranks=2)
    >>> _read_layout([3, 10, 7], _kinds(layout).split(","), 2) == layout
    True
    """
    segments = [_read_segment(total, kind) for total, kind in zip(totals, kinds, strict=True)]
    return SequenceLayout(tuple(segments), ranks)


def _read_segment(total: int, kind: str) -> Segment:
    """Return the segment of ``total`` tokens whose :func:`_kind` is ``kind``. Its name is not known."""
    together = 1
    if kind.isdecimal():
        together = int(kind)
    return Segment("", total, replicated=kind == "r", balanced=kind == "b", together=together)
