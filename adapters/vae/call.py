"""Run a call on the rows of an image: choose the ranks over which they are sharded, run it, and gather its output.

Autoencoders (``run.py``) and UNets (``unet.py``) use it. How a single function computes its rows is in
``para_core/spatial/mode.py``. Tests: tests/spatial/test_vaes.py, tests/spatial/test_unet_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from para_core.distributed.agree import exchange
from para_core.distributed.mesh import MeshDim, one_guided_rank
from para_core.layout.windows import Sizes, divide_evenly
from para_core.spatial.fetch import gather_rows, start_fetch
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.row_group import first_ranks
from para_core.spatial.row_tag import RowTag, clear_rows, rows_of, set_rows

GatherTo = Literal["all", "first"]
# The structure of an output, which ranks exchange: "tensor", (tuple, [...]), (list, [...]), (class, {field:
# ...}) for an output class, or (class, number of tensors) for a distribution.
Structure = Any


class RowRanks:
    """Ranks over which rows of images are sharded. An image with few rows uses only the first of these ranks.

    ``groups`` are process groups that may be reused for the first ranks, as in :func:`first_ranks`. The
    attribute ``mesh`` has the same ranks as a mesh, for the consistency checks.
    """

    def __init__(self, ranks: MeshDim, groups: Sequence[ProcessGroup] = ()) -> None:
        self.ranks, self._groups = ranks, groups
        self.mesh = replace(one_guided_rank("cpu"), batch=ranks)
        # The first ranks by their number, made when they are first needed.
        self._first: dict[int, MeshDim] = {ranks.size: ranks}

    def first(self, count: int) -> MeshDim:
        """Return the first ``count`` ranks as a mesh dim. Its group is None on other ranks, and if ``count`` is 1.

        All ranks must ask for the same counts in the same order, because the first time may create a group.
        """
        # A compiled graph cannot create a group, and VaeRun.run_distributed refuses a call for fewer ranks in it.
        if torch.compiler.is_compiling() and count < self.ranks.size:
            return MeshDim("rows", count, self.ranks.index, "", None)
        if count not in self._first:
            group = self.ranks.group
            if group is None or self.ranks.index >= count or count == 1:
                self._first[count] = MeshDim("rows", count, self.ranks.index, "", None)
            else:
                members = dist.get_process_group_ranks(group)
                self._first[count] = first_ranks(members, count, like=group, groups=self._groups)
        return self._first[count]

    def shard(self, x: Tensor, dim: int, unit: int, min_units: int) -> tuple[RowTag, MeshDim]:
        """Return the tag that says how many rows of ``x``, along ``dim``, each rank gets, and the ranks that
        get rows. All ranks must call it with equal sizes, as :meth:`first`.

        Every rank except the last gets a multiple of ``unit`` rows, and every rank at least ``min_units``
        units. If ``x`` has too few rows for that, fewer ranks are used, but at least one.
        """
        dim = dim % x.ndim
        workers = self.first(max(1, min(self.ranks.size, x.shape[dim] // (min_units * unit))))
        return RowTag(dim, divide_evenly(x.shape[dim], workers.size, unit)), workers


def dim_of_rows(x: Tensor) -> int:
    """Return the dim along which an input of a model is sharded: the longer one of the height and width of images.

    A waveform ``[B, C, length]`` or ``[C, length]`` has no height, so its samples are sharded.
    """
    if x.ndim <= 3 or x.shape[-1] > x.shape[-2]:
        return -1
    return -2


def run_on_rows(
    mode: SpatialShardMode,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharded: Mapping[str | int, tuple[int, Sizes]],
) -> Any:
    """Return ``call(*args, **kwargs)`` under ``mode``, with this rank's rows of the arguments in ``sharded``.

    ``args`` and ``kwargs`` have all rows; ``sharded`` has dim and sizes of those to shard, by position or
    name.
    """
    positional, named = list(args), dict(kwargs)
    for key, (dim, sizes) in sharded.items():
        if isinstance(key, int):
            positional[key] = mode.shard(positional[key], dim, sizes=sizes)
        else:
            named[key] = mode.shard(named[key], dim, sizes=sizes)
    with mode:
        return call(*positional, **named)


def run_on_workers(compute: Callable[[], Any], workers: int, row_ranks: RowRanks, gather: GatherTo) -> Any:
    """Call ``compute`` on the first ``workers`` ranks, and return its output with all rows. Collective.

    All ``row_ranks`` must call this function. If there are more ranks than workers, one exchange tells the
    others the structure of the output, and an error of ``compute`` then raises on every rank: as a
    ``RuntimeError``, unless it is a TypeError, ValueError or ImportError. If all ranks work, an error raises
    where it occurs, and nothing is exchanged. With ``gather="first"`` all ranks but the first get zeros,
    unless each of them has computed the whole output, as after a call in tiles.
    """
    ranks = row_ranks.ranks
    works = ranks.index < workers
    structure, tensors = None, []
    if works:
        try:
            result = compute()
            structure, tensors = _describe_structure(result), list(_output_tensors(result))
        except Exception as error:
            if workers == ranks.size:
                raise
            # exchange() raises on every rank. It would turn a type that it does not know into a ValueError.
            kind: type[Exception] = RuntimeError
            if type(error) in (TypeError, ValueError, ImportError):
                kind = type(error)
            text = str(error)
            if not isinstance(error, kind):
                text = f"{type(error).__name__}: {text}"
            exchange(kind(text), row_ranks.mesh)
    if workers < ranks.size:
        record = {"structure": structure, "tensors": [_describe_tensor(x) for x in tensors]}
        records = exchange(record, row_ranks.mesh)
        structure = records[0]["structure"]
        if not works:
            tensors = [_empty_part(description) for description in records[0]["tensors"]]
    return _rebuild(structure, iter([_gather_output(x, workers, ranks, gather) for x in tensors]))


def _gather_output(x: Tensor, workers: int, ranks: MeshDim, gather: GatherTo) -> Tensor:
    """Return all rows of ``x``. Collective.

    If ``x`` has a row tag, each of the first ``workers`` ranks holds some rows; otherwise each holds all of
    ``x``.
    """
    tag, shape = rows_of(x), x.shape
    is_copied = tag is None
    if tag is None:
        if workers == ranks.size:
            return x
        # The other ranks get all elements from the first rank, flattened, so that each is sent as one row.
        tag = RowTag(0, (shape.numel(),))
        x = x.reshape(-1)
        if ranks.index != 0:
            x = x.new_empty(0)
    rows = RowTag(tag.dim, (*tag.sizes, *[0] * (ranks.size - len(tag.sizes))), tag.outer)
    if gather == "all":
        out = gather_rows(x, rows, ranks)
    else:
        wanted = (((0, sum(rows.sizes)),), *[()] * (ranks.size - 1))
        fetched = start_fetch(x, rows, wanted, ranks)()
        # A rank that does not get the output returns zeros, expanded from one element so that they take no
        # memory.
        empty_shape = [*x.shape[: rows.dim], rows.total, *x.shape[rows.dim + 1 :]]
        out = x.new_zeros(()).expand(empty_shape)
        if fetched:
            out = fetched[0].contiguous()
    if is_copied:
        out = out.view(shape)
    return out


def _describe_tensor(x: Tensor) -> dict[str, Any]:
    """Return what :func:`_empty_part` needs to make a part of ``x`` on another rank."""
    return {"shape": list(x.shape), "dtype": x.dtype, "device": x.device.type, "rows": rows_of(x)}


def _empty_part(description: dict[str, Any]) -> Tensor:
    """Return this rank's part of an output that it did not compute: no rows, or zeros if it is not sharded."""
    shape, rows = list(description["shape"]), description["rows"]
    options = {"dtype": description["dtype"], "device": description["device"]}
    if rows is None:
        return torch.zeros((), **options).expand(shape)
    shape[rows.dim] = 0
    return set_rows(torch.empty(shape, **options), rows)


