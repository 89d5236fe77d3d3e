"""Choose the ranks over which the rows of an image are sharded, and run calls on sharded rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from para_core.distributed.mesh import MeshDim, one_guided_rank
from para_core.spatial.mode import SpatialShardMode, first_ranks
from para_core.spatial.rows import Layout, RowTag, even


class RowRanks:
    """Ranks over which rows of images are sharded. An image with few rows uses only the first of these ranks.

    ``groups`` are process groups that may be reused for the first ranks, as in :func:`first_ranks`. The attribute
    ``mesh`` has the same ranks as a mesh, for the consistency checks.
    """

    def __init__(self, ranks: MeshDim, groups: Sequence[ProcessGroup] = ()) -> None:
        self.ranks, self._groups = ranks, groups
        self.mesh = replace(one_guided_rank("cpu"), batch=ranks)
        self._first: dict[int, MeshDim] = {ranks.size: ranks}

    def first(self, count: int) -> MeshDim:
        """Return the first ``count`` ranks as a mesh dim. Its group is None on ranks that are not among them."""
        # A compiled graph cannot create a group.
        if torch.compiler.is_compiling() and count < self.ranks.size:
            return MeshDim("rows", count, self.ranks.index, "", None)
        if count not in self._first:
            group = self.ranks.group
            members = [] if group is None else dist.get_process_group_ranks(group)
            self._first[count] = (
                first_ranks(members, count, like=group, groups=self._groups)
                if group is not None and self.ranks.index < count and count > 1
                else MeshDim("rows", count, self.ranks.index, "", None)
            )
        return self._first[count]

    def shard(self, x: Tensor, dim: int, unit: int, min_units: int) -> tuple[RowTag, MeshDim]:
        """Return the tag that says how many rows of ``x``, along ``dim``, each rank gets, and the ranks that get rows.

        Every rank except the last gets a multiple of ``unit`` rows, and every rank at least ``min_units`` units. If
        ``x`` has too few rows for that, fewer ranks are used, but at least one.
        """
        dim = dim % x.ndim
        workers = self.first(max(1, min(self.ranks.size, x.shape[dim] // (min_units * unit))))
        return RowTag(dim, even(x.shape[dim], workers.size, unit)), workers


def on_rows(
    mode: SpatialShardMode,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharded: Mapping[str | int, tuple[int, Layout]],
) -> Any:
    """Return ``call(*args, **kwargs)`` under ``mode``, with this rank's rows of the arguments in ``sharded``.

    ``args`` and ``kwargs`` have all rows; ``sharded`` has the dim and layout of the arguments to shard, by position or
    name.
    """
    positional, named = list(args), dict(kwargs)
    for key, (dim, layout) in sharded.items():
        if isinstance(key, int):
            positional[key] = mode.shard(positional[key], dim, layout=layout)
        else:
            named[key] = mode.shard(named[key], dim, layout=layout)
    with mode:
        return call(*positional, **named)
