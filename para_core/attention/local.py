"""Attention on one device over what it holds now: ``out`` and, where a ring needs it, ``lse``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend


def local_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """``scaled_dot_product_attention`` under another name, so that no mode intercepts it a second time.

    Args, shapes and result are SDPA's own; key and value may have fewer heads (grouped-query attention).
    """
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, None, 0.0, is_causal, scale=scale
    )
    return out


def local_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scaled scores, from the best backend that the user's switches allow.

    Args:
        query: ``[B, H, S_q, D]``; any dim may be 0.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``; S_k may be 0; H_kv divides H.
        mask: bool, broadcastable to ``[B, H, S_q, S_k]``; True where a query sees a key.
        is_causal: query i sees keys 0 … i. Not together with ``mask``.
        scale: of the scores; ``1 / sqrt(D)`` if None.

    Returns:
        ``out`` ``[B, H, S_q, D_v]`` in query's dtype, and ``lse`` ``[B, H, S_q]`` in float32 (float64 for float64
        input), natural log. A row without a key gives 0 and -inf.
    """
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        # The fused backends' backward takes no gradient of lse, which merging needs.
        return _math(query, key, value, mask, is_causal, scale)
    if torch.compiler.is_compiling():
        result: tuple[Tensor, Tensor] = torch.ops.para_core.attention_with_lse(
            query, key, value, mask, is_causal, scale
        )
        return result
    return _fused(query, key, value, mask, is_causal, scale)


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """``x`` ``[B, H_kv, S, D]`` with each head repeated so that there are ``num_heads`` (grouped-query attention)."""
    if x.shape[1] == num_heads:
        return x
    return torch.repeat_interleave(x, num_heads // x.shape[1], dim=1)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = query.shape
    if 0 in query.shape or 0 in key.shape:
        empty = query.new_zeros(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
        return empty, query.new_full((batch, heads, num_queries), float("-inf"), dtype=_lse_dtype(query))
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, scale=scale)
    out, lse = _BACKENDS.get(choice, _math)(query, key, value, mask, is_causal, scale)
    if mask is not None:
        # Backends disagree about a row that sees no key: NaN, or an lse of 0.
        empty_row = ~mask.any(-1)
        out = out.masked_fill(empty_row[..., None], 0.0)
        lse = lse.masked_fill(empty_row, float("-inf"))
    # One memory format whatever the backend: the graph was traced for it.
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    dtype = _lse_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.to(dtype) * scale) @ key.to(dtype).transpose(-1, -2)
    if is_causal:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    peak = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    weights = torch.exp(scores - peak.nan_to_num(neginf=0.0))
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    out = weights @ value.to(dtype) / total.masked_fill(empty, 1.0)
    lse = torch.log(total.masked_fill(empty, 1.0)) + peak.nan_to_num(neginf=0.0)
    return out.to(query.dtype), lse.masked_fill(empty, float("-inf")).squeeze(-1)


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """``mask`` as the bias of the memory-efficient and cuDNN kernels: 16-byte aligned rows, no broadcast dims."""
    if mask is None:
        return None
    num_keys = key.shape[-2]
    bias = query.new_zeros(*query.shape[:2], query.shape[-2], num_keys + -num_keys % 8)[..., :num_keys]
    return bias.masked_fill_(~mask, float("-inf"))


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    while bias is not None and bias.ndim < 4:
        bias = bias[None]
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return result


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if query.device.type == "cpu":
        return _flash_cpu(query, key, value, mask, is_causal, scale)
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    # FlashAttention wants a head dim that 8 divides; SDPA itself pads too.
    query, key, value = (F.pad(x, (0, -head_dim % 8)) for x in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    return out[..., :head_dim], lse[..., : query.shape[-2]]


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _additive(mask, query, key), True, 0.0, is_causal, scale=scale
    )
    # Padded up to a multiple of 32 rows.
    return out, lse[..., : query.shape[-2]]


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, _additive(mask, query, key), True, 0.0, is_causal, scale=scale
    )
    # Some versions return [B, H, S, 1].
    return out, lse.reshape(*query.shape[:2], -1)[..., : query.shape[-2]]


_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: _flash,
    SDPBackend.EFFICIENT_ATTENTION.value: _memory_efficient,
    SDPBackend.CUDNN_ATTENTION.value: _cudnn,
}


@torch.library.custom_op("para_core::attention_with_lse", mutates_args=())
def _attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    # An operator, so that a compiled graph asks at run time which backend is allowed, and lengths may be 0.
    return _fused(query, key, value, mask, is_causal, scale)


@_attention_with_lse.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = query.shape
    out = query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, num_queries, dtype=_lse_dtype(query))
