"""One attention call: SDPA's arguments checked, agreed between ranks, computed over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from zlib import crc32

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from para_core.agreement import Record, agree, first_difference, signature
from para_core.attention.approximate.block_mask import BlockMask
from para_core.attention.approximate.kept_keys import KeptKeys
from para_core.attention.blocks import tied
from para_core.attention.local import local_attention_with_lse, sees_nothing, with_diagonal
from para_core.attention.mask import mask_extents, mask_of_block
from para_core.attention.operator import attend
from para_core.attention.tiling import RotateMethod
from para_core.attention.unified import UnifiedCall
from para_core.layout import SequenceLayout
from para_core.mesh import SequenceMesh

# (local query length, local key length) -> the layouts of queries and keys.
ChooseLayouts = Callable[[int, int], tuple[SequenceLayout, SequenceLayout]]

EQUAL_PARTS = (
    "Lengths are taken from cp.shard(...) or an explicit SequenceLayout; where neither was used, every rank is assumed "
    "to hold an equal part. Cut with x = cp.shard(x, dim=...), or pass layout=SequenceLayout(...)."
)


# (query, key, value, attn_mask=, dropout_p=, is_causal=, scale=) -> out, or (out, lse): SDPA, or what a user has instead.
AttnFunc = Callable[..., "Tensor | tuple[Tensor, Tensor]"]


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
    attn_func: AttnFunc | None = None,
    ulysses_chunks: int = 1,
    block_mask: BlockMask | None = None,
    kept: KeptKeys | None = None,
    comm_dtype: torch.dtype | None = None,
    rotate_method: RotateMethod = "alltoall",
) -> Tensor:
    """``scaled_dot_product_attention`` over a sequence that is sharded over ``mesh``.

    Args:
        query, key, value: this rank's part, ``[B, H, S_local, D]`` or with fewer or more leading dims, as SDPA takes.
        attn_mask: bool or float, broadcastable to ``[B, H, S_q, S_k]``; at most one of the last two may be local.
        assume_equal: do not exchange records first; bad input on one rank may then hang or abort the others.
        attn_func: computes attention on one device instead of SDPA.
        ulysses_chunks: parts of a rank's heads that travel and are computed one after the other.
        block_mask: which blocks are computed; all if None.
        kept: how it is decided which keys are computed; all if None.
        comm_dtype: of what travels where no gradient is kept; None: as it is.
        rotate_method: how blocks of keys and values travel round a ring.

    Raises:
        ValueError: on every rank, in eager code, if the input of any rank does not fit.
    """
    talk = not (assume_equal or torch.compiler.is_compiling())
    if talk:
        mesh.check_alive()
        _refuse_vmap()
    try:
        _check(query, key, value, attn_mask, dropout_p, enable_gqa)
        if attn_func is not None:
            if torch.compiler.is_compiling() and (is_causal or block_mask is not None or kept is not None):
                raise RuntimeError(
                    "inside a compiled function attn_func takes no is_causal and no sparse mode: positions are symbolic there. "
                    "Leave attn_func out, or compile around this call."
                )
            _check_attn_func(attn_func, query, key, value, mesh, is_causal=is_causal)
        query_layout, key_layout = choose_layouts(query.shape[-2], key.shape[-2])
        if block_mask is not None:
            block_mask.check(query_layout.total, key_layout.total)
    except (TypeError, ValueError, RuntimeError) as error:
        if talk:
            agree(error, mesh)
        raise
    sizes = [] if attn_mask is None else [_last_two(attn_mask)]
    ranks = [mesh.rank]
    if talk:
        tensors = {"query": query, "key": key, "value": value}
        lengths = {"query": query_layout.sizes(), "key": key_layout.sizes()}
        record = _record(tensors, attn_mask, lengths, is_causal, scale, block_mask, kept, comm_dtype)
        # Of each rank: compared with its layout, not with the other ranks.
        mask_sizes = [size for pair in sizes for size in pair]
        owned = agree(signature({**record, "rotate_method": rotate_method}), mesh, mask_sizes, explain=_difference)
        sizes = [(rows, columns) for rows, columns in owned] if sizes else []
        ranks = list(range(mesh.ranks))
    extents = mask_extents(sizes, query_layout, key_layout, ranks) if attn_mask is not None else None

    if torch.is_autocast_enabled(query.device.type) and query.is_floating_point():
        # Autocast knows SDPA, not the operators that compute it here.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    leading = query.shape[:-3]
    if attn_mask is not None:
        attn_mask = _four_dims(attn_mask, leading)
    if len(leading) != 1:
        query, key, value = (x.reshape(prod(leading), *x.shape[-3:]) for x in (query, key, value))
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if attn_func is not None and torch.is_grad_enabled() and any(x.requires_grad for x in given):
        comm_dtype = None  # autograd follows what travels
    call = UnifiedCall(
        query_layout,
        key_layout,
        mesh,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        is_causal=is_causal,
        scale=scale,
        ulysses_chunks=ulysses_chunks,
        block_mask=block_mask,
        kept=kept,
        comm_dtype=comm_dtype,
        rotate_method=rotate_method,
    )
    mask = None if attn_mask is None or extents is None else mask_of_block(attn_mask, extents, call)
    if attn_func is None:
        out = attend(query, key, value, mask, call)
    else:
        out, _ = call.forward(query, key, value, mask, attend=partial(_attend_with, attn_func))
    return out if len(leading) == 1 else out.reshape(*leading, *out.shape[1:])


def _refuse_vmap() -> None:
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Vmap:
        raise RuntimeError(
            "attention over several ranks inside torch.func.vmap: a collective has no batching rule. Put the mapped dim "
            "into the batch dim of query, key and value instead."
        )


def _last_two(mask: Tensor) -> tuple[int, int]:
    rows, columns = [1, 1, *mask.shape][-2:]
    return rows, columns


def _four_dims(mask: Tensor, leading: Sequence[int]) -> Tensor:
    """``mask`` as ``[B or 1, H or 1, S_q, S_k]``, where the query has ``leading`` dims before its heads."""
    if mask.ndim <= 3 or len(leading) == 1:
        return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*leading, *mask.shape[-3:]).reshape(prod(leading), *mask.shape[-3:])


def _attend_with(
    attn_func: AttnFunc,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    if 0 in query.shape or 0 in key.shape:  # kernels seldom take that
        out, lse = local_attention_with_lse(query, key, value, mask=mask, is_causal=is_causal, scale=scale)
        return tied(out, [query, key, value]), lse
    mask, is_causal = with_diagonal(mask, is_causal, query, key)
    if mask is not None:
        # A row that sees no key is NaN to many: it sees them all, and then counts for nothing.
        empty_row = sees_nothing(mask)
        mask = mask | empty_row[..., None] if mask.dtype == torch.bool else mask.masked_fill(empty_row[..., None], 0.0)
    found = attn_func(query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=is_causal, scale=scale)
    # Out alone is asked for only where nothing is merged.
    out, lse = (found, found.new_zeros(found.shape[:-1], dtype=torch.float32)) if isinstance(found, Tensor) else found
    if mask is not None:
        out, lse = out.masked_fill(empty_row[..., None], 0.0), lse.masked_fill(empty_row, float("-inf"))
    return out, lse


def _check_attn_func(
    attn_func: AttnFunc, query: Tensor, key: Tensor, value: Tensor, mesh: SequenceMesh, *, is_causal: bool
) -> None:
    """Ask ``attn_func`` about one token whether it returns lse: every rank must know before anything travels."""
    if mesh.ring.size == 1 and not is_causal:
        return
    heads = max(1, query.shape[-3])
    probe = [x.new_zeros(1, heads, 1, x.shape[-1]) for x in (query, key, value)]
    found = attn_func(*probe, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)
    if isinstance(found, Tensor):
        reason = f"a ring of {mesh.ring.size} ranks" if mesh.ring.size > 1 else "is_causal over several ranks"
        raise ValueError(
            f"attn_func returned out alone, and {reason} merges partial results by their lse. Return (out, lse), lse "
            "[B, H, S_q] the natural log-sum-exp of the scaled scores in float32; or use a mesh whose ranks are all in "
            "its 'ulysses' dim, without is_causal."
        )


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
    if not _alike(key.shape[:-1], value.shape[:-1]):
        raise ValueError(f"key and value must have the same batch, heads and length; got {shapes}.")
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query and key must have the same batch; got {shapes}. Expand the smaller one.")
    num_heads, num_kv_heads = query.shape[-3], key.shape[-3]
    if num_heads != num_kv_heads and not enable_gqa:
        raise ValueError(f"query has {num_heads} heads and key {num_kv_heads}; pass enable_gqa=True for grouped heads.")
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        raise ValueError(f"enable_gqa needs query heads divisible by key heads; got {num_heads} and {num_kv_heads}.")
    if attn_mask is not None:
        _check_mask(attn_mask, query)
    refuse_dropout(dropout_p)


def _alike(shape: torch.Size, other: torch.Size) -> bool:
    """Whether they are equal, as far as that is known while tracing: a length may depend on data."""
    if len(shape) != len(other):
        return False
    return all(guard_or_true(length == expected) for length, expected in zip(shape, other, strict=True))


def refuse_dropout(dropout_p: float) -> None:
    """Raise ``ValueError`` for a dropout."""
    if dropout_p > 0.0:
        raise ValueError(
            f"dropout_p={dropout_p} cannot be the same on several ranks as on one: each draws its own random numbers. "
            "Pass dropout_p=0.0 (model.eval())."
        )


def _check_mask(mask: Tensor, query: Tensor) -> None:
    """Raise ``ValueError`` unless all but the last two dims fit ``query``."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attn_mask has dtype {mask.dtype}; expected bool (True: may attend), or a float that is added."
        )
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device}, query on {query.device}; move the mask.")
    if mask.ndim > query.ndim:
        raise ValueError(f"attn_mask {list(mask.shape)} has more dims than query {list(query.shape)}.")
    leading = mask.shape[:-2]
    wanted = query.shape[query.ndim - 2 - len(leading) : -2]
    if any(size not in (1, full) for size, full in zip(leading, wanted, strict=True)):
        raise ValueError(
            f"attn_mask {list(mask.shape)} does not broadcast over batch and heads of query {list(query.shape)}."
        )


