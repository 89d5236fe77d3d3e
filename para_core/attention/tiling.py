"""What one ring call is about, and how it is cut into pieces that a backend computes: integers, but for taking parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from para_core.attention.approximate.block_mask import BlockMask
from para_core.attention.causal import Tile, coalesce, cut, visible_tiles
from para_core.layout import Run, SequenceLayout
from para_core.mesh import SequenceMesh

# How the blocks of other ranks get here: passed on from neighbour to neighbour, or all at once.
RotateMethod = Literal["alltoall", "allgather"]


@dataclass(frozen=True)
class RingCall:
    """What one ring call is about, tensors aside.

    ``query_layout`` and ``key_layout`` are of the whole sequence. A rank's block is what its Ulysses group holds.
    """

    query_layout: SequenceLayout
    key_layout: SequenceLayout
    mesh: SequenceMesh
    is_causal: bool
    scale: float | None
    blocks: BlockMask | None = None  # which are computed; all if None
    comm_dtype: torch.dtype | None = None  # of blocks that travel forward; None: as they are
    rotate_method: RotateMethod = "alltoall"  # of them

    def sees(self, ring_index: int, source: int) -> bool:
        """Whether a ring rank sees a key that travels in the block of another."""
        if self.blocks is None:
            return True
        return self.blocks.sees_any(
            own_runs(self.query_layout, self.mesh, ring_index), sharded_runs(self.key_layout, self.mesh, source)
        )

    def block_sizes(self) -> list[int]:
        """Keys that travel in the block of each ring rank."""
        layout, width = self.key_layout, self.mesh.ulysses.size
        return [
            sum([layout.sharded_size(rank) for rank in range(index * width, (index + 1) * width)])
            for index in range(self.mesh.ring.size)
        ]

    def query_runs(self) -> list[Run]:
        """Positions of this block's queries, in the order in which the block holds them."""
        return own_runs(self.query_layout, self.mesh)

    def key_runs(self, step: int) -> list[Run]:
        """Positions of the keys of the block that is here at ``step``."""
        if step == 0:
            return own_runs(self.key_layout, self.mesh)
        source = (self.mesh.ring.index - step) % self.mesh.ring.size
        return sharded_runs(self.key_layout, self.mesh, source)


def own_runs(layout: SequenceLayout, mesh: SequenceMesh, ring_index: int | None = None) -> list[Run]:
    """Positions of what the block of a ring rank (this one) holds: all of a Ulysses group's shards, then replicated tokens.

    One rank alone keeps its tokens in the order in which it got them.
    """
    ring_index = mesh.ring.index if ring_index is None else ring_index
    if mesh.ulysses.size == 1:
        return list(layout.runs(ring_index))
    return sharded_runs(layout, mesh, ring_index) + list(layout.runs(0, replicated=True))


def sharded_runs(layout: SequenceLayout, mesh: SequenceMesh, ring_index: int) -> list[Run]:
    first = ring_index * mesh.ulysses.size
    return [run for rank in range(first, first + mesh.ulysses.size) for run in layout.runs(rank, replicated=False)]


class Order:
    """The tokens of a block: as it holds them, or, for a causal mask, by ascending position."""

    def __init__(self, runs: Sequence[Run], *, ascending: bool) -> None:
        self._lengths = [length for _, length in runs]
        self._order = list(range(len(runs)))
        if ascending:
            self._order.sort(key=lambda index: runs[index])
        self._as_held = self._order == list(range(len(runs)))
        self.positions = coalesce(runs) if ascending else list(runs)

    def arrange(self, x: Tensor) -> Tensor:
        """``x`` along dim 2, from the order in which the block holds it to this one."""
        if self._as_held:
            return x
        parts = x.split(self._lengths, dim=2)
        return torch.cat([parts[index] for index in self._order], dim=2)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        if self._as_held:
            return x
        parts = x.split([self._lengths[index] for index in self._order], dim=2)
        place = {index: place for place, index in enumerate(self._order)}
        return torch.cat([parts[place[index]] for index in range(len(parts))], dim=2)


class Tiling:
    """How a call is cut into attention without a mask of positions, or with SDPA's own: pieces of queries, tiles of keys."""

    def __init__(self, call: RingCall) -> None:
        self._call, self._blocks = call, call.blocks
        self._by_position = call.is_causal or self._blocks is not None
        self.queries = Order(call.query_runs(), ascending=self._by_position)
        if self._by_position:
            edges = [] if self._blocks is None else self._blocks.alike(is_causal=call.is_causal)
            if call.is_causal:
                edges += [run for step in range(call.mesh.ring.size) for run in coalesce(call.key_runs(step))]
            self._pieces = cut(self.queries.positions, edges) or [(0, 0)]
            self.lengths = [length for _, length in self._pieces]
        else:
            self.lengths = [sum([length for _, length in self.queries.positions])]

    def keys(self, step: int) -> Order:
        """The block of keys that is here at ``step``."""
        return Order(self._call.key_runs(step), ascending=self._by_position)

    def tiles(self, piece: int, keys: Order) -> list[Tile]:
        """What a piece of the queries sees of a block."""
        if self._by_position:
            queries = self._pieces[piece]
            if not queries[1]:
                return []
            seen = None if self._blocks is None else self._blocks.keys_of(queries[0])
            return visible_tiles(queries, keys.positions, is_causal=self._call.is_causal, seen=seen)
        return [Tile(((0, sum([length for _, length in keys.positions])),), diagonal=False)]

    def split(self, x: Tensor) -> list[Tensor]:
        """``x``, whose dim 2 is that of the block's queries, or 1, for each piece."""
        if x.shape[2] == 1 and self.lengths != [1]:
            return [x] * len(self.lengths)
        return list(self.queries.arrange(x).split(self.lengths, dim=2))
