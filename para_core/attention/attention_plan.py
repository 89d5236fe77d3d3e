"""The plan of one attention call: which algorithms it needs, and which tokens each rank sends to which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from para_core.attention.grid_shape import choose_grid
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling
from para_core.attention.ulysses import Heads, UlyssesPlan
from para_core.dataclass_json import to_json
from para_core.distributed.cached_property import cached_property
from para_core.distributed.mesh import MeshDim
from para_core.layout.runs import join_neighbours
from para_core.layout.sequence import Run


class Hop(NamedTuple):
    """One step of the ring, in which this rank gets the keys and values (the block) of ring rank ``source``.

    ``source`` is ``step`` positions before this rank. With a block mask, blocks are only sent to ranks that
    see any of their keys: ``sends`` tells whether this rank sends its own block to the rank ``step``
    positions after it, and ``receives`` whether it receives the block of ``source``.
    """

    step: int
    source: int
    sends: bool = True
    receives: bool = True


# In this first step a rank computes with its own block and receives nothing.
OWN = Hop(0, 0)


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The plan of ring attention: which keys and values (a *block*) each rank sends and computes with at each step."""

    spec: AttentionSpec

    @cached_property
    def dim(self) -> MeshDim:
        """The mesh dim along which blocks are sent."""
        return self.spec.mesh.ring

    @cached_property
    def block_sizes(self) -> list[int]:
        """The number of keys that each ring rank sends: the sharded tokens of its Ulysses group."""
        return self.spec.keys.sizes(replicated=False)

    @property
    def rotates(self) -> bool:
        """Whether any block of keys and values has to be sent."""
        return self.spec.mesh.ring.size > 1 and bool(self.spec.key_layout.sharded)

    def source(self, step: int) -> int:
        """Return the index of the ring rank whose block this rank has at ``step``."""
        return (self.spec.mesh.ring.index - step) % self.spec.mesh.ring.size

    @cached_property
    def hops(self) -> list[Hop]:
        """The steps of the ring in which any rank sends a block, without the first step, :data:`OWN`."""
        spec, size, index = self.spec, self.spec.mesh.ring.size, self.spec.mesh.ring.index
        blocks = spec.options.block_mask
        steps = range(1, size)
        if not self.rotates:
            steps = range(0)
        if blocks is None:
            return [Hop(step, self.source(step)) for step in steps]
        queries = [spec.queries.runs(rank) for rank in range(size)]
        keys = [spec.keys.runs(rank, replicated=False) for rank in range(size)]
        sees = [
            [blocks.sees_any(queries[rank], keys[(rank - step) % size]) for rank in range(size)]
            for step in range(size)
        ]
        return [
            Hop(step, self.source(step), sends=sees[step][(index + step) % size], receives=sees[step][index])
            for step in steps
            if any(sees[step])
        ]

    @cached_property
    def has_replicated_keys(self) -> bool:
        """Whether this rank's block contains replicated keys, which are not sent."""
        return bool(self.spec.key_layout.replicated)

    @cached_property
    def travels(self) -> list[Run]:
        """The sharded keys of this rank's block, which are sent, as runs ``(offset in the block, length)``."""
        return join_neighbours(self.spec.keys.offsets(self.dim.index, replicated=False)) or [(0, 0)]

    @cached_property
    def query_runs(self) -> list[Run]:
        """The positions of this rank's queries, as runs ``(start, length)`` in the order of the query tensor."""
        return self.spec.queries.runs(self.dim.index)

    def key_runs(self, step: int) -> list[Run]:
        """Return the positions of the keys that this rank has at ``step``, as runs ``(start, length)``."""
        if step == 0:
            return self.spec.keys.runs(self.dim.index)
        return self.spec.keys.runs(self.source(step), replicated=False)

    @cached_property
    def tiling(self) -> Tiling:
        steps = 1
        if self.rotates:
            steps = self.spec.mesh.ring.size
        runs = [self.key_runs(step) for step in range(steps)]
        return Tiling(self.query_runs, runs, self.spec.positional_masks)


