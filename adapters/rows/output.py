"""What an autoencoder or a UNet returns, from the ranks that computed it to those that want it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.consistency import error_record, exchange, raise_first_error
from para_core.distributed.mesh import GuidedMesh, MeshDim
from para_core.spatial.fetch import start_fetch
from para_core.spatial.rows import Layout
from para_core.spatial.tag import Rows, rows_of, untagged

Gather = Literal["all", "first"]
# What a result is made of, as JSON: "tensor", ["tuple", [...]] or ["list", [...]], ["module:Class", {field: ...}],
# ["module:Class", number of tensors] of a distribution.
Form = Any


def delivered(compute: Callable[[], Any], workers: int, ranks: MeshDim, mesh: GuidedMesh, gather: Gather) -> Any:
    """What ``compute`` gives, of all rows, on the ranks that want it; it is called on the first ``workers`` ranks.

    Where some ranks do not work, one exchange tells them the form of the result, or the error.
    """
    works = ranks.index < workers
    record: dict[str, Any] = {}
    result, form, tensors = None, None, []
    if works:
        try:
            result = compute()
            form, tensors = _form(result), list(_tensors(result))
        except Exception as error:
            if workers == ranks.size:
                raise
            kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
            record = error_record(kind(error if isinstance(error, kind) else f"{type(error).__name__}: {error}"))
    if workers < ranks.size:
        if works and not record:
            record = {"form": form, "tensors": [_described(x) for x in tensors]}
        records = exchange(record, mesh)
        raise_first_error(records)
        form = records[0]["form"]
        if not works:
            tensors = [_nothing(described) for described in records[0]["tensors"]]
    found = iter([_whole(x, workers, ranks, gather) for x in tensors])
    return _together(form, found)


def _whole(x: Tensor, workers: int, ranks: MeshDim, gather: Gather) -> Tensor:
    """All of ``x``, of which the first ``workers`` ranks hold rows, or all."""
    rows = rows_of(x)
    shape = list(x.shape)
    if rows is None:
        if workers == ranks.size:
            return x
        # As many rows as elements, all of them on the first rank.
        size = int(torch.Size(shape).numel())
        mine = x.reshape(-1) if ranks.index == 0 else x.new_empty(0)
        return _gathered(mine, Rows(0, (size, *[0] * (ranks.size - 1))), ranks, gather).view(shape)
    layout: Layout = (*rows.layout, *[0] * (ranks.size - len(rows.layout)))
    return _gathered(x, Rows(rows.dim, layout, rows.outer), ranks, gather)


def _gathered(x: Tensor, rows: Rows, ranks: MeshDim, gather: Gather) -> Tensor:
    if gather == "all":
        return all_gather(x, rows.layout, rows.dim, ranks).contiguous()
    wanted = (((0, sum(rows.layout)),), *[()] * (ranks.size - 1))
    found = start_fetch(x, rows, wanted, ranks)()
    if found:
        return found[0].contiguous()
    # Of its shape, and without its memory.
    return x.new_zeros(()).expand([*x.shape[: rows.dim], rows.total, *x.shape[rows.dim + 1 :]])


def _described(x: Tensor) -> dict[str, Any]:
    rows = rows_of(x)
    of_rows = None if rows is None else [rows.dim, list(rows.layout), rows.outer]
    return {
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": x.device.type,
        "rows": of_rows,
    }


def _nothing(described: dict[str, Any]) -> Tensor:
    """What a rank holds that did not compute: no row."""
    shape, dtype = list(described["shape"]), getattr(torch, described["dtype"])
    if described["rows"] is None:
        return torch.zeros((), dtype=dtype, device=described["device"]).expand(shape)
    dim, layout, outer = described["rows"]
    shape[dim] = 0
    x = torch.empty(shape, dtype=dtype, device=described["device"])
    x._para_core_rows = Rows(dim, tuple(layout), outer)  # type: ignore[attr-defined]
    return x


# -- taking apart, putting together


def _parameters(value: Any) -> list[Tensor] | None:
    """What a distribution of diffusers is made of; None of anything else."""
    if hasattr(value, "parameters") and hasattr(value, "logvar"):
        return [value.parameters]
    return [value.mean, value.logs] if hasattr(value, "mean") and hasattr(value, "logs") else None


def holds_distribution(value: Any) -> bool:
    """Whether ``value``, what an autoencoder returned, is or holds a distribution."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return _parameters(value) is not None or any(holds_distribution(one) for one in parts)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif (parameters := _parameters(value)) is not None:
        yield from parameters
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _form(value: Any) -> Form:
    if isinstance(value, Tensor):
        return "tensor"
    if (parameters := _parameters(value)) is not None:
        return [f"{type(value).__module__}:{type(value).__name__}", len(parameters)]
    if isinstance(value, (tuple, list)):
        return ["list" if isinstance(value, list) else "tuple", [_form(one) for one in value]]
    if isinstance(value, dict):
        return [f"{type(value).__module__}:{type(value).__name__}", {name: _form(one) for name, one in value.items()}]
    raise TypeError(f"a model returned a {type(value).__name__}; expected tensors, or one of diffusers' outputs.")


def _together(form: Form, tensors: Iterator[Tensor]) -> Any:
    if form == "tensor":
        return untagged(next(tensors))
    kind, parts = form
    if isinstance(parts, int):
        return _class(kind)(*[untagged(next(tensors)) for _ in range(parts)])
    if kind in ("tuple", "list"):
        found = [_together(one, tensors) for one in parts]
        return found if kind == "list" else tuple(found)
    return _class(kind)(**{field: _together(one, tensors) for field, one in parts.items()})


def _class(name: str) -> Any:
    module, _, qualified = name.partition(":")
    return getattr(import_module(module), qualified)
