"""Reimplement ``F.multi_head_attention_forward`` with any SDPA implementation.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` use torch's function. A mode cannot intercept the
SDPA call inside that function, because torch disables the mode while the mode handles the outer call.

A feature of :mod:`.registry`. A plan intercepts a model with such modules by a mode, never at the dispatcher
(``Region.has_encoders``): before the dispatcher sees SDPA, torch's function has refused masks that do not
have the sizes of this rank's tokens. Tests: tests/modes/test_unified.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.mask_rows import copy_mark
from para_core.attention.sdpa_call import MASK_DTYPES, Fail, SdpaCall, SdpaHandler
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
    fail: Fail,
) -> tuple[Tensor, None]:
    """Return the results of ``F.multi_head_attention_forward``, with ``handler`` in place of SDPA.

    The other arguments are those of torch's function, in its order.

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
        # The caller promises that this is the causal mask, so the flag is enough, also next to
        # key_padding_mask: unlike a mask of this rank's tokens, with which torch replaces it then, it holds
        # for all tokens.
        attn_mask = None
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
    mask = _merge_masks(key_padding_mask, attn_mask, num_heads, query, fail)
    if not training:
        dropout_p = 0.0
    out = handler(SdpaCall(heads[0], heads[1], heads[2], mask, dropout_p, is_causal))
    return F.linear(out.movedim(-2, 0).flatten(-2), out_proj_weight, out_proj_bias), None


def _merge_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, num_heads: int, query: Tensor, fail: Fail
) -> Tensor | None:
    """Return both masks as one mask for SDPA, bool or additive; None if both are None. A bool mask that is
    combined with a float mask gets the dtype of ``query``.

    In bool arguments True hides a key; in a bool result True shows it. ``key_padding_mask`` is ``[B, S_k]``
    or ``[S_k]``, and ``attn_mask`` ``[S_q, S_k]``, or ``[B * H, S_q, S_k]`` (``[H, S_q, S_k]`` without a
    batch). The result is marked like the mask that ``cp.shard`` made; like ``attn_mask`` if it made both.
    Raise ``ValueError`` by ``fail`` for another dtype, if ``attn_mask`` has another first dim, or if the
    masks are for different numbers of keys.
    """
    for name, one_mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        # An integer mask would be added to the scores if it is combined with the other one.
        if one_mask is not None and one_mask.dtype not in MASK_DTYPES:
            fail(
                ValueError(
                    f"{name} has dtype {one_mask.dtype}; expected bool (True: hidden), or a float of 16 bits or more "
                    "that is added."
                )
            )
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
    of_queries = attn_mask
    if of_queries is not None and of_queries.ndim == query.ndim == 3:
        expected = query.shape[1] * num_heads
        if of_queries.shape[0] != expected:
            fail(
                ValueError(
                    f"attn_mask is {list(of_queries.shape)}; expected [B * H, S_q, S_k], here with {expected} in the "
                    "first dim, or two dims for all samples and heads."
                )
            )
        of_queries = torch.unflatten(of_queries, 0, (-1, num_heads))  # to [B, H, S_q, S_k]
    of_keys = key_padding_mask
    if of_keys is not None:
        of_keys = of_keys[..., None, None, :]
    mask = _combine(of_keys, of_queries, query.dtype)
    copy_mark(key_padding_mask, mask)
    copy_mark(attn_mask, mask)
    return mask


def _combine(of_keys: Tensor | None, of_queries: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return two masks that broadcast to each other, in which True hides a key, as one mask for SDPA.

    A float mask is added to the scores, before and after. None if both are None.
    """
    if of_keys is not None and of_queries is not None:
        if of_keys.dtype == of_queries.dtype == torch.bool:
            return ~(of_queries | of_keys)
        return _to_additive(of_queries, dtype) + _to_additive(of_keys, dtype)
    mask = of_queries
    if mask is None:
        mask = of_keys
    if mask is not None and mask.dtype == torch.bool:
        return ~mask
    return mask


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in which True hides a key as one that is added to the scores; a float mask as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _route_multi_head(
    owner: AttentionOwner, func: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> tuple[Tensor, None]:
    return multi_head_attention(owner.attend, *args, fail=owner.fail, **kwargs)


register_function(F.multi_head_attention_forward, _route_multi_head)
