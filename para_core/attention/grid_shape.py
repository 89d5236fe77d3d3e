"""The shape of the grid of ranks in Attention2D. Imports no torch, so that the planner starts at once."""

from __future__ import annotations


def choose_grid(ranks: int, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return ``(rows, columns)`` of the grid of ``ranks`` ring ranks in which the fewest bytes are sent.

    The function assumes as many keys as queries. Queries and their results are sent along a row, keys and
    values along a column: 2 · H · (columns - 1) + 2 · H_kv · (rows - 1) vectors per token. If two grids send
    equally many, the one with fewer columns is returned, because results are sent with their lse, which is
    not counted here. A prime number of ranks forms one column: every rank gets all keys and values, and no
    query is sent.

    >>> choose_grid(4, 8, 8), choose_grid(6, 8, 8), choose_grid(5, 8, 8)
    ((2, 2), (3, 2), (5, 1))
    >>> choose_grid(4, 8, 2)
    (4, 1)
    """
    shapes = [(ranks // columns, columns) for columns in range(1, ranks + 1) if ranks % columns == 0]
    return min(shapes, key=lambda shape: (shape[1] - 1) * num_heads + (shape[0] - 1) * num_kv_heads)
