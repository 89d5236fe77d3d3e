"""Attention on one device over what it holds now: ``out`` and, where a ring needs it, ``lse``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` under another name, so that no mode intercepts it a second time.

    Args, shapes and result are SDPA's own, but that ``mask`` may have another float dtype than ``query``, and that
    ``mask`` and ``is_causal`` go together on every backend.
    """
    if mask is not None:
        mask = _in_taken_dtype(mask, query)
        if is_causal and _choose_backend(query, key, value, mask, is_causal, scale) == SDPBackend.MATH.value:
            mask, is_causal = with_diagonal(mask, is_causal, query, key)
    out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, mask, 0.0, is_causal, scale=scale
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

    Has no gradient: :func:`local_attention_backward` computes it.

    Args:
        query: ``[B, H, S_q, D]``; any dim may be 0.
        key, value: ``[B, H, S_k, D]``, ``[B, H, S_k, D_v]``; S_k may be 0.
        mask: bool (True where a query sees a key) or float (added to the scores), 4-D, broadcastable to
            ``[B, H, S_q, S_k]``.
        is_causal: query i sees keys 0 … i, of those that ``mask`` leaves.
        scale: of the scores; ``1 / sqrt(D)`` if None.

    Returns:
        ``out`` ``[B, H, S_q, D_v]`` in query's dtype, and ``lse`` ``[B, H, S_q]`` in float32 (float64 for float64
        input), natural log. A row without a key gives 0 and -inf.
    """
    batch, heads, num_queries, _ = query.shape
    if 0 in query.shape or 0 in key.shape:
        empty = query.new_zeros(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
        return empty, query.new_full((batch, heads, num_queries), float("-inf"), dtype=lse_dtype(query))
    mask, is_causal = with_diagonal(mask, is_causal, query, key)
    backend = _BACKENDS.get(_choose_backend(query, key, value, mask, is_causal, scale), _math)
    out, lse = backend(query, key, value, mask, is_causal, scale)
    if mask is not None:
        # Backends disagree about a row that sees no key: NaN, or an lse of 0.
        empty_row = sees_nothing(mask)
        out = out.masked_fill(empty_row[..., None], 0.0)
        lse = lse.masked_fill(empty_row, float("-inf"))
    return out, lse


def _choose_backend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> int:
    """The value of the ``SDPBackend`` that SDPA would take."""
    choice: int = torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, scale=scale)
    return choice


def with_diagonal(mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """``mask`` and ``is_causal`` as one of the two, in a dtype that the backends take."""
    if mask is None:
        return None, is_causal
    if is_causal:
        seen = mask.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
    return _in_taken_dtype(mask, query), False


def _in_taken_dtype(mask: Tensor, query: Tensor) -> Tensor:
    """What SDPA takes: bool, float32 or query's dtype."""
    return mask if mask.dtype in (torch.bool, torch.float32) else mask.to(query.dtype)


def sees_nothing(mask: Tensor) -> Tensor:
    """Rows of ``mask`` that let no key through: ``[B or 1, H or 1, S_q or 1]``."""
    return ~mask.any(-1) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1)


def lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """``[B, H, S_q, S_k]`` in the dtype of lse; -inf where a query does not see a key."""
    dtype = lse_dtype(query)
    scores = (query.to(dtype) * _scale(query, scale)) @ key.to(dtype).transpose(-1, -2)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    return (weights @ value.to(lse.dtype)).to(query.dtype), lse


