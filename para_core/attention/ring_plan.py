"""The plan of ring attention: which ring rank's keys and values each rank has at each step, and which hops it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling, join_neighbours, own_runs, sharded_runs
from para_core.distributed.cached_property import cached_property
from para_core.distributed.layout import Run
from para_core.distributed.mesh import MeshDim


class Hop(NamedTuple):
    """One step of the ring, in which this rank gets the keys and values (the block) of ring rank ``source``.

    ``source`` is ``step`` positions before this rank. With a block mask, blocks are only sent to ranks that see any of
    their keys: ``sends`` tells whether this rank sends its own block to the rank ``step`` positions after it, and
    ``receives`` whether it receives the block of ``source``.
    """

    step: int
    source: int
    sends: bool = True
    receives: bool = True


# In this first step a rank computes with its own block and receives nothing.
OWN = Hop(0, 0)


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The plan of ring attention for one call: which keys and values each rank sends and computes with at each step.

    A *block* is the keys and values of one ring rank after the Ulysses exchange.
    """

    spec: AttentionSpec

    @cached_property
    def dim(self) -> MeshDim:
        """The mesh dim along which blocks are sent."""
        return self.spec.mesh.ring

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """The number of keys that each ring rank sends: the sharded tokens of its Ulysses group."""
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
        """Return the index of the ring rank whose block this rank has at ``step``."""
        return (self.spec.mesh.ring.index - step) % self.spec.mesh.ring.size

    @cached_property
    def hops(self) -> list[Hop]:
        """The steps of the ring in which any rank sends a block, without the first step, :data:`OWN`."""
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
        """The sharded keys of this rank's block, which are sent, as runs ``(offset in the block, length)``."""
        layout, mesh = self.spec.key_layout, self.spec.mesh
        if mesh.ulysses.size > 1:
            return [(0, self.block_sizes[mesh.ring.index])]
        sizes = [segment.size(mesh.rank, layout.ranks) for segment in layout.segments]
        runs = [(sum(sizes[:i]), size) for i, size in enumerate(sizes) if not layout.segments[i].replicated]
        return join_neighbours(runs) or [(0, 0)]

    @cached_property
    def query_runs(self) -> list[Run]:
        """The positions of this rank's queries, as runs ``(start, length)`` in the order of the query tensor."""
        return own_runs(self.spec.query_layout, self.spec.mesh)

    def key_runs(self, step: int) -> list[Run]:
        """Return the positions of the keys that this rank has at ``step``, as runs ``(start, length)``."""
        if step == 0:
            return own_runs(self.spec.key_layout, self.spec.mesh)
        return sharded_runs(self.spec.key_layout, self.spec.mesh, self.source(step))

    @cached_property
    def tiling(self) -> Tiling:
        steps = self.spec.mesh.ring.size if self.rotates else 1
        runs = [self.key_runs(step) for step in range(steps)]
        return Tiling(self.query_runs, runs, is_causal=self.spec.is_causal, visible=self.spec.options.block_mask)