@dataclass(frozen=True, eq=False)
class GridPlan:
    """The plan of Attention2D for this rank, in a grid of ``shape`` ``(rows, columns)`` of ring ranks.

    Ring rank i is in row i // columns and column i % columns. This rank computes attention of the queries of
    its row to the sharded keys of its column, and of its own queries to replicated keys.
    """

    ring: RingPlan
    shape: tuple[int, int]

    @cached_property
    def row(self) -> list[int]:
        """The ring indices of the other ranks in this rank's row."""
        index, columns = self.ring.dim.index, self.shape[1]
        first = index - index % columns
        return [rank for rank in range(first, first + columns) if rank != index]

    @cached_property
    def column(self) -> list[int]:
        """The ring indices of the other ranks in this rank's column."""
        index, columns = self.ring.dim.index, self.shape[1]
        return [rank for rank in range(index % columns, self.ring.dim.size, columns) if rank != index]

    @cached_property
    def row_runs(self) -> list[Run]:
        """The positions of the queries of the row's other ranks, rank by rank, as runs ``(start, length)``."""
        return self.ring.spec.queries.only(*self.row).runs()

    @cached_property
    def column_runs(self) -> list[Run]:
        """The positions of the sharded keys of the column's other ranks, rank by rank, as runs ``(start, length)``."""
        return self.ring.spec.keys.only(*self.column, replicated=False).runs()

    @cached_property
    def row_sizes(self) -> list[int]:
        return [self.ring.spec.queries.size(rank) for rank in self.row]

    @cached_property
    def column_sizes(self) -> list[int]:
        return [self.ring.spec.keys.size(rank, replicated=False) for rank in self.column]

    @cached_property
    def own_tiling(self) -> Tiling:
        """The keys that this rank's queries see: at step 0 its own, at step 1 those of its column's other ranks."""
        return self._tiling(self.ring.query_runs, self.ring.key_runs(0))

    @cached_property
    def row_tiling(self) -> Tiling:
        """The keys that the queries of the row's other ranks see: this rank's, then those of the rest of its column."""
        return self._tiling(self.row_runs, self.ring.spec.keys.runs(self.ring.dim.index, replicated=False))

    def _tiling(self, queries: Sequence[Run], own_keys: Sequence[Run]) -> Tiling:
        return Tiling(queries, [own_keys, self.column_runs], self.ring.spec.positional_masks)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The communication plan of one attention call.
    Each algorithm's part is computed from ``spec`` when it is used.
    """

    spec: AttentionSpec

    @cached_property
    def with_gradients(self) -> AttentionPlan:
        """The plan to use if the call requires a gradient: this plan without rounding to 8 bits."""
        options = self.spec.options.with_gradients
        if options is self.spec.options:
            return self
        return AttentionPlan(replace(self.spec, options=options, options_text=to_json(options)))

    @cached_property
    def heads(self) -> Heads:
        return Heads(self.spec.num_heads, self.spec.num_kv_heads, self.spec.mesh.ulysses.size)

    @cached_property
    def ulysses(self) -> UlyssesPlan | None:
        """The plan of the Ulysses exchange; None if there is only one Ulysses rank, so that no exchange is needed."""
        if self.spec.mesh.ulysses.size == 1:
            return None
        return UlyssesPlan(self.spec, self.heads, ordered=self.spec.orders_queries)

    @cached_property
    def ordered_ulysses(self) -> UlyssesPlan | None:
        """Like :attr:`ulysses`, but with queries in the order of the sequence in every call."""
        if self.ulysses is None or self.spec.orders_queries:
            return self.ulysses
        return UlyssesPlan(self.spec, self.heads, ordered=True)

    @cached_property
    def ring(self) -> RingPlan:
        return RingPlan(self.spec)

    @cached_property
    def grid(self) -> GridPlan | None:
        """The plan of Attention2D; None if it is not chosen, no keys have to be sent, or an option selects keys."""
        spec, options = self.spec, self.spec.options
        if options.rotate_method != "2d" or options.by_position or not self.ring.rotates:
            return None
        return GridPlan(self.ring, choose_grid(spec.mesh.ring.size, spec.num_heads, spec.num_kv_heads))

    @cached_property
    def tiling(self) -> Tiling:
        """The pieces of this rank's queries, and the tiles of each block of keys that they see."""
        if self.grid is None:
            return self.ring.tiling
        return self.grid.own_tiling

    @cached_property
    def is_local(self) -> bool:
        """Whether plain SDPA can compute attention after the Ulysses exchange.

        It can if there is only one ring rank (all keys are then on this rank) and no option selects keys. In
        a causal call, queries and keys must also be the same tokens, consecutive and in the order of the
        sequence.
        """
        if self.spec.options.by_position or self.spec.mesh.ring.size > 1:
            return False
        if not self.spec.is_causal:
            return True
        queries, keys = join_neighbours(self.ring.query_runs), join_neighbours(self.ring.key_runs(0))
        return queries == keys and len(queries) <= 1


def read_plan(text: str, numbers: Sequence[int], scale: float | None) -> AttentionPlan:
    """Return the plan of the call whose spec ``text`` and ``numbers`` encode; see :meth:`AttentionSpec.read`."""
    return AttentionPlan(AttentionSpec.read(text, numbers, scale))


# read_plan with a cache, for operators at run time: a graph needs the same plan in every step. While tracing,
# lengths may be symbolic, so they cannot be keys of the cache.
cached_plan = lru_cache(maxsize=256)(read_plan)
