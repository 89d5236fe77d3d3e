"""Unified sequence parallelism (USP): SDPA and its gradient over a ``ring × ulysses`` mesh (arXiv:2405.07719).

Ulysses exchanges tokens for heads inside each group of Ulysses ranks, and the groups form a ring.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.backends import LocalAttentionCall
from para_core.attention.blocks import LocalAttention, Saved, columns, expand
from para_core.attention.grid_2d import attention_2d, attention_2d_backward
from para_core.attention.local import as_sdpa, local_attention
from para_core.attention.ring import ring_attention, ring_attention_backward
from para_core.torch_internals import is_any_autocast_enabled


def usp_forward(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    attn_func: LocalAttention | None = None,
    save: bool = False,
) -> tuple[Tensor, Saved | None]:
    """Compute attention of this rank's queries to all keys of the sequence.

    Args:
        query, key, value: ``[B, H, S_local, D]``, this rank's tokens in the layouts of queries and of keys.
        mask: The result of :func:`~para_core.attention.masks.mask_of_block`, or None.
        attn_func: Computes local attention in place of ``plan.spec.options.backend``, if it is not None.
        save: Whether to return the tensors that :func:`usp_backward` needs. Tensors are then not rounded for sending.

    Returns:
        out, ``[B, H, S_q_local, D_v]`` with the memory layout of SDPA's result; and the saved tensors, or None.
    """
    if autocasts(query):
        # Disable autocast, because it would round scores and lse, which must be float32.
        with torch.autocast(query.device.type, enabled=False):
            return usp_forward(plan, query, key, value, mask, attn_func=attn_func, save=save)
    plan = plan.with_gradients if save else plan
    ulysses = plan.ulysses
    if ulysses is None:
        out, lse = attend_block(plan, query, key, value, mask, attn_func, save)
        return as_sdpa(out), None if lse is None else Saved(query, key, value, out, lse)
    query, key, value = ulysses.start_enter((query, key, value))()
    out, lse = attend_block(plan, query, key, value, mask, attn_func, save)
    return ulysses.start_leave((out,))()[0], None if lse is None else Saved(query, key, value, out, lse)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is enabled for the device type of ``x``. False for meta tensors."""
    if not (torch.compiler.is_compiling() or is_any_autocast_enabled()):
        return False
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def attend_block(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    attn_func: LocalAttention | None,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of this rank's queries and heads to the keys of all ring ranks, after the Ulysses exchange.

    Args:
        query, key, value: ``[B, H_local, S_block, D]``: all tokens of this rank's Ulysses group, and its own heads.
        plan, mask, attn_func, save: As in :func:`usp_forward`.

    Returns:
        out, ``[B, H_local, S_block, D_v]``; and lse, ``[B, H_local, S_block]``, or None without ``save``.
    """
    key_heads = None
    if plan.spec.num_kv_heads != plan.spec.num_heads:
        key_heads = plan.heads.key_of_each_query(plan.spec.mesh.ulysses.index, query.device)
    if attn_func is not None and key.shape[1] != query.shape[1] and key_heads is None:
        # Expand the key heads, because a user's attn_func needs as many key heads as query heads.
        key_heads = torch.arange(query.shape[1], device=query.device) // (query.shape[1] // max(1, key.shape[1]))
    if not save and attn_func is None and plan.is_local:
        if key_heads is not None:
            key, value = expand(key, key_heads), expand(value, key_heads)
        mask = None if mask is None else columns(mask, plan.ring.key_runs(0))
        call = LocalAttentionCall(query, key, value, mask, plan.spec.is_causal, plan.spec.scale)
        return local_attention(call, plan.spec.options.backend), None
    kept_keys = plan.spec.options.kept_keys
    if kept_keys is not None:
        out, lse = _load_snapkv().sparse_attention(
            kept_keys, query, key, value, mask, plan.ring, heads=key_heads, attn_func=attn_func, save=save
        )
    elif plan.grid is not None:
        out, lse = attention_2d(query, key, value, mask, plan.grid, heads=key_heads, attn_func=attn_func)
    else:
        out, lse = ring_attention(query, key, value, mask, plan.ring, heads=key_heads, attn_func=attn_func)
    return out, lse if save else None


def _load_snapkv() -> ModuleType:
    """Return the module that the option ``kept_keys`` needs. Exact attention does not load it."""
    return import_module("para_core.attention.approximate.snapkv")


def usp_backward(
    plan: AttentionPlan, grad_out: Tensor, saved: Saved, mask: Tensor | None, *, mask_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and, with ``mask_gradient``, of ``mask`` (otherwise None).

    The loss is the sum of the losses of all ranks. ``saved`` is the second result of :func:`usp_forward`.
    """
    if autocasts(grad_out):
        with torch.autocast(grad_out.device.type, enabled=False):
            return usp_backward(plan, grad_out, saved, mask, mask_gradient=mask_gradient)
    if plan.ulysses is not None:
        grad_out = plan.ulysses.enter_gradient(grad_out)
    heads = plan.heads.key_of_each_query(plan.spec.mesh.ulysses.index, grad_out.device)
    hidden, kept_keys = mask, plan.spec.options.kept_keys
    if kept_keys is not None:
        snapkv = _load_snapkv()
        is_kept = snapkv.select_keys(kept_keys, saved.query, saved.key, mask, plan.ring, heads=heads)
        hidden = snapkv.hide(mask, is_kept)
    block = grad_out, saved, hidden
    if plan.grid is None:
        *grads, grad_mask = ring_attention_backward(*block, plan.ring, heads=heads, mask_gradient=mask_gradient)
    else:
        *grads, grad_mask = attention_2d_backward(*block, plan.grid, heads=heads, mask_gradient=mask_gradient)
    if grad_mask is not None and mask is not None:
        grad_mask = grad_mask.sum_to_size(mask.shape)
    if plan.ulysses is not None:
        grads = plan.ulysses.leave_gradients(*grads)
    return grads[0], grads[1], grads[2], grad_mask
