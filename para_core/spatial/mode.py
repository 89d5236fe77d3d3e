"""The mode under which a model computes only this rank's rows, by a rule for each torch function on sharded
rows.

Rows are sharded over all ranks of a mesh. :func:`one_group` combines the dims of the mesh into one.

The autoencoders and UNets of ``adapters/vae/`` enter it, and :mod:`para_core.same_bits.image_rows` derives
the mode with the bits of one process from it. Each rule is in one of the files that ``RULES`` lists. Tests:
tests/spatial/test_functions.py, and tests/spatial/test_vaes.py with models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from para_core.distributed.agree import agree, exchange
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.mesh import (
    GuidedMesh,
    MeshDim,
    SequenceMesh,
    dim_of_group,
    dim_of_one,
    guided_mesh,
)
from para_core.layout.windows import Sizes, divide_evenly
from para_core.spatial import convolution, factories, norm, products, resample, rules, views
from para_core.spatial.fetch import gather_rows, part_of
from para_core.spatial.row_tag import Function, RowTag, first_sharded, name_of, rows_of, set_rows, unknown
from para_core.torch_internals import (
    DisableTorchFunction,
    group_timeout,
    innermost_transform,
    is_transform_tensor,
    no_frame_of_its_own,
    unwrap_transform_tensor,
)

# The rule for each function name. The mode raises for a function that is not in here, if one of its tensors
# is sharded. A name in two files has the rule of the later one.
RULES: dict[str, Any] = {
    name: rule
    for module in (rules, factories, views, convolution, norm, products, resample)
    for rule, names in module.BY_RULE.items()
    for name in names.split()
}


class SpatialShardMode(TorchFunctionMode):
    """Mode under which a model computes only this rank's rows of an image. The output equals that on one
    device up to the order of sums.

    >>> with SpatialShardMode(mesh) as rows:  # doctest: +SKIP
    ...     y = rows.gather(model(rows.shard(x)))

    Functions that need other rows exchange data with other ranks: convolutions fetch a halo, norms combine
    statistics, attention gathers all keys. All other supported functions run locally. A function without a
    rule raises :class:`~para_core.spatial.row_tag.MixesRows` if one of its tensors is sharded.

    Args:
        mesh (`DeviceMesh` or `ProcessGroup`): The ranks over which rows are sharded, in rank order. A mesh
            may have several dims.
        compare_calls (`bool`, defaults to `False`): A debugging aid for models that hang: before each
            function on sharded rows, the ranks compare the function's name and the layout in a small
            exchange, and all raise if these differ.
    """

    def __init__(self, mesh: DeviceMesh | ProcessGroup | MeshDim, *, compare_calls: bool = False) -> None:
        super().__init__()
        if not isinstance(mesh, MeshDim):
            mesh = one_group(mesh)
        self.ranks = mesh
        self._compare_calls = compare_calls

    def shard(self, x: Tensor, dim: int = -2, *, unit: int = 1, sizes: Sizes | None = None) -> Tensor:
        """Return this rank's rows of ``x``. Every rank must pass the same whole tensor, which is not
        compared.

        Args:
            dim (`int`, defaults to `-2`): The dim to shard: -2 for the height of ``[..., H, W]``, -1 for the
                width.
            unit (`int`, defaults to `1`): Every rank except the last gets a multiple of this number of rows,
                for example the factor by which the model scales down.
            sizes (`tuple[int, ...]`, *optional*): Number of rows of each rank. Defaults to the most even
                ones.

        Raises:
            ValueError: If the sizes do not fit the number of rows or ranks, or a rank would get less than
                two units.
        """
        dim = dim % x.ndim
        if sizes is None:
            sizes = divide_evenly(x.shape[dim], self.ranks.size, unit)
        if sum(sizes) != x.shape[dim] or len(sizes) != self.ranks.size or min(sizes) < 2 * unit:
            raise ValueError(
                f"sizes {list(sizes)} of {x.shape[dim]} rows on {self.ranks.size} ranks: expected one number per "
                f"rank, at least {2 * unit} (two units of {unit}), that add up to the rows. For fewer rows use a mesh "
                "of fewer ranks."
            )
        rows = RowTag(dim, sizes)
        if self.ranks.size == 1:
            return x
        with DisableTorchFunction():
            return set_rows(part_of(x, rows, self.ranks).clone(memory_format=torch.contiguous_format), rows)

    def gather(self, x: Tensor) -> Tensor:
        """Return all rows of ``x`` on every rank; ``x`` itself if it is not sharded. Collective."""
        rows = rows_of(x)
        if rows is None:
            return x
        with DisableTorchFunction():
            return gather_rows(x, rows, self.ranks)

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tag = first_sharded((*args, *kwargs.values()))
        if tag is None and innermost_transform() is not None:
            inner = first_sharded([_unwrap(x) for x in args])
            if isinstance(inner, RowTag):
                raise unknown(func, inner, "vmap and grad of torch.func hide the layout of the rows")
        if tag is None:
            return func(*args, **kwargs)
        name = name_of(func)
        if self._compare_calls and isinstance(tag, RowTag):
            agree({"function": name, "rows": str(tag)}, SequenceMesh(dim_of_one("ring"), self.ranks, "cpu"))
        if isinstance(tag, RowTag):
            if name not in RULES:
                raise unknown(func, tag, "it has no rule, so it may mix rows")
            if kwargs.get("out") is not None:
                raise unknown(func, tag, "it writes to out=")
            return self.run_rule(name, func, args, kwargs)
        # No tensor is sharded, but one of the sizes was read from a sharded tensor. Functions that are no
        # factories get it as an int, the size of the full tensor.
        if name in factories.FACTORIES:
            return factories.FACTORIES[name](self.ranks, func, args, kwargs)
        return func(*args, **kwargs)

    def run_rule(self, name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the rule ``name``, one of ``RULES``, for a call with a sharded tensor."""
        return RULES[name](self.ranks, func, args, kwargs)


