"""Rules for views, indexing, splitting and concatenation, which may move the sharded rows to another dim.

Rules are explained in :mod:`.rules`. Nothing here is collective but :func:`~para_core.spatial.rules.align`.
Tests: tests/spatial/test_functions.py, and the examples below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.layout.windows import Sizes, bounds_of
from para_core.spatial.row_tag import RowTag, full_sizes, local_sizes, mixing_error, rows_of, set_rows
from para_core.spatial.rules import align, argument, dims_of, only_first, tag_all
from para_core.torch_functions import Function, name_of


def run_reorder(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``permute``, ``transpose``, ``unsqueeze`` and other functions that move or add dims."""
    x, rows = only_first(func, args, kwargs)
    # Find the new index of the sharded dim with a meta tensor whose dims all have different sizes. A new dim
    # has size 1.
    like = torch.empty([dim + 2 for dim in range(x.ndim)], device="meta")
    named = {name: like if value is x else value for name, value in kwargs.items()}
    shape = func(*[like if value is x else value for value in args], **named).shape
    return _set_checked_rows(func, func(*args, **kwargs), rows.at(shape.index(rows.dim + 2)), ranks)


def run_squeeze(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``squeeze``. It keeps the sharded dim, of which a rank may hold a single row."""
    x, rows = only_first(func, args, kwargs)
    dims = dims_of(argument(args, kwargs, "dim", 1), x.ndim) - {rows.dim}
    dropped = [dim for dim in dims if x.shape[dim] == 1]
    return set_rows(func(x, dropped), rows.at(rows.dim - sum(dim < rows.dim for dim in dropped)))


def run_reshape(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``view``, ``reshape``, ``flatten`` or ``unflatten`` with this rank's sizes in place of the full ones."""
    x, rows = only_first(func, args, kwargs)
    before = [*x.shape]
    before[rows.dim] = rows.total
    # The shapes of the full tensor, equal on all ranks, decide: a size of -1 stands for another number on a rank.
    full = torch.empty(before, dtype=x.dtype, device="meta")
    options = {name: full_sizes(value) for name, value in kwargs.items() if name != "input"}
    after = func(full, *full_sizes(tuple(args[1:])), **options).shape
    is_of_dtype = isinstance(argument(args, kwargs, "dtype", 1), torch.dtype)
    out_rows: RowTag | None = rows
    if after != full.shape:
        out_rows = match_reshape(tuple(before), rows, tuple(after))
    if out_rows is None:
        raise mixing_error(func, rows, f"from {before} to {[*after]} the rows do not stay in one dim")
    if is_of_dtype:
        return _set_checked_rows(func, func(*args, **kwargs), out_rows, ranks)
    sizes = [*after]
    sizes[out_rows.dim] = out_rows.outer * out_rows.sizes[ranks.index]
    if name_of(func) in ("view", "unflatten"):
        return set_rows(x.view(sizes), out_rows)
    return set_rows(x.reshape(sizes), out_rows)


def match_reshape(before: tuple[int, ...], rows: RowTag, after: tuple[int, ...]) -> RowTag | None:
    """Return the tag after a reshape of the full tensor from ``before`` to ``after``; None if several dims
    would hold rows.

    Rows may be merged with dims before them (frames) and after them (columns), and several units (see
    :class:`RowTag`) may become one unit.

    >>> match_reshape((2, 10, 5), RowTag(1, (6, 4)), (2, 50))
    RowTag(dim=1, sizes=(30, 20), outer=1)
    >>> match_reshape((3, 50), RowTag(1, (30, 20)), (3, 10, 5))
    RowTag(dim=1, sizes=(6, 4), outer=1)
    >>> match_reshape((3, 10, 5), RowTag(1, (6, 4)), (150,))
    RowTag(dim=0, sizes=(30, 20), outer=3)
    >>> match_reshape((1, 8, 0, 10, 5), RowTag(3, (6, 4)), (1, 2, 4, 0, 10, 5))
    RowTag(dim=4, sizes=(6, 4), outer=1)
    >>> match_reshape((1, 8, 0, 2, 10, 2, 5), RowTag(4, (6, 4)), (1, 8, 0, 20, 5))
    RowTag(dim=3, sizes=(12, 8), outer=1)
    """
    # Replace sizes of 0 by positive ones, so that empty tensors match too, such as a cache of zero frames.
    num_before, num_after = (math.prod(size or 1 for size in shape) for shape in (before, after))
    before = _without_zeros(before, max(1, num_after // num_before))
    after = _without_zeros(after, max(1, num_before // num_after))
    units = sum(rows.sizes)
    first, last = math.prod(before[: rows.dim]) * rows.outer, math.prod(before[rows.dim + 1 :])
    best: RowTag | None = None
    lowest_cost = (math.inf, math.inf, math.inf)
    for dim, size in enumerate(after):
        left, right = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if first % left:
            continue
        outer = first // left
        merged, parts = last // right, 1
        if last % right:
            merged, parts = 1, right // last
        if merged * right != last * parts or any(count % parts for count in rows.sizes):
            continue
        if size != outer * units // parts * merged:
            continue
        sizes = tuple([count // parts * merged for count in rows.sizes])
        cost = (parts, outer, merged)
        if cost < lowest_cost:
            lowest_cost, best = cost, RowTag(dim, sizes, outer)
    return best


def _without_zeros(shape: tuple[int, ...], first: int) -> tuple[int, ...]:
    """Return ``shape`` with its first 0 replaced by ``first``, and the other ones by 1."""
    sizes = [size or 1 for size in shape]
    if 0 in shape:
        sizes[shape.index(0)] = first
    return tuple(sizes)


def run_split(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``chunk``, ``split``, ``select`` or a similar function along a dim other than the sharded one."""
    x, rows = only_first(func, args, kwargs)
    name = name_of(func)
    position = 1 if name in ("unbind", "select", "narrow", "index_select") else 2
    dim = argument(args, kwargs, "dim", position, 0) % x.ndim
    if dim == rows.dim:
        raise mixing_error(func, rows, "it separates them")
    if name in ("unbind", "select") and dim < rows.dim:
        rows = rows.at(rows.dim - 1)
    return tag_all(func(*args, **kwargs), rows)


def run_getitem(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``x[...]``. A slice may drop rows at the start and the end of the image, if every rank keeps one."""
    x, index = args
    rows = rows_of(x)
    if rows is None:
        raise mixing_error(func, rows_of(index), "an index is sharded")
    local, sizes, dim = _local_index(x, rows, index, ranks)
    if dim is None:
        raise mixing_error(func, rows, f"index {index!r} separates them")
    return _set_checked_rows(func, func(x, local), RowTag(dim, sizes, rows.outer), ranks)


def run_setitem(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run ``x[...] = value`` with an index that keeps all rows."""
    x, index, value = args
    rows = rows_of(x)
    if rows is None:
        raise mixing_error(func, rows_of(value), "it is written into a replicated tensor")
    local, sizes, dim = _local_index(x, rows, index, ranks)
    if dim is None or sizes != rows.sizes:
        raise mixing_error(func, rows, f"index {index!r} separates them")
    if isinstance(value, Tensor):
        value = align(ranks, func, value, rows, dim - x[local].ndim)
    func(x, local, value)


def _local_index(
    x: Tensor, rows: RowTag, index: Any, ranks: MeshDim
) -> tuple[tuple[Any, ...], Sizes, int | None]:
    """Return the index to apply to this rank's rows, and the sizes and the dim of the rows in its result.

    The dim is None if ``index`` does not keep consecutive rows together in one dim.
    """
    parts = _parts_of_index(index, x.ndim)
    if not _keeps_order(parts):
        return (), rows.sizes, None
    sizes, rows_dim, dim, out_dim = rows.sizes, None, 0, 0
    for i, part in enumerate(parts):
        if part is not None and dim == rows.dim:
            kept = _kept_rows(part, rows)
            if kept is None:
                return (), rows.sizes, None
            sizes, parts[i], rows_dim = kept[0], kept[1][ranks.index], out_dim
        dim += part is not None
        out_dim += not _is_number(part)
    return tuple(parts), sizes, rows_dim


def _parts_of_index(index: Any, ndim: int) -> list[Any]:
    """Return a part of ``index`` for each of ``ndim`` dims, and None for each new dim: whole slices stand in
    place of an ellipsis and for the last dims.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(part is not None and part is not Ellipsis for part in parts)
    ellipsis = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[ellipsis : ellipsis + 1] = [slice(None)] * (ndim - consumed)
    return parts


def _keeps_order(parts: Sequence[Any]) -> bool:
    """Whether an index leaves the dims that it keeps in their order: it has at most one list or tensor, a vector."""
    lists = [part for part in parts if not (part is None or isinstance(part, slice) or _is_number(part))]
    if not lists:
        return True
    # A number counts as an index tensor, and may move the dim of the other one to the front.
    if len(lists) > 1 or any(map(_is_number, parts)):
        return False
    (part,) = lists
    # A mask has as many dims as it selects from, and of a sharded index this rank holds a part.
    if isinstance(part, Tensor) and (part.dtype in (torch.bool, torch.uint8) or rows_of(part) is not None):
        return False
    return isinstance(part, (list, Tensor)) and torch.as_tensor(part).ndim == 1


def _is_number(part: Any) -> bool:
    """Whether a part of an index drops its dim. A bool adds one."""
    return isinstance(part, Integral) and not isinstance(part, bool)


def _kept_rows(part: Any, rows: RowTag) -> tuple[Sizes, list[slice]] | None:
    """Return the sizes of the rows that ``part`` of an index keeps, and the slice of each rank's own rows.
    Return None if it is no slice or has a step, if a rank would keep no row, or if it cuts a dim that
    contains several frames.
    """
    total = sum(rows.sizes)
    if not isinstance(part, slice) or part.step not in (None, 1):
        return None
    start, stop, _ = part.indices(rows.outer * total)
    if (start, stop) == (0, rows.outer * total):
        return rows.sizes, [slice(None)] * len(rows.sizes)
    if rows.outer > 1:
        return None
    spans = [(max(low, start) - low, min(high, stop) - low) for low, high in bounds_of(rows.sizes)]
    sizes = tuple([last - first for first, last in spans])
    if min(sizes) < 1:
        return None
    return sizes, [slice(first, last) for first, last in spans]


def run_cat(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``cat`` or ``stack`` along a dim other than the sharded one."""
    tensors = list(argument(args, kwargs, "tensors", 0))
    dim = argument(args, kwargs, "dim", 1, 0)
    lead, rows = next((x, tag) for x in tensors if (tag := rows_of(x)) is not None)
    stacks = name_of(func) == "stack"
    dim = dim % (lead.ndim + stacks)
    if not stacks and dim == rows.dim:
        raise mixing_error(func, rows, "it appends other rows")
    # Pass on tensors without elements as they are, because cat accepts them whatever their shape.
    dim_from_end = rows.dim - lead.ndim
    parts = [align(ranks, func, x, rows, dim_from_end) if x.numel() else x for x in tensors]
    # Ask for the whole tensors, equal on all ranks: a rank that holds a single row could join one.
    wholes = [x for x in tensors if x.numel() and rows_of(x) is None and x.ndim == lead.ndim]
    if any(x.shape[rows.dim] != rows.total for x in wholes):
        raise mixing_error(func, rows, "one of the tensors has a single row")
    if stacks and dim <= rows.dim:
        rows = rows.at(rows.dim + 1)
    return set_rows(func(parts, dim), rows)


def run_repeat(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``expand``, ``repeat`` or ``tile`` along dims other than the sharded one."""
    x, rows = only_first(func, args, kwargs)
    if name_of(func) in ("expand", "broadcast_to"):
        args, kwargs = local_sizes(tuple(args)), {name: local_sizes(size) for name, size in kwargs.items()}
    out = func(*args, **kwargs)
    return _set_checked_rows(func, out, rows.at(rows.dim + out.ndim - x.ndim), ranks)


def run_repeat_interleave(
    ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Run ``repeat_interleave`` with an int for ``repeats``, along any dim."""
    x, rows = only_first(func, args, kwargs)
    repeats, dim = argument(args, kwargs, "repeats", 1), argument(args, kwargs, "dim", 2)
    if dim is None or not isinstance(repeats, int):
        raise mixing_error(func, rows, "repeats= is a tensor, or there is no dim=")
    if dim % x.ndim != rows.dim:
        return set_rows(func(*args, **kwargs), rows)
    sizes = tuple([count * repeats for count in rows.sizes])
    return set_rows(x.repeat_interleave(repeats, dim), RowTag(rows.dim, sizes, rows.outer))


def run_view_as_real(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``view_as_real``, which adds a dim at the end."""
    _, rows = only_first(func, args, kwargs)
    return set_rows(func(*args, **kwargs), rows)


def run_expand_as(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``x.expand_as(other)``. The output is sharded like ``other``."""
    x, other = args
    rows = rows_of(other)
    if rows is None or name_of(func) != "expand_as":
        raise mixing_error(func, rows or rows_of(x), "it takes its shape from another tensor")
    return set_rows(func(align(ranks, func, x, rows, rows.dim - other.ndim), other), rows)


def _set_checked_rows(func: Function, out: Tensor, rows: RowTag, ranks: MeshDim) -> Tensor:
    """Tag ``out`` with ``rows`` and return it; raise :class:`MixesRows` if its size does not fit."""
    if out.shape[rows.dim] != rows.outer * rows.sizes[ranks.index]:
        raise mixing_error(func, rows, f"the output has size {out.shape[rows.dim]} along this dim")
    return set_rows(out, rows)


BY_RULE: dict[Any, str] = {
    run_reorder: """
        transpose swapaxes swapdims permute movedim moveaxis unsqueeze t T.__get__ mT.__get__ adjoint
    """,
    run_squeeze: "squeeze",
    run_reshape: "view reshape flatten unflatten ravel",
    run_split: "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unbind select narrow index_select",
    run_getitem: "getitem",
    run_setitem: "setitem",
    run_cat: "cat concat concatenate stack",
    run_repeat: "expand repeat tile broadcast_to",
    run_repeat_interleave: "repeat_interleave",
    run_view_as_real: "view_as_real",
    run_expand_as: "expand_as view_as",
}
