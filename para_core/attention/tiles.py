"""Split a call with positional masks into pieces of queries and tiles of keys, so that it needs no mask
tensor.

A mask consists of *positional masks*, which decide by the positions of tokens in the whole sequence, and of
at most one tensor. A *piece* is a run of queries that the masks treat alike; a *tile* is keys of a block that
a piece sees. Keys that no query of a piece sees are in no tile, and are never computed. The tiles of a
causal call on two ring ranks of four tokens, for the rank with the tokens 4 to 7::

    piece 4 5 6 7:   keys 4 5 6 7 (its own)  →  one causal tile       keys 0 1 2 3 (arriving)  →  one full tile

All but :meth:`Tiling.split` and :meth:`Tiling.join` is integer arithmetic, done once per call with the same
shapes. A list of positions is given as runs ``(start, length)``. Without masks there is one piece of all
queries, whose start means nothing, and each block is one tile, also an empty block.

The ring styles make a :class:`Tiling` for each plan; :class:`~para_core.attention.attend.Accumulator` and the
gradient split their tensors by it. Other masks by position than :class:`Causal` are in :mod:`.block_sparse`.
Tests: tests/attention/test_exactness.py and tests/attention/test_block_sparse.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from para_core.distributed.cached_property import cached_property
from para_core.layout.runs import coalesce, cut, intersect, join_neighbours, offsets
from para_core.layout.sequence import Run


@dataclass(frozen=True)
class Tile:
    """The keys of a block that a piece (a run of queries) sees, as runs in the order of the block. With masks
    none of the runs is empty.

    ``runs`` are offsets in the block, and ``positions`` the same keys in the whole sequence. With
    ``is_causal``, these are also the positions of the queries: query i of the piece sees keys 0 … i of the
    tile. Otherwise every query of the piece sees every key of the tile.
    """

    runs: tuple[Run, ...]
    positions: tuple[Run, ...]
    is_causal: bool


class PositionalMask(Protocol):
    """A mask that decides by positions. :func:`tiles_of_piece` intersects several."""

    @property
    def is_causal(self) -> bool:
        """Whether it answers causal tiles.
        Pieces are then cut at the beginnings and ends of all runs of keys, too.
        """
        ...

    def query_edges(self) -> Sequence[int]:
        """Return the positions at which queries are cut, so that all queries of a piece get the same answer."""
        ...

    def key_edges(self) -> Sequence[int]:
        """Return the positions at which the answer for keys changes. In a call with a causal mask pieces are
        cut there, too, so that this mask shows all keys of a causal tile or none.
        """
        ...

    def tile(self, queries: Run, keys: Sequence[Run]) -> list[tuple[list[Run], bool]]:
        """Return the keys that a piece sees: ``(ascending positions, whether the tile is causal)`` of each
        tile.

        ``keys`` are ascending. The list is empty if the piece sees none of them. In a causal tile the keys
        are at the positions of ``queries``.
        """
        ...


@dataclass(frozen=True)
class Causal:
    """The mask in which query i sees keys 0 … i."""

    is_causal: bool = True

    def query_edges(self) -> Sequence[int]:
        return ()

    def key_edges(self) -> Sequence[int]:
        return ()

    def tile(self, queries: Run, keys: Sequence[Run]) -> list[tuple[list[Run], bool]]:
        """Return the earlier keys as one tile, and those at the positions of the queries as a causal tile.

        Each run of ``keys`` must contain all positions of ``queries`` or none.

        >>> Causal().tile((4, 2), [(0, 2), (4, 6)])
        [([(0, 2)], False), ([(4, 2)], True)]
        """
        earlier, own = intersect(keys, [(0, queries[0])]), intersect(keys, [queries])
        return [(runs, is_causal) for runs, is_causal in ((earlier, False), (own, True)) if runs]


def tiles_of_piece(queries: Run, block: Sequence[Run], masks: Sequence[PositionalMask]) -> list[Tile]:
    """Return the tiles of a block of keys that a piece sees through all ``masks``.

    Args:
        queries: The run ``(start, length)`` of the queries, not empty, cut at the edges that the masks ask
            for.
        block: The positions of the keys, as runs in the order of the block.

    >>> tiles_of_piece((4, 2), [(4, 6), (0, 2)], [Causal()])
    [Tile(runs=((6, 2),), positions=((0, 2),), is_causal=False), Tile(runs=((0, 2),), positions=((4, 2),),
    is_causal=True)]
    """
    visible = []
    if any(length for _, length in block):
        visible = [(coalesce(block), False)]
    for mask in masks:
        visible = [
            (runs, was_causal or is_causal)
            for keys, was_causal in visible
            for runs, is_causal in mask.tile(queries, keys)
        ]
    tiles = []
    for positions, is_causal in visible:
        in_block = [run for block_run in block for run in intersect([block_run], positions)]
        tiles.append(Tile(tuple(offsets(positions, block)), tuple(join_neighbours(in_block)), is_causal))
    return tiles


class Tiling:
    """The pieces and tiles of one rank's attention call: which of its queries see which keys of each block.

    Args:
        queries: The positions of the queries, as runs ``(start, length)`` in the order of the tensor.
        blocks: The positions of the keys of each block, in the order of the block. Block 0 is the rank's own.
        masks: The positional masks. Without any, all queries are one piece, and each block is one tile.

    >>> tiling = Tiling([(4, 4)], [[(4, 4)], [(0, 4)]], [Causal()])
    >>> tiling.pieces, tiling.tiles(0)
    ([(4, 4)], [(0, Tile(runs=((0, 4),), positions=((4, 4),), is_causal=True))])
    >>> tiling.tiles(1)
    [(0, Tile(runs=((0, 4),), positions=((0, 4),), is_causal=False))]
    """

    def __init__(
        self, queries: Sequence[Run], blocks: Sequence[Sequence[Run]], masks: Sequence[PositionalMask] = ()
    ) -> None:
        self._queries, self._blocks, self.masks = queries, blocks, masks
        self._tiles: dict[int, list[tuple[int, Tile]]] = {}

    @cached_property
    def pieces(self) -> list[Run]:
        """Runs ``(start, length)`` of query positions, in the order of the tensor, that see the same tiles.

        Each mask gives all queries of a piece the same answer. If a mask is causal, each run of keys that the
        masks are asked for contains all positions of a piece or none of them, and so a causal tile has the
        positions of its piece: pieces are cut wherever such a run may begin or end.
        """
        if not self.masks:
            return [(0, sum([length for _, length in self._queries]))]
        edges = [edge for mask in self.masks for edge in mask.query_edges()]
        if any(mask.is_causal for mask in self.masks):
            edges += [edge for mask in self.masks for edge in mask.key_edges()]
            # Neighbouring runs are joined as in tiles_of_piece: no cut is needed between them.
            runs = [run for block in self._blocks for run in join_neighbours(block)]
            edges += [edge for start, length in runs for edge in (start, start + length)]
        return cut(join_neighbours(self._queries), edges) or [(0, 0)]

    def tiles(self, block: int) -> list[tuple[int, Tile]]:
        """Return ``(index of the piece, tile)`` for all tiles of the block with the number ``block``, by piece.

        The index is that of :attr:`pieces`, and so of the parts of :meth:`split`. With masks, pieces that see
        no key have no tile.
        """
        if block not in self._tiles:
            self._tiles[block] = self._tiles_of(self._blocks[block])
        return self._tiles[block]

    def _tiles_of(self, keys: Sequence[Run]) -> list[tuple[int, Tile]]:
        if not self.masks:
            number = sum([length for _, length in keys])
            return [(0, Tile(((0, number),), tuple(join_neighbours(keys)), is_causal=False))]
        return [
            (index, tile)
            for index, queries in enumerate(self.pieces)
            if queries[1]
            for tile in tiles_of_piece(queries, keys, self.masks)
        ]

    def split(self, x: Tensor) -> list[Tensor]:
        """Split ``x`` along its queries, dim 2, into one tensor per piece; with one row for all queries,
        ``x`` itself for each piece.

        The parts are views, because the gradient adds to them in place; one row for all queries so gets the
        sum over the pieces. ``x`` has rows of these queries only: a mask with rows of other queries is cut
        before.
        """
        lengths = [length for _, length in self.pieces]
        if x.shape[2] == 1 or len(lengths) == 1:
            return [x] * len(lengths)
        return list(x.split_with_sizes(lengths, 2))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`: concatenate one tensor per piece along dim 2."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([*parts], dim=2)
