"""Rules for matrix products and attention of sharded rows.
Queries stay sharded; keys and values are gathered.

Rules are explained in :mod:`.rules`. This attention knows no ring and no Ulysses exchange: that of
transformers is :mod:`para_core.attention`. Tests: tests/spatial/test_functions.py, and
tests/spatial/test_vaes.py for masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.spatial.fetch import gather_rows, part_of, stack_ranks
from para_core.spatial.row_tag import RowTag, clear_rows, first_sharded, mixing_error, rows_of, set_rows
from para_core.spatial.rules import align, bind, only_first, sum_dtype
from para_core.torch_functions import Function, is_in_place, name_of


def run_linear(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.linear`` on this rank's rows.
    Raise :class:`MixesRows` if the product sums over the sharded dim.
    """
    x, rows = only_first(func, args, kwargs)
    if rows.dim == x.ndim - 1:
        raise mixing_error(func, rows, "it contracts them")
    return set_rows(func(*args, **kwargs), rows)


def run_matmul(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``matmul``, ``bmm`` or ``@`` if the first operand, the second operand or both are sharded, along any dim."""
    a, b = operands_of(func, args, kwargs)
    if name_of(func) == "rmatmul":
        a, b = b, a
    return _multiply(ranks, func, a, b)


def operands_of(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the operands of a product: two, or three of ``baddbmm``. Raise :class:`MixesRows` if one has a keyword."""
    number = 2
    if name_of(func) == "baddbmm":
        number = 3
    if len(args) != number:
        raise mixing_error(func, first_sharded((*args, *kwargs.values())), "its operands have keywords")
    return list(args)


def _multiply(ranks: MeshDim, func: Function, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``. If the rows of ``a`` are sharded, the output is too, and a sharded ``b`` is gathered.
    Collective if something is gathered or summed.

    If the dim that the product sums over is sharded in ``a``, the products of all ranks are summed. Linear
    attention therefore exchanges a channels × channels matrix instead of all tokens.
    """
    rows_a, rows_b = rows_of(a), rows_of(b)
    if min(a.ndim, b.ndim) < 2:
        raise mixing_error(func, rows_a or rows_b, "one operand is a vector")
    role_a, role_b = _role(a, rows_a, "row", "inner"), _role(b, rows_b, "inner", "column")
    if role_a == "inner" and role_b in ("inner", None) and rows_a is not None:
        partial = torch.matmul(a, align(ranks, func, b, rows_a, -2))
        return stack_ranks(partial.to(sum_dtype(partial.dtype)), ranks).sum(0).to(partial.dtype)
    if role_a == "inner" and rows_a is not None:
        a, rows_a, role_a = clear_rows(gather_rows(a, rows_a, ranks)), None, None
    if rows_b is not None and (role_b == "inner" or (role_b == "column" and role_a is not None)):
        b, rows_b, role_b = clear_rows(gather_rows(b, rows_b, ranks)), None, None
    # Count dims from the end, because the operands may have different numbers of batch dims.
    dim_a, dim_b = _dim_from_end(a, rows_a), _dim_from_end(b, rows_b)
    if "batch" in (role_a, role_b):
        if rows_a is not None and rows_b is not None:
            if dim_a is None or dim_a != dim_b:
                raise mixing_error(func, rows_a, f"with one sharded as {rows_b}")
            b = align(ranks, func, b, rows_a, dim_a)
        else:
            _require_broadcast(func, dim_a, rows_a, b)
            _require_broadcast(func, dim_b, rows_b, a)
    rows, dim = rows_a, dim_a
    if rows is None:
        rows, dim = rows_b, dim_b
    out = torch.matmul(a, b)
    if rows is None or dim is None:
        return out
    return set_rows(out, rows.at(out.ndim + dim))


def _dim_from_end(x: Tensor, rows: RowTag | None) -> int | None:
    """Return the sharded dim of ``x`` as a negative number; None if it is not sharded."""
    if rows is None:
        return None
    return rows.dim - x.ndim


def _require_broadcast(func: Function, dim: int | None, rows: RowTag | None, other: Tensor) -> None:
    """Raise :class:`MixesRows` unless the replicated ``other`` broadcasts along the sharded ``dim``, if it is given."""
    if dim is not None and other.ndim >= -dim and other.shape[dim] != 1:
        raise mixing_error(func, rows, "with a replicated batch")


def _role(x: Tensor, rows: RowTag | None, second_last: str, last: str) -> str | None:
    """Return ``last`` or ``second_last`` if that dim of ``x`` is sharded, ``"batch"`` for another; None if none is.

    The roles are ``"row"`` (of a), ``"column"`` (of b) and ``"inner"``, the dim that the product sums over.
    """
    if rows is None:
        return None
    return {1: last, 2: second_last}.get(x.ndim - rows.dim, "batch")


def run_baddbmm(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``baddbmm`` with ``beta=0``, as attention without a mask does.
    Raise :class:`MixesRows` for another one.
    """
    x, a, b = operands_of(func, args, kwargs)
    rows = rows_of(a) or rows_of(b) or rows_of(x)
    if rows is None or kwargs.get("beta", 1) != 0:
        raise mixing_error(func, rows, "beta is not 0: the sum with a mask of local size is not exact")
    if is_in_place(func):
        raise mixing_error(func, rows, "it is written into a tensor of local size")
    out = _multiply(ranks, func, a, b)
    alpha = kwargs.get("alpha", 1)
    if alpha == 1:
        return out
    scaled: Tensor = out * alpha
    out_rows = rows_of(out)
    if out_rows is None:
        return scaled
    return set_rows(scaled, out_rows)


def run_attention(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run SDPA of ``[..., S, D]``: this rank's queries attend to the keys of all ranks, gathered in one
    collective.

    The mask must cover all keys, and either all queries or this rank's queries.
    """
    parameters = {"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0}
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = bind(
        func, args, kwargs, **parameters, is_causal=False, scale=None, enable_gqa=False
    )
    rows_q, rows_k = rows_of(query), rows_of(key)
    rows = rows_q or rows_k or rows_of(value)
    if rows is None:
        raise TypeError(
            "scaled_dot_product_attention: a mask is sharded, and queries, keys and values are not."
        )
    if dropout_p > 0:
        raise mixing_error(func, rows, "with dropout each rank would draw for its own tokens")
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if any(tag is not None and tag.dim < x.ndim - 2 for x, tag in ((query, rows_q), (key, rows_k))):
        # A tag counts dims from the first, so tensors with equal tags must have equally many.
        is_one_batch = rows_q == rows_k == rows_of(value) and query.ndim == key.ndim == value.ndim
        is_common = mask is None or (mask.ndim < query.ndim and rows_of(mask) is None)
        if not (is_one_batch and is_common):
            raise mixing_error(
                func, rows, "its batch is sharded differently, or it has a mask of its own for each sample"
            )
        return set_rows(
            F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, **options), rows
        )
    if any(tag is not None and tag.dim == x.ndim - 1 for x, tag in ((query, rows_q), (key, rows_k))):
        raise mixing_error(func, rows, "its channels are sharded")
    if rows_of(value) != rows_k:
        raise mixing_error(func, rows, f"with keys sharded as {rows_k} and values as {rows_of(value)}")
    if rows_k is not None:
        key, value = _gather_keys(key, value, rows_k, ranks)
    if is_causal and mask is not None:
        raise mixing_error(
            func, rows, "it has a mask and is_causal=True, of which most of PyTorch's kernels take one"
        )
    if rows_q is not None and is_causal:
        # Compare positions in the whole sequence.
        positions = part_of(torch.arange(rows_q.total, device=query.device), rows_q.at(0), ranks)
        mask, is_causal = positions[:, None] >= torch.arange(key.shape[-2], device=query.device), False
    elif mask is not None:
        mask = _require_mask_part(func, mask, rows_q, rows_k, ranks)
    out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, **options)
    if rows_q is None:
        return out
    return set_rows(out, rows_q.at(out.ndim - 2))


def _gather_keys(key: Tensor, value: Tensor, rows: RowTag, ranks: MeshDim) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks, both sharded as ``rows``. Collective."""
    if key.shape[:-1] != value.shape[:-1]:
        return gather_rows(key, rows, ranks), gather_rows(value, rows, ranks)
    sizes = [key.shape[-1], value.shape[-1]]
    both = gather_rows(torch.cat([key, value], -1), rows, ranks)
    all_keys, all_values = both.split(sizes, -1)
    return all_keys, all_values


def _require_mask_part(
    func: Function, mask: Tensor, rows_q: RowTag | None, rows_k: RowTag | None, ranks: MeshDim
) -> Tensor:
    """Return the part of ``mask`` for this rank's queries and all keys.

    Raises:
        MixesRows: If ``mask`` does not have all keys, or is sharded in another way than the queries.
    """
    rows_m = rows_of(mask)
    queries, keys = math.prod(mask.shape[-2:-1]), mask.shape[-1]  # A vector has one row.
    if rows_k is None or keys in (1, rows_k.total):
        if rows_m is not None and rows_q is not None and _is_mask_of_queries(mask, rows_m, rows_q, ranks):
            return clear_rows(mask)
        if rows_m is None and (rows_q is None or queries == 1):
            return mask
        if rows_m is None and rows_q is not None and queries == rows_q.total:
            return part_of(mask, rows_q.at(mask.ndim - 2), ranks)
    sharding = ""
    if rows_m is not None:
        sharding = f", sharded as {rows_m},"
    raise mixing_error(
        func, rows_q or rows_k, f"its mask of shape {list(mask.shape)}{sharding} is not one of all tokens"
    )


def _is_mask_of_queries(mask: Tensor, rows_m: RowTag, rows_q: RowTag, ranks: MeshDim) -> bool:
    """Whether a sharded mask is sharded like the queries, or equal for all tokens of a frame, on every rank.
    Collective in the latter case, and the host then waits for the device.
    """
    if rows_m.dim != mask.ndim - 2 or rows_m.total != rows_q.total:
        return False
    if rows_m == rows_q.at(rows_m.dim):
        return True
    # If image columns are sharded, each frame's tokens form several runs, so the two layouts differ.
    if rows_q.outer % rows_m.outer or torch.compiler.is_compiling():
        return False
    frames = mask.unflatten(-2, (rows_m.outer, -1))
    of_rank = (frames == frames[..., :1, :]).all()
    return bool(stack_ranks(of_rank.to(torch.uint8), ranks).all())


BY_RULE: dict[Any, str] = {
    run_linear: "linear",
    run_matmul: "matmul bmm mm rmatmul",
    run_baddbmm: "baddbmm",
    run_attention: "scaled_dot_product_attention",
}
