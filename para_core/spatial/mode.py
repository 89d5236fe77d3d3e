"""The mode under which a model computes only this rank's rows, by a rule for each torch function on sharded
rows.

Rows are sharded over all ranks of a mesh, of which :mod:`.row_group` makes one group.

The autoencoders and UNets of ``adapters/vae/`` enter it, and :mod:`para_core.same_bits.image_rows` derives
the mode with the bits of one process from it. Each rule is in one of the files that ``ROW_RULES`` lists.
Tests: tests/spatial/test_functions.py, and tests/spatial/test_vaes.py with models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from para_core.distributed.agree import agree
from para_core.distributed.mesh import MeshDim, SequenceMesh, dim_of_one
from para_core.layout.windows import Sizes, divide_evenly
from para_core.spatial import convolution, factories, norm, products, resample, rules, views
from para_core.spatial.fetch import gather_rows, part_of
from para_core.spatial.row_group import one_group
from para_core.spatial.row_tag import RowTag, first_sharded, mixing_error, rows_of, set_rows
from para_core.torch_functions import Function, name_of
from para_core.torch_internals import (
    DisableTorchFunction,
    innermost_transform,
    is_transform_tensor,
    no_frame_of_its_own,
    unwrap_transform_tensor,
)


def rules_by_name(*tables: Mapping[Any, str]) -> dict[str, Any]:
    """Return the rule of each function name in ``tables``, such as ``BY_RULE`` of a file of rules.

    Raises:
        ValueError: A name has two rules.
    """
    by_name: dict[str, Any] = {}
    for table in tables:
        for rule, names in table.items():
            for name in names.split():
                if name in by_name:
                    raise ValueError(f"{name} has two rules: {by_name[name].__name__} and {rule.__name__}.")
                by_name[name] = rule
    return by_name


# The rule for each function name. The mode raises for a function that is not in here, if one of its tensors
# is sharded.
ROW_RULES = rules_by_name(
    *[module.BY_RULE for module in (rules, factories, views, convolution, norm, products, resample)]
)


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

        Returns:
            `Tensor`: This rank's rows, a copy with their tag. On one rank ``x`` itself, of any number of rows.

        Raises:
            ValueError: If ``dim`` is out of range, the sizes do not fit the number of rows or ranks, a rank
                would get less than two units, or one before the last no multiple of ``unit``.
        """
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")
        if self.ranks.size == 1:
            return x
        dim = dim % x.ndim
        if sizes is None:
            sizes = divide_evenly(x.shape[dim], self.ranks.size, unit)
        is_whole = len(sizes) == self.ranks.size and sum(sizes) == x.shape[dim]
        if not is_whole or min(sizes) < 2 * unit or any(count % unit for count in sizes[:-1]):
            raise ValueError(
                f"sizes {list(sizes)} of {x.shape[dim]} rows on {self.ranks.size} ranks: expected one number per "
                f"rank, at least {2 * unit} (two units of {unit}) and before the last a multiple of {unit}, that add "
                "up to the rows. For fewer rows use a mesh of fewer ranks."
            )
        rows = RowTag(dim, sizes)
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
        values = (*args, *kwargs.values())
        tag = first_sharded(values)
        # Ask the compiler last: Dynamo takes any transform for one that runs, and cannot trace _unwrap.
        if innermost_transform() is not None and not torch.compiler.is_compiling():
            inner = first_sharded(_unwrap(values))
            if isinstance(inner, RowTag):
                raise mixing_error(func, inner, "vmap and grad of torch.func hide the layout of the rows")
        if tag is None:
            return func(*args, **kwargs)
        name = name_of(func)
        if self._compare_calls and isinstance(tag, RowTag):
            agree({"function": name, "rows": str(tag)}, SequenceMesh(dim_of_one("ring"), self.ranks, "cpu"))
        if isinstance(tag, RowTag):
            if name not in ROW_RULES:
                raise mixing_error(func, tag, "it has no rule, so it may mix rows")
            if kwargs.get("out") is not None:
                raise mixing_error(func, tag, "it writes to out=")
            return self.run_rule(name, func, args, kwargs)
        # No tensor is sharded, but one of the sizes was read from a sharded tensor. Functions that are no
        # factories get it as an int, the size of the full tensor.
        if name in factories.FACTORIES:
            return factories.FACTORIES[name](self.ranks, func, args, kwargs)
        return func(*args, **kwargs)

    def run_rule(self, name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the rule ``name``, one of ``ROW_RULES``, for a call with a sharded tensor."""
        return ROW_RULES[name](self.ranks, func, args, kwargs)


def _unwrap(x: Any) -> Any:
    """Return the tensor inside the wrappers of torch.func transforms such as vmap, or ``x`` itself; of a list
    or tuple, one with these.
    """
    if isinstance(x, (list, tuple)):
        return [_unwrap(item) for item in x]
    while isinstance(x, Tensor) and is_transform_tensor(x):
        x = unwrap_transform_tensor(x)
    return x
