"""Unified sequence parallelism (USP): SDPA over a ``ring × ulysses`` mesh (arXiv:2405.07719).

Ulysses exchanges tokens for heads inside each group of Ulysses ranks, and the groups form a ring.

:class:`~para_core.attention.mesh_attention.MeshAttention`, which validates a call before, calls
:func:`usp_forward`, directly or through the operators of :mod:`.operator` and :mod:`.gradients.operator`. Where it
knows that autocast is off, it calls :func:`attend_over_mesh`. The backward is
:mod:`para_core.attention.gradients.usp`. Tests: tests/attention/test_exactness.py and
tests/attention/test_launches.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend, Mask, Saved, take_columns
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.blocks import (
    LocalAttention,
    attend_by_backend,
    attend_by_function,
    expand_heads,
    expand_key_heads,
)
from para_core.attention.local import add_autograd_dependency, lay_out_like_sdpa, local_attention
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.low_rows import correct_low_rows, level_low_rows
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
        save: Whether to return the tensors that the gradient needs. The call then uses
            :attr:`AttentionPlan.with_gradients`, so nothing is rounded to 8 bits. So does a call by
            ``attn_func`` while gradients are enabled.

    Collective. Autograd records it only if ``attn_func`` is given; otherwise the caller differentiates it by
    the saved tensors (:mod:`para_core.attention.gradients`).

    Returns:
        out, ``[B, H, S_q_local, D_v]`` with the memory layout of SDPA's result; and the saved tensors, or
        None.
    """
    if autocasts(query):
        # Disable autocast, because it would round scores and lse, which must be float32.
        with torch.autocast(query.device.type, enabled=False):
            return attend_over_mesh(plan, query, key, value, mask, attn_func=attn_func, save=save)
    return attend_over_mesh(plan, query, key, value, mask, attn_func=attn_func, save=save)


def attend_over_mesh(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    attn_func: LocalAttention | None = None,
    save: bool = False,
) -> tuple[Tensor, Saved | None]:
    """Return what :func:`usp_forward` returns, if autocast is off. Collective."""
    # Whether the inputs require a gradient does not tell it for an attn_func, which may capture a parameter.
    if save or (attn_func is not None and torch.is_grad_enabled()):
        plan = plan.with_gradients
    ulysses = plan.ulysses
    if ulysses is None:
        out, lse = attend_block(plan, query, key, value, mask, attn_func, save)
        result = lay_out_like_sdpa(out)
    else:
        query, key, value = ulysses.enter((query, key, value))
        out, lse = attend_block(plan, query, key, value, mask, attn_func, save)
        result = ulysses.leave((out,))[0]
    if lse is None:
        return result, None
    return result, Saved(query, key, value, out, lse)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is enabled for the device type of ``x``.
    False for meta tensors, and for what is no tensor.
    """
    if not (torch.compiler.is_compiling() or is_any_autocast_enabled()):
        return False
    return isinstance(x, Tensor) and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def attend_block(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    attn_func: LocalAttention | None,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of this rank's queries and heads to the keys of all ring ranks, after the Ulysses
    exchange. Collective over the ring.

    Args:
        query, key, value: ``[B, H_local, S_block, D]``: all tokens of this rank's Ulysses group, and this
            rank's heads.
        plan, mask, attn_func, save: As in :func:`usp_forward`.

    Returns:
        out, ``[B, H_local, S_block, D_v]``; and lse, ``[B, H_local, S_block]``, or None without ``save``.
    """
    # None also if whole groups of query heads have a key head each: attention to a block pairs these heads itself.
    key_heads = None
    if plan.spec.num_kv_heads != plan.spec.num_heads:
        key_heads = plan.heads.key_of_each_query(plan.spec.mesh.ulysses.index, query.device)
    # One call of plain SDPA has the bits of one device and costs the host least, but returns no lse, so it
    # cannot serve a gradient.
    if not save and attn_func is None and plan.is_local:
        call = LocalAttentionCall(query, key, value, mask, plan.spec.is_causal, plan.spec.scale)
        if plan.style.has_all_keys:
            call = plan.style.gather_call(call)
        elif mask is not None:
            call = call._replace(mask=take_columns(mask, plan.ring.key_runs(0)))
        if key_heads is not None:
            call = call._replace(
                key=expand_heads(call.key, key_heads), value=expand_heads(call.value, key_heads)
            )
        out = local_attention(call, plan.spec.options.backend)
        if plan.style.has_all_keys:
            out = plan.style.select_queries(out)
        return out, None
    # At most one option has it: such an option must be by position, and AttnOptions takes only one of these.
    # SDPA above would leave it out, and does not compute a call with an option by position.
    attend: Callable[..., tuple[Tensor, Tensor]] = attend_all
    for option in plan.spec.options.others:
        if option.attend is not None:
            attend = partial(option.attend, save=save)
    out, lse = attend(plan, query, key, value, mask, key_heads, attn_func)
    if not save:
        return out, None
    return out, lse


def attend_all(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_heads: Tensor | None,
    attn_func: LocalAttention | None,
) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of query, and lse, of this rank's queries over the keys of all ring ranks.
    Collective over the ring.

    Args:
        key_heads: ``[H]``, the key head of each query head; None if heads are grouped evenly.
        plan, query, key, value, mask, attn_func: As in :func:`attend_block`.
    """
    masked = mask is not None
    if attn_func is None:
        attend = compose_once(plan, masked)
    else:
        attend = compose(plan, masked, attn_func)
    mask_of_call = None
    if mask is not None:
        mask_of_call = Mask(mask)
    into = Accumulator(query, mask_of_call, plan.style.tiling, key_heads)
    attend(into, key, value, 0, True)
    out, lse = into.finish(key, value)
    if out.dtype != query.dtype:
        out = out.to(query.dtype)
    if torch.is_grad_enabled():
        # A rank without queries or heads uses none of them, but collectives have brought them, the mask, too.
        inputs = [query, key, value, *into.received]
        if mask is not None:
            inputs.append(mask)
        out = add_autograd_dependency(out, inputs)
    return out, lse


def compose(plan: AttentionPlan, masked: bool, attn_func: LocalAttention | None = None) -> Attend:
    """Return the attention of a call, from the inside out: to one block, with key heads expanded, over all
    ring ranks, with a mask that merges by lse.

    ``masked`` tells whether the call has a mask tensor. The gradient has the same layers:
    :func:`para_core.attention.gradients.usp.compose_backward`.
    """
    spec = plan.spec
    attend = attend_by_backend(spec.options.backend, spec.scale)
    if attn_func is not None:
        attend = attend_by_function(attn_func, spec.scale)
    if spec.num_heads != spec.num_kv_heads:
        attend = expand_key_heads(attend)
    attend = plan.style.over_ring(attend)
    if not masked:
        return attend
    if attn_func is not None:
        return correct_low_rows(attend, plan.style.mask_tiling)
    return level_low_rows(attend, spec.options.backend, plan.style.mask_tiling)


# The composition of a plan is made once. A plan is compared by identity. What an attn_func composes is not
# kept: the function may be another object in each call. The last 1024 plans stay alive, with the process
# groups of their meshes. That is intended: a process makes few meshes, and keeps them.
compose_once = lru_cache(maxsize=1024)(compose)