def _record(
    tensors: Mapping[str, Tensor],
    mask: Tensor | None,
    lengths: Mapping[str, tuple[int, ...]],
    is_causal: bool,
    scale: float | None,
    block_mask: BlockMask | None,
    kept: KeptKeys | None,
    comm_dtype: torch.dtype | None,
) -> Record:
    query = tensors["query"]
    with_gradient = [*tensors.values(), *([] if mask is None else [mask])]
    return {
        **{f"{name} without its length": [*x.shape[:-2], x.shape[-1]] for name, x in tensors.items()},
        **{f"{name} lengths per rank": sizes for name, sizes in lengths.items()},
        "dtype": str(query.dtype),
        "device type": query.device.type,
        "is_causal": bool(is_causal),
        "scale": scale,
        "block_mask": None if block_mask is None else f"with checksum {crc32(block_mask.encode().encode()):08x}",
        "kept keys": None if kept is None else [kept.share, kept.window],
        "comm_dtype": str(comm_dtype),
        "attn_mask without its last two dims": None if mask is None else [*mask.shape[:-2]],
        "attn_mask's dtype": None if mask is None else str(mask.dtype),
        # A backward has collectives of its own, and every rank must join in.
        "requires_grad": [torch.is_grad_enabled() and x.requires_grad for x in with_gradient],
    }


def _difference(records: list[Record]) -> str:
    field = next(field for record in records for field, value in record.items() if value != records[0][field])
    if "lengths" not in field:
        return first_difference(records)
    # What every rank holds of itself says more than what it assumed of the others.
    held = [record[field][rank] for rank, record in enumerate(records)]
    return f"the ranks disagree about {field}: they hold {held}. {EQUAL_PARTS}"
