"""Which block of keys and values is on which ring rank at each step of ring attention, and where it travels next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from para_core.attention.hooks import WireFormat, wire_format
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling, join_neighbours, own_runs, sharded_runs
from para_core.distributed.layout import Run
from para_core.distributed.lazy import lazy
from para_core.distributed.mesh import MeshDim


class Hop(NamedTuple):
    """How the block of the ring rank ``step`` before this one, ``source``, gets here.

    With a block mask blocks go only to the ranks that see any of them: then this rank ``sends`` its own to the rank ``step``
    after it, or does not, and ``receives`` that of ``source``, or does not.
    """

    step: int
    source: int
    sends: bool = True
    receives: bool = True


OWN = Hop(0, 0)  # In place of a hop: the block that is here at first.


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The blocks of a ring, their hops, and the tiles of this rank's queries by each of them."""

    spec: AttentionSpec

    @lazy
    def dim(self) -> MeshDim:
        """The mesh dim along which blocks travel."""
        return self.spec.mesh.ring

    @lazy
    def wire(self) -> WireFormat | None:
        """The form in which keys and values travel; None: as they are."""
        return wire_format(self.spec.options.comm_dtype)

    @lazy
    def block_sizes(self) -> tuple[int, ...]:
        """Keys that travel in the block of each ring rank."""
        layout, width = self.spec.key_layout, self.spec.mesh.ulysses.size
        return tuple(
            [
                sum([layout.sharded_size(rank) for rank in range(index * width, (index + 1) * width)])
                for index in range(self.spec.mesh.ring.size)
            ]
        )

    @property
    def rotates(self) -> bool:
        """Whether blocks of keys and values have to travel at all."""
        return self.spec.mesh.ring.size > 1 and bool(self.spec.key_layout.sharded)

    def source(self, step: int) -> int:
        """The ring rank whose block is here at ``step``."""
        return (self.spec.mesh.ring.index - step) % self.spec.mesh.ring.size

    @lazy
    def hops(self) -> list[Hop]:
        """One for each step in which a block moves."""
        spec, size, index = self.spec, self.spec.mesh.ring.size, self.spec.mesh.ring.index
        blocks = spec.options.block_mask
        steps = range(1, size if self.rotates else 1)
        if blocks is None:
            return [Hop(step, self.source(step)) for step in steps]
        layouts = (spec.query_layout, spec.key_layout, spec.mesh)
        sees = [
            [blocks.ring_sees(*layouts, rank, (rank - step) % size) for rank in range(size)] for step in range(size)
        ]
        return [
            Hop(step, self.source(step), sends=sees[step][(index + step) % size], receives=sees[step][index])
            for step in steps
            if any(sees[step])
        ]

    @lazy
    def has_replicated_keys(self) -> bool:
        """Whether a part of this rank's own block does not travel."""
        return bool(self.spec.key_layout.replicated)

    @lazy
    def travels(self) -> list[Run]:
        """The keys of this rank's own block that no other block holds, by their offset in it."""
        layout, mesh = self.spec.key_layout, self.spec.mesh
        if mesh.ulysses.size > 1:
            return [(0, self.block_sizes[mesh.ring.index])]
        sizes = [segment.size(mesh.rank, layout.ranks) for segment in layout.segments]
        runs = [(sum(sizes[:i]), size) for i, size in enumerate(sizes) if not layout.segments[i].replicated]
        return join_neighbours(runs) or [(0, 0)]

    @lazy
    def query_runs(self) -> list[Run]:
        """Positions of this block's queries, in the order in which the block holds them."""
        return own_runs(self.spec.query_layout, self.spec.mesh)

    def key_runs(self, step: int) -> list[Run]:
        """Positions of the keys of the block that is here at ``step``."""
        if step == 0:
            return own_runs(self.spec.key_layout, self.spec.mesh)
        return sharded_runs(self.spec.key_layout, self.spec.mesh, self.source(step))

    @lazy
    def tiling(self) -> Tiling:
        steps = self.spec.mesh.ring.size if self.rotates else 1
        runs = [self.key_runs(step) for step in range(steps)]
        return Tiling(self.query_runs, runs, is_causal=self.spec.is_causal, visible=self.spec.options.block_mask)
