"""Rules of :mod:`.mode` for functions of one row, elementwise functions, functions along one dim, reductions,
meshgrid and dropout, and helpers of the other files of rules.

A rule is called as ``rule(ranks, func, args, kwargs)`` with this rank's rows. At least one tensor is sharded,
though perhaps not the first one. The mode is off inside a rule, so ``func`` sees plain tensors, and a rule
must mark what it returns (:func:`.row_tag.set_rows`). The mode refuses an ``out=`` tensor before it calls a
rule. A rule that exchanges rows is collective: every rank runs the same functions in the same order, and
raises :class:`MixesRows` by what is equal on all ranks.

``BY_RULE`` at the end names the functions of each rule, as :func:`~para_core.torch_functions.name_of` does;
no name may stand in two files. :mod:`para_core.same_bits.image_rows` repeats the names whose bits depend on
the number of rows. Tests: tests/spatial/test_functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.layout.windows import Sizes
from para_core.spatial.fetch import gather_rows, part_of, relayout_rows, stack_ranks
from para_core.spatial.row_tag import (
    RowTag,
    ShardedSize,
    clear_rows,
    first_sharded,
    mixing_error,
    rows_of,
    set_rows,
)
from para_core.torch_functions import OF_ONE, OF_SEVERAL, Function, is_in_place, name_of

# Functions that work along one dim and leave the other dims as they are, each with the position and the
# default of its argument ``dim``. The position is None for functions that always work along the last dims.
ALONG = {
    "softmax": (1, None),
    "log_softmax": (1, None),
    "cumsum": (1, None),
    "flip": (1, None),
    "glu": (1, -1),
    "normalize": (2, 1),
    "adaptive_avg_pool1d": (2, -1),
    "layer_norm": (None, None),
    "rms_norm": (None, None),
}

# Reductions, each with the positions of its arguments ``dim`` and ``keepdim``.
REDUCTIONS = {
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "argmax", "argmin", "any", "all", "prod", "logsumexp"), (1, 2)
    ),
    **dict.fromkeys(("max", "min"), (1, 2)),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm"), (2, 3)),
    **dict.fromkeys(("var", "std"), (1, 3)),
}

# Keywords that torch takes in place of its own, as ``x.mean(axis=1, keepdims=True)``.
_NUMPY_NAMES = {"dim": "axis", "keepdim": "keepdims"}


def run_metadata(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what is the same on all ranks, such as a dtype."""
    return func(*args, **kwargs)


