"""Reimplement ``F.multi_head_attention_forward`` with any SDPA implementation.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` use torch's function. A mode cannot intercept the
SDPA call inside that function, because torch disables the mode while the mode handles the outer call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.mask_rows import copy_mark
from para_core.attention.sdpa_call import Fail, SdpaCall, SdpaHandler, raise_here
from para_core.modes.registry import AttentionOwner, register_function


def multi_head_attention(
    handler: SdpaHandler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    fail: Fail = raise_here,
) -> tuple[Tensor, None]:
    """Compute ``F.multi_head_attention_forward``, with ``handler`` in place of SDPA.

    The other arguments are those of torch's function.

    Args:
        handler: Computes the SDPA call.
        query, key, value: ``[S_local, B, E]``, or ``[S_local, E]`` without a batch.
        fail: Raises the exception it gets, for options that cannot be computed.

    Returns:
        The output, ``[S_local, B, E]`` or ``[S_local, E]``, and None for the attention weights.

    Raises:
        ValueError: An option cannot be computed from a shard of the sequence, such as ``need_weights=True``.
    """
    if need_weights:
        fail(
            ValueError(
                "need_weights=True asks for the whole attention matrix, which no rank holds. Call the attention with "
                "need_weights=False (nn.MultiheadAttention's default is True)."
            )
        )
    extra = {"bias_k": bias_k, "bias_v": bias_v, "static_k": static_k, "static_v": static_v}
    unsupported = [name for name, tensor in extra.items() if tensor is not None]
    if add_zero_attn:
        unsupported.append("add_zero_attn")
    if unsupported:
        fail(
            ValueError(
                f"{', '.join(unsupported)}: keys that every rank would add once are not supported on several ranks."
            )
        )
    if is_causal and attn_mask is None:
        fail(
            ValueError(
                "is_causal=True needs attn_mask here, as in torch: it only says that the mask is causal."
            )
        )
    if is_causal:
        attn_mask = (
            None  # With is_causal, the caller promises that this is the causal mask, so the flag is enough.
        )
    weights: tuple[Tensor | None, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None and not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)
    biases: tuple[Tensor | None, ...] = (None, None, None)
    if in_proj_bias is not None:
        biases = in_proj_bias.chunk(3)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        if weight is None:
            fail(
                ValueError(
                    "use_separate_proj_weight=True needs q_proj_weight, k_proj_weight and v_proj_weight."
                )
            )
        projected = F.linear(x, weight, bias)
        # Reshape [S, B, E] or [S, E] to [B, H, S, E / H] or [H, S, E / H].
        heads.append(torch.unflatten(projected, -1, (num_heads, -1)).movedim(0, -2))
    given_mask = attn_mask
    if attn_mask is not None and attn_mask.ndim == query.ndim == 3:
        attn_mask = torch.unflatten(attn_mask, 0, (-1, num_heads))  # to [B, H, S_q, S_k]
    if (
        attn_mask is not None
        and key_padding_mask is not None
        and attn_mask.shape[-1] != key_padding_mask.shape[-1]
    ):
        fail(
            ValueError(
                f"attn_mask has {attn_mask.shape[-1]} keys and key_padding_mask {key_padding_mask.shape[-1]}; pass "
                "both for this rank's keys, or both for all."
            )
        )
    mask = _merge_masks(key_padding_mask, attn_mask, query.dtype)
    copy_mark(given_mask, mask)
    if not training:
        dropout_p = 0.0
    out = handler(SdpaCall(heads[0], heads[1], heads[2], mask, dropout_p, is_causal))
    return F.linear(out.movedim(-2, 0).flatten(-2), out_proj_weight, out_proj_bias), None


def _merge_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Combine both masks to one mask for SDPA, bool or additive in ``dtype``; None if both are None.

    In bool arguments True hides a key; in a bool result True shows it. ``key_padding_mask`` is ``[B, S_k]``
    or ``[S_k]``, and ``attn_mask`` ``[S_q, S_k]``, ``[H, S_q, S_k]`` or ``[B, H, S_q, S_k]``.
    """
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[..., None, None, :]
    if attn_mask is None or key_padding_mask is None:
        mask = attn_mask
        if mask is None:
            mask = key_padding_mask
        if mask is not None and mask.dtype == torch.bool:
            return ~mask
        return mask
    if attn_mask.dtype == key_padding_mask.dtype == torch.bool:
        return ~(attn_mask | key_padding_mask)
    return _to_additive(attn_mask, dtype) + _to_additive(key_padding_mask, dtype)


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _route(
    owner: AttentionOwner, func: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> tuple[Tensor, None]:
    return multi_head_attention(owner.attend, *args, fail=owner.fail, **kwargs)


register_function(F.multi_head_attention_forward, _route)
