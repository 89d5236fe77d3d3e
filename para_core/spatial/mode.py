"""The mode under which a model runs on a part of the rows: every function of torch is looked at, and most are local."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from para_core.distributed.consistency import check_consistent, signature
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.spatial import convolution, local, norm, products, resample, views
from para_core.spatial.errors import name_of, unknown
from para_core.spatial.fetch import gather, part_of
from para_core.spatial.one_group import one_group
from para_core.spatial.rows import Layout, even
from para_core.spatial.tag import Rows, ShardedSize, rows_of, tagged
from para_core.torch_internals import (
    DisableTorchFunction,
    innermost_transform,
    is_transform_tensor,
    unwrap_transform_tensor,
)

# By name. What is not here raises where rows are sharded.
RULES: dict[str, Any] = {
    **local.RULES,
    **views.RULES,
    **convolution.RULES,
    **norm.RULES,
    **products.RULES,
    **resample.RULES,
}
# Of what is whole, and a size that was read from a sharded tensor.
FACTORIES: dict[str, Any] = {**local.FACTORIES, **resample.FACTORIES}


class SpatialShardMode(TorchFunctionMode):
    """Inside ``with SpatialShardMode(mesh) as rows:`` a model computes on this rank's rows of an image, exactly.

    >>> with SpatialShardMode(mesh) as rows:  # doctest: +SKIP
    ...     y = rows.gather(model(rows.shard(x)))

    What needs rows of other ranks gets them: convolutions a halo, norms their statistics, attention all keys. A function that is not
    known, and that gets a tensor whose rows are sharded, is an error that names it.

    Args:
        mesh: all its ranks share the rows, in rank order; a DeviceMesh or a ProcessGroup.
        compare_calls: for finding out why a model hangs: before each function of sharded rows, one small exchange raises on every
            rank unless all call the same function on rows that are sharded alike.
    """

    def __init__(self, mesh: DeviceMesh | ProcessGroup | MeshDim, *, compare_calls: bool = False) -> None:
        super().__init__()
        self.ranks = mesh if isinstance(mesh, MeshDim) else one_group(mesh)
        self._compare_calls = compare_calls

    def shard(self, x: Tensor, dim: int = -2, *, unit: int = 1, layout: Layout | None = None) -> Tensor:
        """This rank's rows of ``x``, of which every rank holds all.

        Args:
            dim: along which rows are counted: -2 is the height of ``[..., H, W]``, -1 its width.
            unit: ranks hold multiples of so many rows, but for the last one.
            layout: how many rows each rank gets, instead of equally many.
        """
        dim = dim % x.ndim
        layout = even(x.shape[dim], self.ranks.size, unit) if layout is None else layout
        if sum(layout) != x.shape[dim] or len(layout) != self.ranks.size or min(layout) < 2 * unit:
            raise ValueError(
                f"layout {list(layout)} of {x.shape[dim]} rows on {self.ranks.size} ranks: expected one number a rank, at "
                f"least {2 * unit} (two units of {unit}), which add up to the rows. With fewer rows, make a mesh of fewer ranks."
            )
        rows = Rows(dim, layout)
        if self.ranks.size == 1:
            return x
        with DisableTorchFunction():
            return tagged(part_of(x, rows, self.ranks).clone(memory_format=torch.contiguous_format), rows)

    def gather(self, x: Tensor) -> Tensor:
        """All rows of ``x`` on every rank; ``x`` itself where they are."""
        rows = rows_of(x)
        if rows is None:
            return x
        with DisableTorchFunction():
            return gather(x, rows, self.ranks)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _first_sharded((*args, *kwargs.values()))
        if found is None and innermost_transform() is not None:
            inside = _first_sharded([_unwrapped(x) for x in args])
            if isinstance(inside, Rows):
                raise unknown(func, inside, "vmap and grad of torch.func hide how they are")
        if found is None:
            return func(*args, **kwargs)
        name = name_of(func)
        if self._compare_calls and isinstance(found, Rows):
            alone = MeshDim("ring", 1, 0, "", None)
            check_consistent(signature({"function": name, "rows": str(found)}), SequenceMesh(alone, self.ranks, "cpu"))
        rule = (RULES if isinstance(found, Rows) else FACTORIES).get(name)
        if rule is not None:
            return rule(self.ranks, func, args, kwargs)
        if isinstance(found, Rows):
            raise unknown(func, found, "it is not known whether it mixes rows")
        return func(*args, **kwargs)


def _unwrapped(x: Any) -> Any:
    """What torch.func has wrapped in ``x``."""
    while isinstance(x, Tensor) and is_transform_tensor(x):
        x = unwrap_transform_tensor(x)
    return x


def _first_sharded(values: Iterable[Any]) -> Rows | ShardedSize | None:
    """The tag of the first sharded tensor; where there is none, the first size of one."""
    count: Rows | ShardedSize | None = None
    for value in values:
        if isinstance(value, Tensor):
            found: Rows | ShardedSize | None = rows_of(value)
        elif isinstance(value, (list, tuple)):
            found = _first_sharded(value)
        elif isinstance(value, ShardedSize):
            found = value
        else:
            continue
        if isinstance(found, Rows):
            return found
        count = count or found
    return count
