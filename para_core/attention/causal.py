"""What a causal mask, or one of blocks, leaves of a rank's queries and keys, as rectangles and diagonals. Pure integers.

Tokens are named by their position in the whole sequence, whatever rank holds them: query i sees keys 0 … i. So every
layout needs no mask tensor: blocks above the diagonal disappear, blocks below it are plain, and what lies on it is
SDPA's own ``is_causal``. A block mask likewise: a rectangle is then some runs of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from para_core.layout import Run


@dataclass(frozen=True)
class Tile:
    """Keys that a run of queries sees: ``runs`` of them, by their offset in the block, ascending and not empty."""

    runs: tuple[Run, ...]
    diagonal: (
        bool  # one run, as long as the queries, at their positions: query i of the run sees keys 0 … i of the tile
    )


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


def visible_tiles(queries: Run, keys: Sequence[Run], *, is_causal: bool, seen: Sequence[Run] | None) -> list[Tile]:
    """What a run of queries sees of a block of keys.

    Args:
        queries: not empty; cut, if ``is_causal``, by ``keys`` and by the runs of ``seen``: each holds all of its positions or none.
        keys: ascending; the block holds them one after the other.
        seen: positions of keys that a block mask shows these queries, ascending; all if None.

    >>> visible_tiles((4, 2), [(0, 2), (4, 6)], is_causal=True, seen=None)
    [Tile(runs=((0, 2),), diagonal=False), Tile(runs=((2, 2),), diagonal=True)]
    >>> visible_tiles((4, 2), [(0, 2), (4, 6)], is_causal=False, seen=[(0, 1), (5, 3)])
    [Tile(runs=((0, 1), (3, 3)), diagonal=False)]
    """
    first, _ = queries
    tiles = []
    earlier = intersect(keys, [(0, first)]) if is_causal else keys
    if runs := offsets(earlier if seen is None else intersect(earlier, seen), keys):
        tiles.append(Tile(tuple(runs), diagonal=False))
    if is_causal:
        same = intersect(keys, [queries])
        if runs := offsets(same if seen is None else intersect(same, seen), keys):
            tiles.append(Tile(tuple(runs), diagonal=True))
    return tiles


def intersect(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """What two ascending lists of runs have in common, ascending, without empty runs.

    >>> intersect([(0, 4), (6, 4)], [(2, 5), (8, 9)])
    [(2, 2), (6, 1), (8, 2)]
    """
    common, place = [], 0
    for start, length in runs:
        while place < len(others) and sum(others[place]) <= start:
            place += 1
        for other_start, other_length in others[place:]:
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
    found, before = [], 0
    for start, length in block:
        found += [(before + first - start, number) for first, number in intersect([(start, length)], runs)]
        before += length
    return join_neighbours(found)
