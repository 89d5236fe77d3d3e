"""Split a causal or block-sparse call into pieces of queries and tiles of keys, so that it needs no mask tensor.

A *piece* is a run of queries that see the same keys; a *tile* is the keys of one ring rank that a piece sees. Tokens
are identified by their positions in the whole sequence. In a causal call, tiles above the diagonal are skipped, tiles
below it are computed without a mask, and tiles on it with SDPA's ``is_causal``. With a block mask, tiles contain only
the keys that the piece sees. A list of positions is given as runs ``(start, length)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.block_sparse import BlockMask
from para_core.distributed.cached_property import cached_property
from para_core.layout.runs import coalesce, cut, intersect, join_neighbours, offsets
from para_core.layout.sequence import Run


@dataclass(frozen=True)
class Tile:
    """The keys of a ring rank that a piece (a run of queries) sees, as ascending runs that are not empty.

    ``runs`` are offsets in the ring rank's keys, and ``positions`` the same keys in the whole sequence. With
    ``diagonal``, these are also the positions of the queries: query i of the piece sees keys 0 … i of the tile.
    """

    runs: tuple[Run, ...]
    positions: tuple[Run, ...]
    diagonal: bool


def visible_tiles(queries: Run, keys: Sequence[Run], *, is_causal: bool, shown: Sequence[Run] | None) -> list[Tile]:
    """Return the tiles of a ring rank's keys that a run of queries sees: at most one, or two in a causal call.

    Args:
        queries: The run ``(start, length)`` of the queries, not empty. With ``is_causal``, each run of ``keys`` and of
            ``shown`` contains all positions of this run or none.
        keys: The positions of the keys, as ascending runs.
        is_causal: Whether query i sees only keys 0 … i.
        shown: The positions of the keys that a block mask shows these queries, as ascending runs; None for all.

    >>> visible_tiles((4, 2), [(0, 2), (4, 6)], is_causal=True, shown=None)
    [Tile(runs=((0, 2),), positions=((0, 2),), diagonal=False), Tile(runs=((2, 2),), positions=((4, 2),),
    diagonal=True)]
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


class TokenOrder:
    """The order in which attention uses a ring rank's tokens: as it holds them, or sorted by position (``ascending``).

    ``runs`` are the positions of the tokens as runs ``(start, length)``, in the order in which the rank holds them.
    """

    def __init__(self, runs: Sequence[Run], *, ascending: bool) -> None:
        self._order = sorted(range(len(runs)), key=runs.__getitem__) if ascending else list(range(len(runs)))
        self._lengths = [length for _, length in runs]
        self._as_held = self._order == list(range(len(runs)))
        self.positions = coalesce(runs) if ascending else list(runs)

    def arrange(self, x: Tensor) -> Tensor:
        """Return ``x`` with its tokens, dim 2, rearranged from the order in which the rank holds them to this order."""
        if self._as_held:
            return x
        parts = x.split(self._lengths, dim=2)
        return torch.cat([parts[index] for index in self._order], dim=2)

    def restore(self, x: Tensor) -> Tensor:
        """Undo :meth:`arrange`: return ``x`` with its tokens, dim 2, in the order in which the rank holds them."""
        if self._as_held:
            return x
        parts = x.split([self._lengths[index] for index in self._order], dim=2)
        return torch.cat([parts[self._order.index(index)] for index in range(len(parts))], dim=2)


class Tiling:
    """The pieces and tiles of one rank's attention call: which of its queries see which keys at each step of a ring.

    ``query_runs`` are the positions of the queries, as runs ``(start, length)`` in the order of the tensor;
    ``key_runs`` those of the keys that the rank has at each step, its own at step 0; and ``visible`` is the block mask.
    """

    def __init__(
        self,
        query_runs: Sequence[Run],
        key_runs: Sequence[Sequence[Run]],
        *,
        is_causal: bool,
        visible: BlockMask | None,
    ) -> None:
        self._query_runs, self._key_runs = query_runs, key_runs
        self._is_causal, self._visible = is_causal, visible
        self.by_position = is_causal or visible is not None
        self._tiles: dict[int, list[tuple[int, Tile]]] = {}

    @cached_property
    def queries(self) -> TokenOrder:
        return TokenOrder(self._query_runs, ascending=self.by_position)

    @cached_property
    def pieces(self) -> list[Run]:
        """Runs ``(start, length)`` of query positions, such that all queries of a run see the same tiles."""
        if not self.by_position:
            return [(0, sum([length for _, length in self._query_runs]))]
        edges = [] if self._visible is None else self._visible.equal_runs(is_causal=self._is_causal)
        if self._is_causal:
            edges = edges + [run for runs in self._key_runs for run in coalesce(runs)]
        return cut(self.queries.positions, edges) or [(0, 0)]

    @cached_property
    def keys(self) -> list[TokenOrder]:
        """For each step, the order in which attention uses the keys that the rank has at this step."""
        return [TokenOrder(runs, ascending=self.by_position) for runs in self._key_runs]

    def tiles(self, step: int) -> list[tuple[int, Tile]]:
        """Return ``(index of the piece, tile)`` for all tiles of the keys that the rank has at ``step``, by piece."""
        if step in self._tiles:
            return self._tiles[step]
        keys, blocks = self.keys[step].positions, self._visible
        self._tiles[step] = tiles = []
        for number, queries in enumerate(self.pieces):
            if not self.by_position:
                runs = ((0, sum([length for _, length in keys])),)
                tiles.append((number, Tile(runs, tuple(join_neighbours(keys)), diagonal=False)))
            elif queries[1]:
                shown = None if blocks is None else blocks.runs_seen(queries[0] // blocks.query_block)
                of_piece = visible_tiles(queries, keys, is_causal=self._is_causal, shown=shown)
                tiles += [(number, tile) for tile in of_piece]
        return tiles

    def split(self, x: Tensor) -> list[Tensor]:
        """Split ``x`` along its queries, dim 2, into one tensor per piece; ``x`` itself if dim 2 has size 1."""
        lengths = [length for _, length in self.pieces]
        if x.shape[2] == 1 and lengths != [1]:
            return [x] * len(lengths)
        x = self.queries.arrange(x)
        return [x] if len(lengths) == 1 else list(x.split(lengths, dim=2))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`: concatenate one tensor per piece along dim 2, in the order of the rank's queries."""
        return self.queries.restore(parts[0] if len(parts) == 1 else torch.cat([*parts], dim=2))