def _finite(lse: Tensor) -> Tensor:
    # -inf - -inf is NaN; a row without a key has no weights whatever its lse.
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _broadcast_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """``mask`` as the bias of a fused kernel, ``[B, H, S_q, S_k]`` of which only what ``mask`` holds is memory.

    CUDA kernels want rows of 16 aligned bytes.
    """
    if mask is None:
        return None
    num_keys = key.shape[-2]
    dtype = torch.float32 if mask.dtype == torch.float32 and query.device.type == "cpu" else query.dtype
    bias = query.new_zeros(*mask.shape[:-1], num_keys + -num_keys % 8, dtype=dtype)[..., :num_keys]
    bias = bias.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else bias.copy_(mask)
    return bias.expand(*query.shape[:-1], num_keys)


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=_broadcast_bias(mask, query, key), scale=scale
    )
    return result


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if query.device.type == "cpu":
        return _flash_cpu(query, key, value, mask, is_causal, scale)
    head_dim, scale = query.shape[-1], _scale(query, scale)
    # FlashAttention wants a head dim that 8 divides; SDPA itself pads too.
    query, key, value = (F.pad(x, (0, -head_dim % 8)) for x in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    return out[..., :head_dim], lse[..., : query.shape[-2]]


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _broadcast_bias(mask, query, key), True, 0.0, is_causal, scale=scale
    )
    # Padded up to a multiple of 32 rows.
    return out, lse[..., : query.shape[-2]]


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, _broadcast_bias(mask, query, key), True, 0.0, is_causal, scale=scale
    )
    # Some versions return [B, H, S, 1].
    return out, lse.reshape(*query.shape[:2], -1)[..., : query.shape[-2]]


_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: _flash,
    SDPBackend.EFFICIENT_ATTENTION.value: _memory_efficient,
    SDPBackend.CUDNN_ATTENTION.value: _cudnn,
}


def local_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of attention with respect to these keys, where ``out`` and ``lse`` may be over others too.

    With P = exp(scores - lse): dv = Pᵀ·do, ds = P ∘ (do·vᵀ - rowsum(do ∘ out)), dq = ds·k, dk = dsᵀ·q (FlashAttention,
    arXiv:2205.14135, appendix B), which is additive over blocks of keys.

    Args:
        out, lse: ``[B, H, S_q, D_v]`` and ``[B, H, S_q]`` of the whole row; -inf for a row that saw no key.

    Returns:
        The gradients of query, key and value, and of ``mask`` before broadcasting (``[B, H, S_q, S_k]``) if asked for.
    """
    if 0 in query.shape or 0 in key.shape:
        grad_mask = query.new_zeros(*query.shape[:-1], key.shape[-2]) if mask_gradient else None
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape), grad_mask
    mask, is_causal = with_diagonal(mask, is_causal, query, key)
    # exp(scores - inf) is 0: a row that saw nothing has no gradient.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    choice = _choose_backend(query, key, value, mask, is_causal, scale)
    # No fused backward gives the gradient of a mask.
    backend = _math_backward if mask_gradient or choice == SDPBackend.MATH.value else _fused_backward
    *grads, grad_mask = backend(grad_out, query, key, value, out, lse, mask, is_causal, scale)
    return grads[0], grads[1], grads[2], grad_mask if mask_gradient else None


def _math_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weights = torch.exp(_scores(query, key, mask, is_causal, scale) - lse[..., None])
    grad = grad_out.to(lse.dtype)
    grad_weights = grad @ value.to(lse.dtype).transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True))
    scale = _scale(query, scale)
    grad_query = (grad_scores @ key.to(lse.dtype)) * scale
    grad_key = grad_scores.transpose(-1, -2) @ (query.to(lse.dtype) * scale)
    grad_value = weights.transpose(-1, -2) @ grad
    dtype = query.dtype
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), grad_scores


def _fused_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    bias, out = _broadcast_bias(mask, query, key), out.to(query.dtype)
    if query.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return grads[0], grads[1], grads[2], None
    if query.shape[-1] % 8 or value.shape[-1] % 8:  # what the kernel wants for 16 bits; the forward could pad
        return _math_backward(grad_out, query, key, value, out, lse, mask, is_causal, scale)
    lse = F.pad(lse, (0, -query.shape[-2] % 32), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of a dropout of 0
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, bias, out, lse, seed, seed, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    return grads[0], grads[1], grads[2], None
