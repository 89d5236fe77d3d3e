"""The plan of ring attention: which block of keys and values is on which ring rank at each step, and where it is sent
next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from para_core.attention.hooks import WireFormat, wire_format
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling, join_neighbours, own_runs, sharded_runs
from para_core.distributed.cached_property import cached_property
from para_core.distributed.layout import Run
from para_core.distributed.mesh import MeshDim


class Hop(NamedTuple):
    """The step in which this rank gets the block of ``source``, the ring rank ``step`` positions before it.

    With a block mask, blocks are sent only to ranks that see any of them: ``sends`` says whether this rank sends its
    own block to the rank ``step`` positions after it, and ``receives`` whether it receives that of ``source``.
    """

    step: int
    source: int
    sends: bool = True
    receives: bool = True


OWN = Hop(0, 0)  # Stands for the step of the rank's own block.


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The blocks of a ring, their hops, and the tiling of this rank's queries and each block."""

    spec: AttentionSpec

    @cached_property
    def dim(self) -> MeshDim:
        """The mesh dim along which blocks are sent."""
        return self.spec.mesh.ring

    @cached_property
    def wire(self) -> WireFormat | None:
        """The format in which keys and values are sent; None to send them unchanged."""
        return wire_format(self.spec.options.comm_dtype)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Number of sharded keys, which are sent, in the block of each ring rank."""
        layout, width = self.spec.key_layout, self.spec.mesh.ulysses.size
        return tuple(
            [
                sum([layout.sharded_size(rank) for rank in range(index * width, (index + 1) * width)])
                for index in range(self.spec.mesh.ring.size)
            ]
        )

    @property
    def rotates(self) -> bool:
        """Whether any block of keys and values has to be sent."""
        return self.spec.mesh.ring.size > 1 and bool(self.spec.key_layout.sharded)

    def source(self, step: int) -> int:
        """Return the ring rank whose block this rank has at ``step``."""
        return (self.spec.mesh.ring.index - step) % self.spec.mesh.ring.size

    @cached_property
    def hops(self) -> list[Hop]:
        """The hops of the ring: one per step in which any rank sends a block."""
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

    @cached_property
    def has_replicated_keys(self) -> bool:
        """Whether this rank's block contains replicated keys, which are not sent."""
        return bool(self.spec.key_layout.replicated)

    @cached_property
    def travels(self) -> list[Run]:
        """The sharded keys of this rank's block, which are sent, as offsets in the block."""
        layout, mesh = self.spec.key_layout, self.spec.mesh
        if mesh.ulysses.size > 1:
            return [(0, self.block_sizes[mesh.ring.index])]
        sizes = [segment.size(mesh.rank, layout.ranks) for segment in layout.segments]
        runs = [(sum(sizes[:i]), size) for i, size in enumerate(sizes) if not layout.segments[i].replicated]
        return join_neighbours(runs) or [(0, 0)]

    @cached_property
    def query_runs(self) -> list[Run]:
        """Positions of this block's queries, in the order of the block."""
        return own_runs(self.spec.query_layout, self.spec.mesh)

    def key_runs(self, step: int) -> list[Run]:
        """Return the positions of the keys of the block that this rank has at ``step``."""
        if step == 0:
            return own_runs(self.spec.key_layout, self.spec.mesh)
        return sharded_runs(self.spec.key_layout, self.spec.mesh, self.source(step))

    @cached_property
    def tiling(self) -> Tiling:
        steps = self.spec.mesh.ring.size if self.rotates else 1
        runs = [self.key_runs(step) for step in range(steps)]
        return Tiling(self.query_runs, runs, is_causal=self.spec.is_causal, visible=self.spec.options.block_mask)
