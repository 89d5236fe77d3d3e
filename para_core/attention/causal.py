"""What a causal mask leaves of a block of queries and a block of keys, as rectangles and diagonals. Pure integers.

Tokens are named by their position in the whole sequence, whatever rank holds them: query i sees keys 0 … i. So every
layout needs no mask tensor: blocks above the diagonal disappear, blocks below it are plain, and what lies on it is
SDPA's own ``is_causal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from para_core.layout import Run


@dataclass(frozen=True)
class Tile:
    """Keys ``first_key`` … ``first_key + num_keys - 1`` (offsets in the block) that a run of queries sees."""

    first_key: int
    num_keys: int
    diagonal: bool  # as many keys as queries, at the same positions: query i of the run sees keys 0 … i of the tile


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
    """``runs`` (ascending) cut where a run of ``others`` starts or ends.

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


def visible_tiles(queries: Run, keys: Sequence[Run]) -> list[Tile]:
    """What a run of queries sees of a block of keys.

    Args:
        queries: not empty; cut by ``keys``, so that a run of keys holds all of its positions or none.
        keys: ascending; the block holds them one after the other.

    >>> visible_tiles((4, 2), [(0, 2), (4, 6)])
    [Tile(first_key=0, num_keys=2, diagonal=False), Tile(first_key=2, num_keys=2, diagonal=True)]
    """
    first, num_queries = queries
    earlier = sum(max(0, min(start + length, first) - start) for start, length in keys)
    tiles = [Tile(0, earlier, diagonal=False)] if earlier else []
    if any(start <= first < start + length for start, length in keys):
        tiles.append(Tile(earlier, num_queries, diagonal=True))
    return tiles
