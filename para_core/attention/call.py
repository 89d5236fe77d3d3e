"""One attention call: SDPA's arguments checked, agreed between ranks, computed over the mesh."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from para_core.agreement import Record, error_record, exchange, raise_first_error
from para_core.attention.unified import unified_attention
from para_core.layout import SequenceLayout
from para_core.mesh import SequenceMesh

# (local query length, local key length) -> the layouts of queries and keys.
ChooseLayouts = Callable[[int, int], tuple[SequenceLayout, SequenceLayout]]

EQUAL_PARTS = (
    "Lengths are taken from cp.shard(...) or an explicit SequenceLayout; where neither was used, every rank is assumed "
    "to hold an equal part. Cut with x = cp.shard(x, dim=...), or pass layout=SequenceLayout(...)."
)


def attend_over_mesh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    mesh: SequenceMesh,
    choose_layouts: ChooseLayouts,
    assume_equal: bool,
) -> Tensor:
    """``scaled_dot_product_attention`` over a sequence that is sharded over ``mesh``.

    Args:
        query, key, value: this rank's part, ``[B, H, S_local, D]`` or with fewer or more leading dims, as SDPA takes.
        assume_equal: do not exchange records first; bad input on one rank may then hang or abort the others.

    Raises:
        ValueError: on every rank, in eager code, if the input of any rank does not fit.
    """
    talk = not (assume_equal or torch.compiler.is_compiling())
    if talk:
        mesh.check_alive()
    try:
        _check(query, key, value, attn_mask, dropout_p, enable_gqa)
        query_layout, key_layout = choose_layouts(query.shape[-2], key.shape[-2])
    except (TypeError, ValueError, RuntimeError) as error:
        if talk:
            raise_first_error(exchange(error_record(error), mesh))
        raise
    if talk:
        sizes = (query_layout.sizes(), key_layout.sizes())
        _compare(exchange(_record(query, key, value, is_causal, scale, *sizes), mesh))

    if torch.is_autocast_enabled(query.device.type) and query.is_floating_point():
        # Autocast knows SDPA, not the operators that compute it here.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    leading = query.shape[:-3]
    if len(leading) != 1:
        query, key, value = (x.reshape(prod(leading), *x.shape[-3:]) for x in (query, key, value))
    out = unified_attention(query, key, value, query_layout, key_layout, mesh, is_causal=is_causal, scale=scale)
    return out if len(leading) == 1 else out.reshape(*leading, *out.shape[1:])


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> None:
    """Raise ``ValueError`` for what SDPA would refuse, and for what is not computed over several ranks."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not (query.ndim == key.ndim == value.ndim >= 3):
        raise ValueError(f"query, key and value must have the same number of dims, [B, H, S, D]; got {shapes}.")
    if not (query.dtype == key.dtype == value.dtype):
        raise ValueError(
            f"query, key and value must have one dtype; got {query.dtype}, {key.dtype}, {value.dtype}. Cast them alike."
        )
    if not (query.device == key.device == value.device):
        raise ValueError(
            f"query, key and value must be on one device; got {query.device}, {key.device}, {value.device}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head dim; got {shapes}.")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must have the same batch, heads and length; got {shapes}.")
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query and key must have the same batch; got {shapes}. Expand the smaller one.")
    num_heads, num_kv_heads = query.shape[-3], key.shape[-3]
    if num_heads != num_kv_heads and not enable_gqa:
        raise ValueError(f"query has {num_heads} heads and key {num_kv_heads}; pass enable_gqa=True for grouped heads.")
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        raise ValueError(f"enable_gqa needs query heads divisible by key heads; got {num_heads} and {num_kv_heads}.")
    if attn_mask is not None:
        raise ValueError(
            f"attn_mask {list(attn_mask.shape)} is not supported on more than one rank yet. Use is_causal=True for a "
            "causal mask; or gather the tokens, and run this call under UnifiedAttnMode.disable()."
        )
    if dropout_p > 0.0:
        raise ValueError(
            f"dropout_p={dropout_p} cannot be the same on several ranks as on one: each draws its own random numbers. "
            "Pass dropout_p=0.0 (model.eval())."
        )


def _record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    query_sizes: tuple[int, ...],
    key_sizes: tuple[int, ...],
) -> Record:
    return {
        "query without its length": [*query.shape[:-2], query.shape[-1]],
        "key without its length": [*key.shape[:-2], key.shape[-1]],
        "value without its length": [*value.shape[:-2], value.shape[-1]],
        "query lengths per rank": query_sizes,
        "key lengths per rank": key_sizes,
        "dtype": str(query.dtype),
        "device type": query.device.type,
        "is_causal": bool(is_causal),
        "scale": scale,
        # A backward has collectives of its own, and every rank must join in.
        "requires_grad": [torch.is_grad_enabled() and x.requires_grad for x in (query, key, value)],
    }


def _compare(records: list[Record]) -> None:
    raise_first_error(records)
    for rank, record in enumerate(records):
        for field, value in record.items():
            if value != records[0][field]:
                # What every rank holds of itself says more than what it assumed of the others.
                if "lengths" in field:
                    held = [other[field][index] for index, other in enumerate(records)]
                    raise ValueError(f"the ranks disagree about {field}: they hold {held}. {EQUAL_PARTS}")
                raise ValueError(
                    f"the ranks disagree about {field}: sequence rank 0 has {records[0][field]}, rank {rank} has {value}."
                )
