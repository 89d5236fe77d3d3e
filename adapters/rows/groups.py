"""The ranks that share the rows of a model's images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from para_core.distributed.mesh import MeshDim, one_guided_rank
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.one_group import first_ranks
from para_core.spatial.rows import Layout, even
from para_core.spatial.tag import Rows


class RowRanks:
    """The ranks that share the rows of images. On an image of few rows the first of them work alone.

    Args:
        groups: Groups of the mesh that may be used for the first ranks, as :func:`first_ranks` takes them.
    """

    def __init__(self, ranks: MeshDim, groups: Sequence[ProcessGroup] = ()) -> None:
        self.ranks, self._groups = ranks, groups
        # All of them, as agreements take it.
        self.mesh = replace(one_guided_rank("cpu"), batch=ranks)
        self._first: dict[int, MeshDim] = {ranks.size: ranks}

    def first(self, count: int) -> MeshDim:
        """The first ``count`` ranks as a group; as a dim of ``count`` without a group where this rank is not among them."""
        if torch.compiler.is_compiling() and count < self.ranks.size:  # no graph makes a group
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

    def share(self, x: Tensor, dim: int, unit: int, least: int) -> tuple[Rows, MeshDim]:
        """How the rows of ``x`` along ``dim`` are sharded, and over which ranks.

        Args:
            unit: a rank holds a multiple of so many rows, but for the last one.
            least: units that a rank has to have.
        """
        dim = dim % x.ndim
        workers = self.first(max(1, min(self.ranks.size, x.shape[dim] // (least * unit))))
        return Rows(dim, even(x.shape[dim], workers.size, unit)), workers


def on_rows(
    mode: SpatialShardMode,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharded: Mapping[str | int, tuple[int, Layout]],
) -> Any:
    """``call(*args, **kwargs)`` under ``mode``, of the arguments in ``sharded`` (a place or a name) this rank's rows: dim and layout."""
    positional, named = list(args), dict(kwargs)
    for key, (dim, layout) in sharded.items():
        if isinstance(key, int):
            positional[key] = mode.shard(positional[key], dim, layout=layout)
        else:
            named[key] = mode.shard(named[key], dim, layout=layout)
    with mode:
        return call(*positional, **named)
