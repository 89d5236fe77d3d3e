"""Ulysses inside, ring outside: SDPA over a sequence that is sharded over a ``ring × ulysses`` mesh, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from para_core.attention.approximate.snapkv import hide, select_keys, sparse_attention
from para_core.attention.attention_2d import attention_2d, attention_2d_backward
from para_core.attention.blocks import LocalAttention, columns, expand
from para_core.attention.call import Call
from para_core.attention.local import as_sdpa, local_attention
from para_core.attention.ring import ring_attention, ring_attention_backward
from para_core.attention.ulysses import Heads


@dataclass(frozen=True)
class Saved:
    """What a gradient needs of an attention call: a ring block's tensors ``[B, H_local, S_block, …]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def forward(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    attend: LocalAttention | None = None,
    save: bool = False,
) -> tuple[Tensor, Saved | None]:
    """This rank's queries attend to all keys of the sequence.

    Args:
        query: ``[B, H, S_q_local, D]``, as the query layout says.
        key, value: ``[B, H_kv, S_k_local, D]``, ``[B, H_kv, S_k_local, D_v]``, as the key layout says.
        mask: as :func:`~para_core.attention.mask.mask_of_block` gives it.
        attend: computes attention on one device; None: ``call.options.backend``.
        save: return what :func:`backward` needs, too.

    Returns:
        ``[B, H, S_q_local, D_v]``, in memory as SDPA's result lies: ``[B, S_q_local, H, D_v]``.
    """
    if autocasts(query):
        # Autocast would round scores, votes and lse that are float32 on purpose.
        with torch.autocast(query.device.type, enabled=False):
            return forward(call, query, key, value, mask, attend=attend, save=save)
    call = call.with_gradients if save else call
    exchange = call.exchange
    if exchange is None:
        out, lse = _of_block(call, query, key, value, mask, call.heads, attend, save)
        return as_sdpa(out), None if lse is None else Saved(query, key, value, out, lse)
    if call.options.ulysses_chunks > 1 and not save:
        return _in_chunks(call, query, key, value, mask, attend), None
    query, key, value = exchange.start_enter(query, key, value)()
    out, lse = _of_block(call, query, key, value, mask, call.heads, attend, save)
    return exchange.start_leave(out)(), None if lse is None else Saved(query, key, value, out, lse)


def autocasts(x: Tensor) -> bool:
    """Whether autocast casts tensors on the device of ``x``."""
    if not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()):
        return False
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _of_block(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: Heads,
    attend: LocalAttention | None,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a block's queries; its lse where that is to be saved."""
    key_heads = None
    if call.num_kv_heads != call.num_heads:
        key_heads = heads.key_of_each_query(call.mesh.ulysses.index, query.device)
    if attend is not None and key.shape[1] != query.shape[1] and key_heads is None:
        # A user's own takes as many key heads as query heads.
        key_heads = torch.arange(query.shape[1], device=query.device) // (query.shape[1] // max(1, key.shape[1]))
    if not save and attend is None and call.is_local:
        if key_heads is not None:
            key, value = expand(key, key_heads), expand(value, key_heads)
        mask = None if mask is None else columns(mask, call.key_runs(0))
        backend = call.options.backend
        out = local_attention(query, key, value, mask=mask, is_causal=call.is_causal, scale=call.scale, backend=backend)
        return out, None
    comm_dtype = call.options.comm_dtype
    if call.options.kept_keys is not None:
        out, lse = sparse_attention(
            query, key, value, mask, call, heads=key_heads, attend=attend, save=save, comm_dtype=comm_dtype
        )
    elif call.grid is not None:
        out, lse = attention_2d(query, key, value, mask, call, grid=call.grid, heads=key_heads, attend=attend)
    else:
        out, lse = ring_attention(query, key, value, mask, call, heads=key_heads, attend=attend, comm_dtype=comm_dtype)
    return out, lse if save else None


def _in_chunks(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attend: LocalAttention | None
) -> Tensor:
    """A part of the heads after the other: the next part arrives, and the one before leaves, while one is computed."""
    index = call.mesh.ulysses.index
    first_head = call.heads.of_query[index][0]
    chunks = call.chunks
    entering = chunks[0].start_enter(query, key, value)
    leaving = []
    for place, chunk in enumerate(chunks):
        block = entering()
        if place + 1 < len(chunks):
            entering = chunks[place + 1].start_enter(query, key, value)
        start, count = chunk.heads.of_query[index]
        rows = mask if mask is None or mask.shape[1] == 1 else mask.narrow(1, start - first_head, count)
        out, _ = _of_block(call, block[0], block[1], block[2], rows, chunk.heads, attend, save=False)
        leaving.append(chunk.start_leave(out))
    whole = query.new_empty(query.shape[0], query.shape[2], call.num_heads, value.shape[3]).transpose(1, 2)
    for chunk, finish in zip(chunks, leaving, strict=True):
        found = finish()
        for start, count in chunk.heads.of_query:
            if count:
                whole.narrow(1, start, count).copy_(found.narrow(1, start, count))
    return whole


def backward(
    call: Call, grad_out: Tensor, saved: Saved, mask: Tensor | None, *, mask_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and value, and of ``mask`` if asked for, of the sum of all ranks' losses."""
    if autocasts(grad_out):
        with torch.autocast(grad_out.device.type, enabled=False):
            return backward(call, grad_out, saved, mask, mask_gradient=mask_gradient)
    if call.exchange is not None:
        grad_out = call.exchange.enter_gradient(grad_out)
    heads = call.heads.key_of_each_query(call.mesh.ulysses.index, grad_out.device)
    hidden = mask
    if call.options.kept_keys is not None:
        hidden = hide(mask, select_keys(saved.query, saved.key, mask, call, heads=heads))
    of_ring = ring_attention_backward if call.grid is None else partial(attention_2d_backward, grid=call.grid)
    *grads, grad_mask = of_ring(
        grad_out,
        saved.query,
        saved.key,
        saved.value,
        hidden,
        saved.out,
        saved.lse,
        call,
        heads=heads,
        mask_gradient=mask_gradient,
    )
    if grad_mask is not None and mask is not None:
        grad_mask = grad_mask.sum_to_size(mask.shape)
    if call.exchange is not None:
        grads = call.exchange.leave_gradients(*grads)
    return grads[0], grads[1], grads[2], grad_mask