def run_shape(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the shape, size, numel or len of the full tensor, with a :class:`ShardedSize` for the sharded dim."""
    local = func(*args, **kwargs)
    rows = rows_of(args[0])
    if rows is None:
        return local
    count = ShardedSize(rows.sizes, ranks.index, rows.outer)
    name = name_of(func)
    if name in ("numel", "nelement"):
        rest = [size for dim, size in enumerate(args[0].shape) if dim != rows.dim]
        return count * math.prod(rest)
    if name == "len" and rows.dim == 0:
        return int(count)
    if name == "len":
        return local
    if isinstance(local, int):  # x.size(dim)
        if argument(args, kwargs, "dim", 1, 0) % args[0].ndim == rows.dim:
            return count
        return local
    sizes = list(local)
    sizes[rows.dim] = count
    return torch.Size(sizes)


def argument(args: Sequence[Any], kwargs: dict[str, Any], name: str, index: int, default: Any = None) -> Any:
    """Return the argument passed as keyword ``name``, or as the one that NumPy uses for it, or at position
    ``index``; ``default`` if there is none.
    """
    if name in kwargs:
        return kwargs[name]
    if len(args) > index:
        return args[index]
    return kwargs.get(_NUMPY_NAMES.get(name, name), default)


def bind(func: Function, args: Sequence[Any], kwargs: dict[str, Any], **parameters: Any) -> list[Any]:
    """Return all arguments of a call of ``func`` in the order of ``parameters``, its parameters with their
    defaults. Raise ``TypeError`` for an argument that is not among them.
    """
    unexpected = [*kwargs.keys() - parameters.keys(), *args[len(parameters) :]]
    if unexpected:
        raise TypeError(f"{name_of(func)} got {unexpected}; expected arguments among {list(parameters)}.")
    return [argument(args, kwargs, name, i, default) for i, (name, default) in enumerate(parameters.items())]


def run_like_first(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on this rank's rows. An output with the shape of the first argument is sharded like this
    argument.

    The functions with this rule read only the dtype and device of other tensor arguments, as ``x.to(other)``
    does.
    """
    out = func(*args, **kwargs)
    x = argument(args, kwargs, "input", 0)
    rows = rows_of(x)
    if rows is not None and isinstance(out, Tensor) and isinstance(x, Tensor) and out.shape == x.shape:
        return set_rows(out, rows)
    return out


def run_elementwise(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a broadcasting function on this rank's rows, with all tensors in the layout of the first sharded one."""
    values = (*args, *kwargs.values())
    tensors = [x for x in values if isinstance(x, Tensor)]
    lead = next((x for x in tensors if rows_of(x) is not None), None)
    rows = rows_of(lead)
    if lead is None or rows is None:
        raise mixing_error(func, first_sharded(values), "its tensors are in a list")
    if is_in_place(func) and lead is not tensors[0]:
        raise mixing_error(func, rows, "it is written into a replicated tensor")
    dim_from_end = rows.dim - lead.ndim

    def fit(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return align(ranks, func, x, rows, dim_from_end)

    out = func(*[fit(x) for x in args], **{name: fit(x) for name, x in kwargs.items()})
    # torch.where(x) returns a tuple of indices, which would count this rank's rows only.
    if isinstance(out, tuple):
        raise mixing_error(func, rows, "it returns indices in this rank's rows")
    if not isinstance(out, Tensor):
        # NotImplemented, if a tensor is compared with another type: Wan compares a cache entry with a string.
        return out
    return set_rows(out, rows.at(out.ndim + dim_from_end))


def align(ranks: MeshDim, func: Function, x: Tensor, rows: RowTag, dim_from_end: int) -> Tensor:
    """Return this rank's part of ``x``, a replicated or sharded tensor, sharded along the negative dim
    ``dim_from_end`` in the layout of ``rows``. Return ``x`` itself if it broadcasts along this dim. Raise
    :class:`MixesRows` if ``x`` has another number of rows. Collective if ``x`` is sharded in another way.
    """
    rows_of_x = rows_of(x)
    if rows_of_x is not None and rows_of_x.dim - x.ndim != dim_from_end:
        # x is sharded along another dim, for example the keys of an attention matrix instead of the queries.
        x, rows_of_x = clear_rows(gather_rows(x, rows_of_x, ranks)), None
    if rows_of_x is not None:
        if rows_of_x.outer != rows.outer or sum(rows_of_x.sizes) != sum(rows.sizes):
            raise mixing_error(func, rows, f"with one sharded as {rows_of_x}")
        if rows_of_x.sizes == rows.sizes:
            return x
        return set_rows(relayout_rows(x, rows_of_x, rows.sizes, ranks), rows.at(rows_of_x.dim))
    if x.ndim < -dim_from_end or x.shape[dim_from_end] == 1:
        return x
    if x.shape[dim_from_end] != rows.total:
        raise mixing_error(
            func, rows, f"with a replicated one of shape {list(x.shape)}, expected {rows.total} there"
        )
    return part_of(x, rows.at(x.ndim + dim_from_end), ranks)


def run_along_dim(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run a function that works along one dim, such as softmax or layer norm, on this rank's rows. Raise
    :class:`MixesRows` if it works along the sharded dim.
    """
    x, rows = only_first(func, args, kwargs)
    position, default = ALONG[name_of(func)]
    if position is None:
        shape = argument(args, kwargs, "normalized_shape", 1)
        dims = set(range(x.ndim - len(shape), x.ndim))
    else:
        dim = argument(args, kwargs, "dim", position, kwargs.get("dims", default))
        if name_of(func) == "flip" and len(args) > 2:
            # ``x.flip(2, 3)`` takes each dim as an argument.
            dim = args[1:]
        dims = dims_of(dim, x.ndim)
    if rows.dim in dims:
        raise mixing_error(func, rows, "it combines rows along this dim")
    return set_rows(func(*args, **kwargs), rows)


def run_reduction(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a reduction such as ``mean``, ``sum`` or ``argmax``. If the sharded dim is reduced, which ``sum``,
    ``mean``, ``amax`` and ``amin`` support, all ranks combine their results.
    """
    name = name_of(func)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return run_elementwise(ranks, func, args, kwargs)
    x, rows = only_first(func, args, kwargs)
    dim_position, keepdim_position = REDUCTIONS[name]
    dim = argument(args, kwargs, "dim", dim_position)
    keepdim = bool(argument(args, kwargs, "keepdim", keepdim_position, False))
    if isinstance(dim, bool):
        dim = None  # A bool at this position is ``unbiased`` instead, as in x.var(False), so all dims are reduced.
    dims = dims_of(dim, x.ndim)
    if rows.dim in dims:
        if name not in ("sum", "mean", "amax", "amin"):
            raise mixing_error(func, rows, "it reduces them")
        return _reduce_rows(ranks, name, x, rows, sorted(dims), keepdim, kwargs.get("dtype"))
    out_dim = rows.dim
    if not keepdim:
        out_dim -= sum(dim < rows.dim for dim in dims)
    return tag_all(func(*args, **kwargs), rows.at(out_dim))


def _reduce_rows(
    ranks: MeshDim,
    name: str,
    x: Tensor,
    rows: RowTag,
    dims: list[int],
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return the sum, mean, amax or amin, by its ``name``, along ``dims`` of the rows of all ranks. Collective."""
    if name in ("amax", "amin"):
        reduce = getattr(torch, name)
        extreme: Tensor = reduce(stack_ranks(reduce(x, dims, keepdim), ranks), 0)
        return extreme
    if dtype is None:
        dtype = x.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            dtype = torch.int64  # PyTorch sums integers in int64.
    if name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return x.mean(dims, keepdim, dtype=dtype)  # It raises PyTorch's own error, on all ranks.
    total = stack_ranks(x.sum(dims, keepdim, dtype=sum_dtype(dtype)), ranks).sum(0)
    if name == "mean":
        total = total / (rows.total * math.prod([x.shape[dim] for dim in dims if dim != rows.dim]))
    return total.to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are added: float32 for 16-bit floats."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


def run_meshgrid(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``torch.meshgrid``.
    The input along the first dim of the outputs stays sharded, the others are gathered.
    """
    tensors = list(args)
    if isinstance(args[0], (tuple, list)):
        tensors = list(args[0])
    lead = int(kwargs.get("indexing") == "xy" and len(tensors) > 1)
    rows = rows_of(tensors[lead])
    for index, x in enumerate(tensors):
        rows_of_x = rows_of(x)
        if rows_of_x is not None and index != lead:
            tensors[index] = gather_rows(x, rows_of_x, ranks)
    out = func(*tensors, **kwargs)
    if rows is None:
        return out
    return tag_all(out, rows)


def run_dropout(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run a dropout in eval mode or of probability 0. Raise :class:`MixesRows` for any other."""
    _, rows = only_first(func, args, kwargs)
    training = argument(args, kwargs, "training", 2, kwargs.get("train", True))
    if training and argument(args, kwargs, "p", 1, 0.5) > 0:
        raise mixing_error(func, rows, "each rank would draw for its own rows. Call .eval() first")
    return set_rows(func(*args, **kwargs), rows)


def only_first(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, RowTag]:
    """Return the first argument of a call of ``func``, and its tag.
    Raise :class:`MixesRows` if it is not sharded, or another tensor is, such as an index or a weight.
    """
    x = argument(args, kwargs, "input", 0)
    rows = rows_of(x)
    values = (*args, *kwargs.values())
    if rows is None or any(rows_of(value) is not None for value in values if value is not x):
        raise mixing_error(func, first_sharded(values), "an argument other than the first is sharded")
    return x, rows


def require_rows(func: Function, rows: RowTag, sizes: Sizes) -> None:
    """Raise :class:`MixesRows` if a rank would get no output row of ``func``, of which ranks get ``sizes``."""
    if min(sizes) < 1:
        raise mixing_error(
            func, rows, f"its output would have {list(sizes)} rows on the ranks; every rank needs one"
        )


def dims_of(dim: Any, ndim: int) -> set[int]:
    """Return the argument ``dim`` of a function as a set of positive dims; all dims for None and an empty list."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return set(range(ndim))
    if isinstance(dim, (list, tuple)):
        return {each % ndim for each in dim}
    return {dim % ndim}


def tag_all(out: Any, rows: RowTag) -> Any:
    """Mark the tensor ``out``, or each tensor of a sequence, as sharded, and return ``out`` itself."""
    if isinstance(out, Tensor):
        return set_rows(out, rows)
    for x in out:
        set_rows(x, rows)
    return out


BY_RULE: dict[Any, str] = {
    # Functions that read properties of a tensor other than its values and shape. Byte counts and strides are
    # those of this rank's part of the rows.
    run_metadata: """
        dtype.__get__ device.__get__ ndim.__get__ layout.__get__ is_cuda.__get__ is_cpu.__get__
        is_meta.__get__ is_mps.__get__ is_xpu.__get__ is_xla.__get__ is_quantized.__get__ is_sparse.__get__
        is_nested.__get__ is_leaf.__get__ is_mkldnn.__get__ requires_grad.__get__ grad_fn.__get__ grad.__get__
        itemsize.__get__ nbytes.__get__ output_nr.__get__ dim ndimension stride storage_offset
        is_contiguous is_floating_point is_complex element_size get_device data_ptr untyped_storage hash is_signed
        is_inference result_type can_cast promote_types
    """,
    run_shape: "shape.__get__ size numel nelement len",
    run_like_first: OF_ONE,
    run_elementwise: OF_SEVERAL,
    run_along_dim: " ".join(ALONG),
    run_reduction: " ".join(REDUCTIONS),
    run_meshgrid: "meshgrid",
    run_dropout: "dropout dropout2d dropout3d alpha_dropout feature_dropout",
}