def _tensors_of_distribution(value: Any) -> list[Tensor] | None:
    """Return the tensors that a distribution of diffusers consists of; None if ``value`` is not a distribution.

    These are the arguments of its class: of ``DiagonalGaussianDistribution``, or of that of MiniMax H3's
    audio autoencoder. A copy made of them alone is never ``deterministic``; no autoencoder of diffusers 0.42
    returns such a distribution.
    """
    if hasattr(value, "parameters") and hasattr(value, "logvar"):
        return [value.parameters]
    if hasattr(value, "mean") and hasattr(value, "logs"):
        return [value.mean, value.logs]
    return None


def holds_distribution(value: Any) -> bool:
    """Whether ``value``, the output of an autoencoder, is or contains a distribution (as encoders return)."""
    return _tensors_of_distribution(value) is not None or any(map(holds_distribution, _items(value)))


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a dict, list or tuple; none of anything else."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    return ()


def _output_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, in the order of its structure."""
    if isinstance(value, Tensor):
        yield value
    elif (parameters := _tensors_of_distribution(value)) is not None:
        yield from parameters
    else:
        for item in _items(value):
            yield from _output_tensors(item)


def _describe_structure(value: Any) -> Structure:
    """Return the structure of an output, in which a namedtuple counts as a tuple. Raise ``TypeError`` for an
    unsupported type.
    """
    if isinstance(value, Tensor):
        return "tensor"
    if (parameters := _tensors_of_distribution(value)) is not None:
        return type(value), len(parameters)
    if isinstance(value, (tuple, list)):
        kind = list if isinstance(value, list) else tuple
        return kind, [_describe_structure(item) for item in value]
    if isinstance(value, dict):
        return type(value), {name: _describe_structure(item) for name, item in value.items()}
    raise TypeError(
        f"a model returned a {type(value).__name__}; expected tensors, or an output class of diffusers."
    )


def _rebuild(structure: Structure, tensors: Iterator[Tensor]) -> Any:
    """Return an output of this structure with ``tensors``, in the order of :func:`_output_tensors`.

    >>> output = [torch.ones(1), ({"x": torch.zeros(1)},)]
    >>> _describe_structure(output)
    (<class 'list'>, ['tensor', (<class 'tuple'>, [(<class 'dict'>, {'x': 'tensor'})])])
    >>> _rebuild(_describe_structure(output), _output_tensors(output))
    [tensor([1.]), ({'x': tensor([0.])},)]
    """
    if structure == "tensor":
        return clear_rows(next(tensors))
    kind, parts = structure
    if isinstance(parts, int):
        return kind(*[clear_rows(next(tensors)) for _ in range(parts)])
    if isinstance(parts, list):
        return kind([_rebuild(part, tensors) for part in parts])
    return kind(**{field: _rebuild(part, tensors) for field, part in parts.items()})
