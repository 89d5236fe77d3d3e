"""The grid of Attention2D: ring ranks of one row exchange queries, those of one column exchange keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from para_core.attention.ring_plan import RingPlan
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling, own_runs, sharded_runs
from para_core.distributed.cached_property import cached_property
from para_core.distributed.layout import Run


def choose_grid(ranks: int, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return ``(rows, columns)`` of the grid of ``ranks`` ring ranks in which the fewest bytes are sent.

    The function assumes as many keys as queries. Queries and their results are sent along a row, keys and values along
    a column: 2 · H · (columns - 1) + 2 · H_kv · (rows - 1) vectors per token. If two grids send equally many, the one
    with fewer columns is returned, because results are sent with their lse, which is not counted here. A prime number
    of ranks forms one column: every rank gets all keys and values, and no query is sent.

    >>> choose_grid(4, 8, 8), choose_grid(6, 8, 8), choose_grid(5, 8, 8)
    ((2, 2), (3, 2), (5, 1))
    >>> choose_grid(4, 8, 2)
    (4, 1)
    """
    shapes = [(ranks // columns, columns) for columns in range(1, ranks + 1) if ranks % columns == 0]
    return min(shapes, key=lambda shape: (shape[1] - 1) * num_heads + (shape[0] - 1) * num_kv_heads)


@dataclass(frozen=True, eq=False)
class GridPlan:
    """The plan of Attention2D for this rank, in a grid of ``shape`` ``(rows, columns)`` of ring ranks.

    Ring rank i is in row i // columns and column i % columns. This rank computes attention of the queries of its row to
    the sharded keys of its column, and of its own queries to replicated keys.
    """

    ring: RingPlan
    shape: tuple[int, int]

    @cached_property
    def spec(self) -> AttentionSpec:
        return self.ring.spec

    @cached_property
    def row(self) -> list[int]:
        """The ring indices of the other ranks in this rank's row."""
        index, columns = self.ring.dim.index, self.shape[1]
        first = index - index % columns
        return [rank for rank in range(first, first + columns) if rank != index]

    @cached_property
    def column(self) -> list[int]:
        """The ring indices of the other ranks in this rank's column."""
        index, columns = self.ring.dim.index, self.shape[1]
        return [rank for rank in range(index % columns, self.ring.dim.size, columns) if rank != index]

    @cached_property
    def row_runs(self) -> list[list[Run]]:
        """For each other rank of the row, the positions of its queries, as runs ``(start, length)``."""
        return [own_runs(self.spec.query_layout, self.spec.mesh, rank) for rank in self.row]

    @cached_property
    def column_runs(self) -> list[list[Run]]:
        """For each other rank of the column, the positions of its sharded keys, as runs ``(start, length)``."""
        return [sharded_runs(self.spec.key_layout, self.spec.mesh, rank) for rank in self.column]

    @cached_property
    def row_sizes(self) -> list[int]:
        return [_length(runs) for runs in self.row_runs]

    @cached_property
    def column_sizes(self) -> list[int]:
        return [_length(runs) for runs in self.column_runs]

    @cached_property
    def own_tiling(self) -> Tiling:
        """The keys that this rank's queries see: at step 0 its own, at step 1 those of its column's other ranks."""
        return self._tiling(
            own_runs(self.spec.query_layout, self.spec.mesh), own_runs(self.spec.key_layout, self.spec.mesh)
        )

    @cached_property
    def row_tiling(self) -> Tiling:
        """The keys that the queries of the row's other ranks see.

        At step 0 these are this rank's sharded keys, at step 1 those of the other ranks of its column.
        """
        own = sharded_runs(self.spec.key_layout, self.spec.mesh, self.ring.dim.index)
        return self._tiling([run for runs in self.row_runs for run in runs], own)

    def _tiling(self, queries: Sequence[Run], own_keys: Sequence[Run]) -> Tiling:
        keys = [own_keys, [run for runs in self.column_runs for run in runs]]
        return Tiling(queries, keys, is_causal=self.spec.is_causal, visible=None)


def _length(runs: Sequence[Run]) -> int:
    return sum([length for _, length in runs])