def _unwrap(x: Any) -> Any:
    """Return the tensor inside the wrappers of torch.func transforms such as vmap, or ``x`` itself."""
    while isinstance(x, Tensor) and is_transform_tensor(x):
        x = unwrap_transform_tensor(x)
    return x


def one_group(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> MeshDim:
    """Return one mesh dim with the ranks of all dims of ``mesh``, in the order of the global ranks if there
    are several dims. Collective: every rank of the mesh must call this function.
    """
    if isinstance(mesh, ProcessGroup):
        return dim_of_group("rows", mesh)
    guided = mesh
    if not isinstance(guided, GuidedMesh):
        guided = guided_mesh(guided)
    groups = dim_groups(guided)
    if len(groups) < 2:
        return dim_of_group("rows", next(iter(groups), None))
    members: list[int] = [record["rank"] for record in exchange({"rank": dist.get_rank()}, guided)]
    return first_ranks(members, len(members), like=groups[0])


def dim_groups(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> list[ProcessGroup]:
    """Return the process group of each dim of ``mesh`` that has several ranks."""
    if isinstance(mesh, ProcessGroup):
        return [mesh]
    if not isinstance(mesh, GuidedMesh):
        mesh = guided_mesh(mesh)
    return [dim.group for dim in mesh.dims if dim.group is not None]


def first_ranks(
    members: list[int], count: int, *, like: ProcessGroup, groups: Sequence[ProcessGroup] = ()
) -> MeshDim:
    """Return a mesh dim of the first ``count`` of the global ranks ``members``. Only these ``count`` ranks
    may call this function.

    One of ``groups`` is reused if it has the same ranks and backend, because an NCCL communicator takes GPU
    memory. Otherwise a group with the backend and timeout of ``like`` is created at the first call, and
    reused by later calls.
    """
    chosen = members[:count]
    if count == len(members):
        chosen = sorted(members)
    for group in groups:
        if dist.get_process_group_ranks(group) == sorted(chosen) and dist.get_backend(
            group
        ) == dist.get_backend(like):
            return dim_of_group("rows", group)
    options: dict[str, Any] = {"backend": dist.get_backend(like), "timeout": group_timeout(like)}
    description = f"rows over ranks {chosen} by {options['backend']}"
    return dim_of_group("rows", find_or_make_group(description, chosen, **options))
