"""One attention call over a mesh, tensors aside: a value, everything that follows from it, and its text form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from para_core.attention.grid import Grid, choose_grid
from para_core.attention.options import AttnOptions
from para_core.attention.tiles import Tiling, join_neighbours, own_runs, sharded_runs
from para_core.attention.ulysses import Exchange, Heads
from para_core.distributed.layout import Run, Segment, SequenceLayout
from para_core.distributed.lazy import lazy
from para_core.distributed.mesh import SequenceMesh, read_mesh


class Hop(NamedTuple):
    """How the block of the ring rank ``step`` before this one, ``source``, gets here.

    With a block mask blocks go only to the ranks that see any of them: then this rank ``sends`` its own to the rank ``step``
    after it, or does not, and ``receives`` that of ``source``, or does not.
    """

    step: int
    source: int
    sends: bool = True
    receives: bool = True


OWN = Hop(0, 0)  # in place of one: the block that is here at first


@dataclass(frozen=True, eq=False)
class Call:
    """What is computed, and by whom. What follows from it (who sends what to whom, tiles of a causal mask) is found once.

    Args:
        key_layout: ``query_layout`` itself, not an equal one, where keys are sharded like queries: they then travel in one
            table.
        num_heads, num_kv_heads: of all ranks; the latter divides the former.
    """

    query_layout: SequenceLayout
    key_layout: SequenceLayout
    mesh: SequenceMesh
    num_heads: int
    num_kv_heads: int
    is_causal: bool = False
    scale: float | None = None
    options: AttnOptions = field(default_factory=AttnOptions)
    options_text: str = ""  # made before a graph is traced, which takes numbers for variables

    @lazy
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.mesh.ulysses.size)

    @lazy
    def with_gradients(self) -> Call:
        """This call where a gradient is kept: without what rounds on the way or in a product."""
        options = self.options.with_gradients
        return self if options is self.options else replace(self, options=options, options_text=options.as_text())

    # -- Ulysses

    @lazy
    def exchange(self) -> Exchange | None:
        """None without other Ulysses ranks: a block is then what a rank holds, as it holds it."""
        if self.mesh.ulysses.size == 1:
            return None
        return self._exchange_of(self.heads)

    @lazy
    def chunks(self) -> list[Exchange]:
        """The exchange in parts, each of some of the heads."""
        return [self._exchange_of(heads) for heads in self.heads.cut(self.options.ulysses_chunks)]

    def _exchange_of(self, heads: Heads) -> Exchange:
        layouts = self.query_layout, self.key_layout
        return Exchange(*layouts, self.mesh, heads, comm_dtype=self.options.comm_dtype)

    # -- ring

    @lazy
    def block_sizes(self) -> tuple[int, ...]:
        """Keys that travel in the block of each ring rank."""
        layout, width = self.key_layout, self.mesh.ulysses.size
        return tuple(
            [
                sum([layout.sharded_size(rank) for rank in range(index * width, (index + 1) * width)])
                for index in range(self.mesh.ring.size)
            ]
        )

    @property
    def rotates(self) -> bool:
        """Whether blocks of keys and values have to travel at all."""
        return self.mesh.ring.size > 1 and bool(self.key_layout.sharded)

    def source(self, step: int) -> int:
        """The ring rank whose block is here at ``step``."""
        return (self.mesh.ring.index - step) % self.mesh.ring.size

    @lazy
    def hops(self) -> list[Hop]:
        """One for each step in which a block moves."""
        size, index, blocks = self.mesh.ring.size, self.mesh.ring.index, self.options.block_mask
        steps = range(1, size if self.rotates else 1)
        if blocks is None:
            return [Hop(step, self.source(step)) for step in steps]
        layouts = (self.query_layout, self.key_layout, self.mesh)
        sees = [
            [blocks.ring_sees(*layouts, rank, (rank - step) % size) for rank in range(size)] for step in range(size)
        ]
        return [
            Hop(step, self.source(step), sends=sees[step][(index + step) % size], receives=sees[step][index])
            for step in steps
            if any(sees[step])
        ]

    @lazy
    def grid(self) -> Grid | None:
        """Rows and columns of the ring's ranks, where ``rotate_method="2d"``; None: blocks go round, or straight."""
        options = self.options
        if options.rotate_method != "2d" or options.by_position or not self.rotates:
            return None
        shape = choose_grid(self.mesh.ring.size, self.num_heads, self.num_kv_heads)
        return Grid(self.query_layout, self.key_layout, self.mesh, shape, self.is_causal)

    @lazy
    def has_replicated_keys(self) -> bool:
        """Whether a part of this rank's own block does not travel."""
        return bool(self.key_layout.replicated)

    @lazy
    def travels(self) -> list[Run]:
        """The keys of this rank's own block that no other block holds, by their offset in it."""
        if self.mesh.ulysses.size > 1:
            return [(0, self.block_sizes[self.mesh.ring.index])]
        segments = self.key_layout.segments
        sizes = [segment.size(self.mesh.rank, self.key_layout.ranks) for segment in segments]
        runs = [(sum(sizes[:i]), size) for i, size in enumerate(sizes) if not segments[i].replicated]
        return join_neighbours(runs) or [(0, 0)]

    @lazy
    def query_runs(self) -> list[Run]:
        """Positions of this block's queries, in the order in which the block holds them."""
        return own_runs(self.query_layout, self.mesh)

    def key_runs(self, step: int) -> list[Run]:
        """Positions of the keys of the block that is here at ``step``."""
        if step == 0:
            return own_runs(self.key_layout, self.mesh)
        return sharded_runs(self.key_layout, self.mesh, self.source(step))

    @lazy
    def tiling(self) -> Tiling:
        steps = self.mesh.ring.size if self.rotates else 1
        runs = [self.key_runs(step) for step in range(steps)]
        return Tiling(self.query_runs, runs, is_causal=self.is_causal, visible=self.options.block_mask)

    @lazy
    def is_local(self) -> bool:
        """Whether SDPA itself computes a block: all keys are here, and in the order of the queries if that matters."""
        if self.options.by_position or self.mesh.ring.size > 1:
            return False
        if not self.is_causal:
            return True
        queries, keys = join_neighbours(self.query_runs), join_neighbours(self.key_runs(0))
        return queries == keys and len(queries) <= 1

    # -- as text, for a graph

    def as_text(self) -> str:
        """All but lengths, heads and scale, which may be symbolic; equal texts and numbers are equal calls."""
        key_kinds = "=" if self.key_layout is self.query_layout else _kinds(self.key_layout)
        causal = "causal" if self.is_causal else "full"
        return "\n\n".join([self.mesh.text, causal, _kinds(self.query_layout), key_kinds, self.options_text])

    @property
    def numbers(self) -> list[int]:
        """Heads, and the lengths of the segments of queries and, where they are not the same, of keys."""
        layouts = [self.query_layout, *([] if self.key_layout is self.query_layout else [self.key_layout])]
        return [self.num_heads, self.num_kv_heads, *[one.total for layout in layouts for one in layout.segments]]


