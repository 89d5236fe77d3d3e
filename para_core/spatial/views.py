"""Views, joining and taking apart: where the dim of rows goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.spatial.errors import name_of, unknown
from para_core.spatial.local import aligned
from para_core.spatial.rows import Layout, held
from para_core.spatial.tag import Rows, local_sizes, rows_of, tagged

Function = Callable[..., Any]


def reordered(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``permute``, ``transpose``, ``squeeze`` and others that move, add or drop dims: seen on a tensor of one size a dim."""
    x, rows = _first(func, args, kwargs)
    # Sizes that tell dims apart. What has size 1 may be squeezed; rows may not, however few this rank holds.
    sizes = [1 if size == 1 and dim != rows.dim else dim + 2 for dim, size in enumerate(x.shape)]
    with torch.device("meta"):
        shape = func(torch.empty(sizes), *args[1:], **kwargs).shape
    return _checked(func, func(*args, **kwargs), rows.at(shape.index(rows.dim + 2)), ranks)


def reshaped(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``view``, ``reshape``, ``flatten``, ``unflatten``: products of sizes before and after say where rows are."""
    x, rows = _first(func, args, kwargs)
    out = func(*local_sizes(tuple(args)), **{name: local_sizes(value) for name, value in kwargs.items()})
    if out.shape == x.shape:
        return tagged(out, rows)
    found = match(tuple(x.shape), rows, tuple(out.shape), ranks.index)
    if found is None:
        raise unknown(func, rows, f"from {list(x.shape)} to {list(out.shape)} they are in no one dim")
    return _checked(func, out, found, ranks)


def match(before: tuple[int, ...], rows: Rows, after: tuple[int, ...], rank: int) -> Rows | None:
    """Where the rows of a tensor of local shape ``before`` are in the shape ``after`` of the same elements; None: nowhere.

    Rows may be merged with what is before them (frames), and after (columns), and a row may be what several were.

    >>> match((2, 6, 5), Rows(1, (6, 4)), (2, 30), rank=0)
    Rows(dim=1, layout=(30, 20), outer=1)
    >>> match((3, 30), Rows(1, (30, 20)), (3, 6, 5), rank=0)
    Rows(dim=1, layout=(6, 4), outer=1)
    >>> match((3, 6, 5), Rows(1, (6, 4)), (90,), rank=0)
    Rows(dim=0, layout=(30, 20), outer=3)
    >>> match((1, 8, 0, 6, 5), Rows(3, (6, 4)), (1, 2, 4, 0, 6, 5), rank=0)
    Rows(dim=4, layout=(6, 4), outer=1)
    >>> match((1, 8, 0, 2, 6, 2, 5), Rows(4, (6, 4)), (1, 8, 0, 12, 5), rank=0)
    Rows(dim=3, layout=(12, 8), outer=1)
    """
    before, after = _with_elements(before, after)
    units = rows.layout[rank]
    first, last = math.prod(before[: rows.dim]) * rows.outer, math.prod(before[rows.dim + 1 :])
    best: tuple[tuple[int, int, int], Rows] | None = None
    for dim, size in enumerate(after):
        left, right = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if first % left:
            continue
        outer = first // left
        merged, parts = (last // right, 1) if last % right == 0 else (1, right // last)
        if merged * right != last * parts or any(count % parts for count in rows.layout):
            continue
        if size != outer * units // parts * merged:
            continue
        layout = tuple([count // parts * merged for count in rows.layout])
        rank_of = (parts, outer, merged)
        if best is None or rank_of < best[0]:
            best = rank_of, Rows(dim, layout, outer)
    return None if best is None else best[1]


def _with_elements(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both shapes with other sizes in place of 0: a tensor without frames says as much of its rows as one with frames."""
    one, other = math.prod(size or 1 for size in before), math.prod(size or 1 for size in after)
    return _without_zeros(before, max(1, other // one)), _without_zeros(after, max(1, one // other))


def _without_zeros(shape: tuple[int, ...], first: int) -> tuple[int, ...]:
    at = shape.index(0) if 0 in shape else -1
    return tuple([first if dim == at else size or 1 for dim, size in enumerate(shape)])


def apart(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``chunk``, ``split``, ``unbind``, ``select``, ``narrow``, ``index_select``, along another dim than that of rows."""
    x, rows = _first(func, args, kwargs)
    name = name_of(func)
    at = 1 if name in ("unbind", "select", "narrow", "index_select") else 2
    dim = kwargs.get("dim", args[at] if len(args) > at else 0) % x.ndim
    if dim == rows.dim:
        raise unknown(func, rows, "it takes them apart")
    made = rows.at(rows.dim - 1) if name in ("unbind", "select") and dim < rows.dim else rows
    out = func(*args, **kwargs)
    for one in (out,) if isinstance(out, Tensor) else out:
        tagged(one, made)
    return out


def taken(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``x[...]``. Of rows, some may be left out at the start and at the end, as long as every rank keeps one."""
    x, index = args
    rows = rows_of(x)
    if rows is None:
        raise unknown(func, rows_of(index) or Rows(0, (0,)), "an index is sharded")
    local, layout, dim = _local_index(func, x, rows, index, ranks)
    if dim is None:
        raise unknown(func, rows, f"index {index!r} takes them apart")
    return _checked(func, func(x, local), Rows(dim, layout, rows.outer), ranks)


def put(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """``x[...] = value``, of all rows."""
    x, index, value = args
    rows = rows_of(x)
    if rows is None:
        raise unknown(func, rows_of(value) or Rows(0, (0,)), "it is written into a replicated one")
    local, layout, dim = _local_index(func, x, rows, index, ranks)
    if dim is None or layout != rows.layout:
        raise unknown(func, rows, f"index {index!r} takes them apart")
    if isinstance(value, Tensor):
        value = aligned(ranks, func, value, rows, dim - x[local].ndim)
    func(x, local, value)


def _local_index(
    func: Function, x: Tensor, rows: Rows, index: Any, ranks: MeshDim
) -> tuple[tuple[Any, ...], Layout, int | None]:
    """What this rank's index is, and what the layout and the dim of rows become; None: they are not kept."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts):
        return (), rows.layout, None
    consumed = sum(part is not None and part is not Ellipsis for part in parts)
    fill = [slice(None)] * (x.ndim - consumed)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    parts = parts + fill if at is None else parts[:at] + fill + parts[at + 1 :]
    layout, made, dim, advanced = rows.layout, None, 0, 0
    place = 0  # of the result
    for i, part in enumerate(parts):
        if part is None:
            place += 1
            continue
        if isinstance(part, slice):
            if dim == rows.dim:
                kept = _kept(part, rows)
                if kept is None:
                    return (), layout, None
                parts[i], layout, made = kept[1][ranks.index], kept[0], place
            place += 1
        elif isinstance(part, int):
            if dim == rows.dim:
                return (), layout, None
        else:  # one index of one dim stays where it is
            advanced += 1
            if dim == rows.dim or advanced > 1 or (isinstance(part, Tensor) and part.ndim != 1):
                return (), layout, None
            place += 1
        dim += 1
    if advanced and any(isinstance(part, int) for part in parts):
        return (), layout, None
    return tuple(parts), layout, made


def _kept(part: slice, rows: Rows) -> tuple[Layout, list[slice]] | None:
    """The layout of rows after ``part`` of them was taken, and each rank's slice."""
    total = sum(rows.layout)
    if part.step not in (None, 1):
        return None
    start, stop, _ = part.indices(rows.outer * total)
    if (start, stop) == (0, rows.outer * total):
        return rows.layout, [slice(None)] * len(rows.layout)
    if rows.outer > 1:
        return None
    spans = [(max(low, start) - low, min(high, stop) - low) for low, high in held(rows.layout)]
    layout = tuple([last - first for first, last in spans])
    return None if min(layout) < 1 else (layout, [slice(first, last) for first, last in spans])


def joined(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``cat`` and ``stack`` along another dim than that of rows."""
    tensors = list(kwargs["tensors"] if "tensors" in kwargs else args[0])
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    lead, rows = next((x, found) for x in tensors if (found := rows_of(x)) is not None)
    stacks = name_of(func) == "stack"
    dim = dim % (lead.ndim + stacks)
    if not stacks and dim == rows.dim:
        raise unknown(func, rows, "it joins them with others")
    # Tensors without elements are taken by cat whatever their shape.
    parts = [x if x.numel() == 0 else aligned(ranks, func, x, rows, rows.dim - lead.ndim) for x in tensors]
    if any(x.numel() and x.ndim == lead.ndim and x.shape[rows.dim] != lead.shape[rows.dim] for x in parts):
        raise unknown(func, rows, "it joins them with a tensor of one row")
    return tagged(func(parts, dim), rows.at(rows.dim + 1) if stacks and dim <= rows.dim else rows)


def repeated(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``expand``, ``repeat`` and ``tile``, of other dims than that of rows."""
    x, rows = _first(func, args, kwargs)
    if name_of(func) in ("expand", "broadcast_to"):
        args = local_sizes(tuple(args))
    out = func(*args, **kwargs)
    return _checked(func, out, rows.at(rows.dim + out.ndim - x.ndim), ranks)


def interleaved(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``repeat_interleave``: each row so often, or along another dim."""
    x, rows = _first(func, args, kwargs)
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if dim is None or not isinstance(repeats, int):
        raise unknown(func, rows, "repeats= is a tensor, or there is no dim=")
    if dim % x.ndim != rows.dim:
        return tagged(func(*args, **kwargs), rows)
    layout = tuple([count * repeats for count in rows.layout])
    return tagged(x.repeat_interleave(repeats, dim), Rows(rows.dim, layout, rows.outer))


def in_pairs(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``view_as_real``: complex numbers as pairs, in one more dim at the end."""
    _, rows = _first(func, args, kwargs)
    return tagged(func(*args, **kwargs), rows)


def expanded_as(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``expand_as``, ``view_as``: with the rows of the other."""
    x, other = args
    rows = rows_of(other)
    if rows is None or name_of(func) != "expand_as":
        raise unknown(func, rows or rows_of(x) or Rows(0, (0,)), "it takes its shape from another tensor")
    return tagged(func(aligned(ranks, func, x, rows, rows.dim - other.ndim), other), rows)


def _first(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Rows]:
    x = args[0] if args else kwargs["input"]
    rows = rows_of(x)
    if rows is None:
        raise unknown(func, Rows(0, (0,)), "an argument other than the first is sharded")
    return x, rows


def _checked(func: Function, out: Tensor, rows: Rows, ranks: MeshDim) -> Tensor:
    if out.shape[rows.dim] != rows.outer * rows.layout[ranks.index]:
        raise unknown(func, rows, f"the result has {out.shape[rows.dim]} along their dim")
    return tagged(out, rows)


_BY_RULE: dict[Any, str] = {
    reordered: "transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze t T.__get__ mT.__get__ adjoint",
    reshaped: "view reshape flatten unflatten ravel",
    apart: "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unbind select narrow index_select",
    taken: "getitem",
    put: "setitem",
    joined: "cat concat concatenate stack",
    repeated: "expand repeat tile broadcast_to",
    interleaved: "repeat_interleave",
    in_pairs: "view_as_real",
    expanded_as: "expand_as view_as",
}
RULES: dict[str, Any] = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
