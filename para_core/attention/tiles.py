"""How one call is split into attention that needs no mask of positions: pieces of queries, tiles of keys.

Tokens are named by their position in the whole sequence, whatever rank holds them: query i sees keys 0 … i. So every
layout needs no mask tensor: blocks above the diagonal disappear, blocks below it are plain, and what lies on it is
SDPA's own ``is_causal``. A block mask likewise: a rectangle is then some runs of keys. Integers, but for taking parts of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from para_core.distributed.layout import Run, SequenceLayout
from para_core.distributed.lazy import lazy
from para_core.distributed.mesh import SequenceMesh


class VisibleBlocks(Protocol):
    """Which blocks of queries see which blocks of keys."""

    def alike(self, *, is_causal: bool) -> list[Run]:
        """Runs of queries that see the same keys."""

    def keys_of(self, query: int) -> list[Run]:
        """Positions of the keys that the query at this position sees."""


# -- what a rank's block holds


def own_runs(layout: SequenceLayout, mesh: SequenceMesh, ring_index: int | None = None) -> list[Run]:
    """Positions of what the block of a ring rank (this one) holds: all of a Ulysses group's shards, then replicated tokens.

    One rank alone keeps its tokens in the order in which it got them.
    """
    ring_index = mesh.ring.index if ring_index is None else ring_index
    if mesh.ulysses.size == 1:
        return list(layout.runs(ring_index))
    return sharded_runs(layout, mesh, ring_index) + list(layout.runs(0, replicated=True))


def sharded_runs(layout: SequenceLayout, mesh: SequenceMesh, ring_index: int) -> list[Run]:
    """Positions of what only the ranks of one Ulysses group hold: the part of its block that travels."""
    first = ring_index * mesh.ulysses.size
    return [run for rank in range(first, first + mesh.ulysses.size) for run in layout.runs(rank, replicated=False)]


# -- arithmetic of runs


@dataclass(frozen=True)
class Tile:
    """Keys that a run of queries sees.

    Args:
        runs: of them, by their offset in the block, ascending and not empty.
        positions: of the same keys, in the whole sequence.
        diagonal: one run, as long as the queries, at their positions: query i of the run sees keys 0 … i of the tile.
    """

    runs: tuple[Run, ...]
    positions: tuple[Run, ...]
    diagonal: bool


def coalesce(runs: Sequence[Run]) -> list[Run]:
    """``runs`` in ascending order, without the empty ones, neighbours joined.

    >>> coalesce([(4, 2), (0, 3), (3, 1), (9, 0)])
    [(0, 6)]
    """
    return join_neighbours(sorted(runs))


def join_neighbours(runs: Sequence[Run]) -> list[Run]:
    """``runs`` in their order, without the empty ones, joined where one begins at the other's end.

    >>> join_neighbours([(4, 2), (6, 1), (0, 3), (3, 0)])
    [(4, 3), (0, 3)]
    """
    joined: list[Run] = []
    for start, length in runs:
        if length == 0:
            continue
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def cut(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """``runs`` (ascending), split where a run of ``others`` starts or ends.

    >>> cut([(0, 10)], [(2, 3), (5, 20)])
    [(0, 2), (2, 3), (5, 5)]
    """
    edges = sorted({edge for start, length in others for edge in (start, start + length)})
    pieces = []
    for start, length in runs:
        inner = [edge for edge in edges if start < edge < start + length]
        ends = [*inner, start + length]
        pieces += [(a, b - a) for a, b in zip([start, *inner], ends, strict=True)]
    return pieces


def visible_tiles(queries: Run, keys: Sequence[Run], *, is_causal: bool, shown: Sequence[Run] | None) -> list[Tile]:
    """What a run of queries sees of a block of keys.

    Args:
        queries: not empty; split, if ``is_causal``, by ``keys`` and by the runs of ``shown``: each holds all of its positions or none.
        keys: ascending; the block holds them one after the other.
        shown: positions of keys that a block mask shows these queries, ascending; all if None.

    >>> visible_tiles((4, 2), [(0, 2), (4, 6)], is_causal=True, shown=None)
    [Tile(runs=((0, 2),), positions=((0, 2),), diagonal=False), Tile(runs=((2, 2),), positions=((4, 2),), diagonal=True)]
    >>> visible_tiles((4, 2), [(0, 2), (4, 6)], is_causal=False, shown=[(0, 1), (5, 3)])
    [Tile(runs=((0, 1), (3, 3)), positions=((0, 1), (5, 3)), diagonal=False)]
    """
    visible = [keys]
    if is_causal:
        visible = [intersect(keys, [(0, queries[0])]), intersect(keys, [queries])]
    tiles = []
    for there, diagonal in zip(visible, (False, True), strict=False):
        positions = there if shown is None else intersect(there, shown)
        if positions:
            tiles.append(Tile(tuple(offsets(positions, keys)), tuple(positions), diagonal))
    return tiles


def intersect(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """What two ascending lists of runs have in common, ascending, without empty runs.

    >>> intersect([(0, 4), (6, 4)], [(2, 5), (8, 9)])
    [(2, 2), (6, 1), (8, 2)]
    """
    common, index = [], 0
    for start, length in runs:
        while index < len(others) and sum(others[index]) <= start:
            index += 1
        for other_start, other_length in others[index:]:
            if other_start >= start + length:
                break
            first, last = max(start, other_start), min(start + length, other_start + other_length)
            if first < last:
                common.append((first, last - first))
    return common


def offsets(runs: Sequence[Run], block: Sequence[Run]) -> list[Run]:
    """Where a block that holds the positions ``block``, ascending, holds ``runs``; neighbours joined.

    >>> offsets([(4, 1), (7, 2)], [(0, 2), (4, 6)])
    [(2, 1), (5, 2)]
    """
    positions, before = [], 0
    for start, length in block:
        positions += [(before + first - start, number) for first, number in intersect([(start, length)], runs)]
        before += length
    return join_neighbours(positions)


def take(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """The parts of ``x`` at ``runs`` of a dim, one behind the other."""
    if len(runs) == 1:
        start, length = runs[0]
        return x if length == x.size(dim) else x.narrow(dim, start, length)
    return torch.cat([x.narrow(dim, 0, 0), *[x.narrow(dim, *run) for run in runs]], dim=dim)


def put(total: Tensor, dim: int, runs: Sequence[Run], x: Tensor, heads: Tensor | None = None) -> None:
    """Add ``x`` to where :func:`take` takes it from, ``[B, H, …]``: a head of it to each of ``heads``, or summed as it broadcasts."""
    for run, part in zip(runs, x.split([length for _, length in runs], dim=dim), strict=True):
        where = total.narrow(dim, *run)
        if heads is None:
            where.add_(part.sum_to_size(where.shape))
        else:
            where.index_add_(1, heads, part.to(total.dtype))


# -- one call


class TokenOrder:
    """The tokens of a block: as it holds them, or, where positions matter, by ascending position."""

    def __init__(self, runs: Sequence[Run], *, ascending: bool) -> None:
        self._order = sorted(range(len(runs)), key=runs.__getitem__) if ascending else list(range(len(runs)))
        self._lengths = [length for _, length in runs]
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
        return torch.cat([parts[self._order.index(index)] for index in range(len(parts))], dim=2)


class Tiling:
    """How the attention of one block of queries to every ring block of keys is split.

    Args:
        query_runs: positions of the block's queries, in its own order.
        key_runs: of the keys of the ring block that is here at each step, its own first.
        visible: which blocks are seen; all if None.
    """

    def __init__(
        self,
        query_runs: Sequence[Run],
        key_runs: Sequence[Sequence[Run]],
        *,
        is_causal: bool,
        visible: VisibleBlocks | None,
    ) -> None:
        self._query_runs, self._key_runs = query_runs, key_runs
        self._is_causal, self._visible = is_causal, visible
        self.by_position = is_causal or visible is not None
        self._tiles: dict[int, list[tuple[int, Tile]]] = {}

    @lazy
    def queries(self) -> TokenOrder:
        return TokenOrder(self._query_runs, ascending=self.by_position)

    @lazy
    def pieces(self) -> list[Run]:
        """The queries, split so that each piece has the same tiles in every block."""
        if not self.by_position:
            return [(0, sum([length for _, length in self._query_runs]))]
        edges = [] if self._visible is None else self._visible.alike(is_causal=self._is_causal)
        if self._is_causal:
            edges = edges + [run for runs in self._key_runs for run in coalesce(runs)]
        return cut(self.queries.positions, edges) or [(0, 0)]

    @lazy
    def keys(self) -> list[TokenOrder]:
        """Of each step."""
        return [TokenOrder(runs, ascending=self.by_position) for runs in self._key_runs]

    def tiles(self, step: int) -> list[tuple[int, Tile]]:
        """What the pieces of the queries, by number, see of the block that is here at ``step``."""
        if step not in self._tiles:
            keys = self.keys[step]
            self._tiles[step] = [
                (number, tile) for number, piece in enumerate(self.pieces) for tile in self._tiles_of(piece, keys)
            ]
        return self._tiles[step]

    def _tiles_of(self, queries: Run, keys: TokenOrder) -> list[Tile]:
        if not self.by_position:
            runs = ((0, sum([length for _, length in keys.positions])),)
            return [Tile(runs, tuple(join_neighbours(keys.positions)), diagonal=False)]
        if not queries[1]:
            return []
        shown = None if self._visible is None else self._visible.keys_of(queries[0])
        return visible_tiles(queries, keys.positions, is_causal=self._is_causal, shown=shown)

    def split(self, x: Tensor) -> list[Tensor]:
        """``x``, whose dim 2 is that of the block's queries, or 1, for each piece."""
        lengths = [length for _, length in self.pieces]
        if x.shape[2] == 1 and lengths != [1]:
            return [x] * len(lengths)
        x = self.queries.arrange(x)
        return [x] if len(lengths) == 1 else list(x.split(lengths, dim=2))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        return self.queries.restore(parts[0] if len(parts) == 1 else torch.cat([*parts], dim=2))
