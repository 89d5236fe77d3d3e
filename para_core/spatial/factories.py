"""Rules for functions that create tensors, of sizes that were read from a sharded one.

Rules are explained in :mod:`.rules`. :mod:`.mode` calls those of ``FACTORIES`` also if no tensor is sharded, because
only a size may be. ``zeros_like`` and the like are in :mod:`.rules`. Tests:
tests/spatial/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.spatial.fetch import part_of
from para_core.spatial.row_tag import RowTag, ShardedSize, local_sizes, mixing_error, set_rows, sharded_dim
from para_core.spatial.rules import argument
from para_core.torch_functions import Function, name_of


def run_filled(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``torch.zeros``, ``ones``, ``empty`` or ``full``, or ``x.new_zeros`` and so on.

    The output is sharded if one of the sizes is a :class:`ShardedSize`.
    """
    if name_of(func).startswith("new_"):
        func, args = partial(func, args[0]), args[1:]
    shape = _shape(args, kwargs)
    rows = sharded_dim(shape)
    if rows is not None:
        if "size" in kwargs:
            kwargs = {**kwargs, "size": local_sizes(kwargs["size"])}
        elif isinstance(args[0], (list, tuple)):
            args = (local_sizes(args[0]), *args[1:])
        else:
            args = local_sizes(tuple(args))
        return set_rows(func(*args, **kwargs), rows)
    if name_of(func) == "empty" and "size" not in kwargs:
        # Allocate no memory: this is the tokens × tokens input of a baddbmm with beta=0, which does not read
        # it. On the meta device any other use of it raises, also after writes.
        return torch.empty(shape, **{**kwargs, "device": "meta"})
    out: Tensor = func(*args, **kwargs)
    return out


def run_expand(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``x.expand`` of a replicated tensor.
    The output is sharded if an expanded dim has a :class:`ShardedSize`.
    """
    out: Tensor = func(*args, **kwargs)
    rows = sharded_dim(_shape(args[1:], kwargs))
    # With a stride of 0 all entries of the dim are equal, so any of them are this rank's. Else it was not expanded.
    if rows is None or out.stride(rows.dim) != 0:
        return out
    return set_rows(out.narrow(rows.dim, 0, rows.outer * rows.sizes[ranks.index]), rows)


def run_repeat_frames(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``repeat_interleave`` of a replicated vector ``[frames]`` by the number of this rank's tokens per frame."""
    x, repeats = args[0], argument(args, kwargs, "repeats", 1)
    if x.ndim != 1 or not isinstance(repeats, ShardedSize):
        out: Tensor = func(*args, **kwargs)
        return out
    return set_rows(x.repeat_interleave(repeats.local), RowTag(0, repeats.sizes, len(x) * repeats.outer))


def run_random(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Draw all rows with ``torch.randn`` or ``torch.rand``, as one device does, and return this rank's rows.

    The rows fit together only if the generators of all ranks have equal states, which callers see to.
    """
    sizes = _shape(args, kwargs)
    shape, rows = list(map(int, sizes)), sharded_dim(sizes)
    if rows is None:
        raise TypeError(
            f"{name_of(func)} of {shape}: expected exactly one size that was read from a sharded dim."
        )
    if torch.compiler.is_compiling() and kwargs.get("generator") is None:
        raise mixing_error(func, rows, "in a compiled function each rank has its own random state")
    rest = {name: value for name, value in kwargs.items() if name != "size"}
    return set_rows(part_of(func(shape, **rest), rows, ranks).contiguous(), rows)


def _shape(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the sizes that a call gets: as ``size=``, in a list or tuple, or as positional ints."""
    if "size" in kwargs:
        return list(kwargs["size"])
    if args and isinstance(args[0], (list, tuple)):
        return list(args[0])
    return [size for size in args if isinstance(size, int)]


BY_RULE: dict[Any, str] = {run_filled: "new_zeros new_ones new_empty new_full"}

# Rules for calls in which one of the sizes is a ShardedSize and no tensor is sharded.
FACTORIES: dict[str, Any] = {
    **dict.fromkeys(("zeros", "ones", "empty", "full"), run_filled),
    **dict.fromkeys(("randn", "rand"), run_random),
    **dict.fromkeys(("expand", "broadcast_to"), run_expand),
    "repeat_interleave": run_repeat_frames,
}
