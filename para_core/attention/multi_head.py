"""``F.multi_head_attention_forward`` around any attention function.

A mode is off while torch computes a call it let through, so the attention inside torch's own implementation (what
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call) would run unseen on this rank's tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head_attention(
    attend: Callable[..., Tensor],
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
) -> tuple[Tensor, None]:
    """The signature of ``F.multi_head_attention_forward``, after ``attend``, which has SDPA's.

    Args:
        query, key, value: ``[S_local, B, E]``, or ``[S_local, E]`` without a batch.

    Returns:
        ``[S_local, B, E]`` (or ``[S_local, E]``), and None for the weights.

    Raises:
        ValueError: an option that cannot be computed from a shard of the sequence.
    """
    if need_weights:
        raise ValueError(
            "need_weights=True asks for the whole attention matrix, which no rank holds. Call the attention with "
            "need_weights=False (nn.MultiheadAttention's default is True)."
        )
    extra = {"bias_k": bias_k, "bias_v": bias_v, "static_k": static_k, "static_v": static_v}
    given = [name for name, tensor in extra.items() if tensor is not None] + ["add_zero_attn"] * bool(add_zero_attn)
    if given:
        raise ValueError(f"{', '.join(given)}: keys that every rank would add once are not supported on several ranks.")
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True needs attn_mask here, as in torch: it only says that the mask is causal.")
    if is_causal and key_padding_mask is None:
        attn_mask = None  # torch, too, then computes by the flag
    elif key_padding_mask is not None or attn_mask is not None:
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        named = ", ".join(f"{name} {list(mask.shape)}" for name, mask in masks.items() if mask is not None)
        raise ValueError(f"{named}: masks are not supported on more than one rank yet, other than is_causal=True.")

    weights: tuple[Tensor | None, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None and not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        if weight is None:
            raise ValueError("use_separate_proj_weight=True needs q_proj_weight, k_proj_weight and v_proj_weight.")
        projected = F.linear(x, weight, bias)
        # [S, B, E] or [S, E] -> [B, H, S, E / H] or [H, S, E / H]
        heads.append(torch.unflatten(projected, -1, (num_heads, -1)).movedim(0, -2))
    out = attend(*heads, attn_mask=None, dropout_p=dropout_p if training else 0.0, is_causal=is_causal)
    return F.linear(out.movedim(-2, 0).flatten(-2), out_proj_weight, out_proj_bias), None