_KINDS = {"s": (False, False), "r": (True, False), "b": (False, True)}  # replicated, balanced


def _kinds(layout: SequenceLayout) -> str:
    return "".join(["r" if one.replicated else "b" if one.balanced else "s" for one in layout.segments])


def make_call(
    query_layout: SequenceLayout,
    key_layout: SequenceLayout,
    mesh: SequenceMesh,
    *,
    num_heads: int,
    num_kv_heads: int,
    is_causal: bool,
    scale: float | None,
    options: AttnOptions,
    options_text: str,
) -> Call:
    """The call of these; alone on each rank where all keys are replicated."""
    if not key_layout.sharded and options.kept_keys is None:
        # Every rank holds all keys: nothing has to move, each is a block of its own. (Votes come from all queries.)
        mesh = mesh.alone()
    return Call(query_layout, key_layout, mesh, num_heads, num_kv_heads, is_causal, scale, options, options_text)


def read_call(text: str, numbers: Sequence[int], scale: float | None) -> Call:
    """The inverse of :meth:`Call.as_text` and :attr:`Call.numbers`."""
    mesh_text, causal, query_kinds, key_kinds, options = text.split("\n\n")
    mesh, ranks = read_mesh(mesh_text)
    num_heads, num_kv_heads, *totals = numbers
    query_layout = _layout(totals[: len(query_kinds)], query_kinds, ranks)
    key_layout = query_layout if key_kinds == "=" else _layout(totals[len(query_kinds) :], key_kinds, ranks)
    return Call(
        query_layout,
        key_layout,
        mesh,
        num_heads,
        num_kv_heads,
        causal == "causal",
        scale,
        AttnOptions.read(options),
        options,
    )


# Of plain integers: what a graph asks for in every step is read once.
known_call = lru_cache(maxsize=256)(read_call)


def _layout(totals: Sequence[int], kinds: str, ranks: int) -> SequenceLayout:
    return SequenceLayout(
        tuple([Segment("", total, *_KINDS[kind]) for total, kind in zip(totals, kinds, strict=True)]), ranks
    )
