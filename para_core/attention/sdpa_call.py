"""The arguments of an intercepted call of ``scaled_dot_product_attention``, as a named tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.checks import LengthCheck


class SdpaCall(NamedTuple):
    """The arguments of one call of ``scaled_dot_product_attention``.

    ``SdpaCall(*args, **kwargs)`` binds the arguments of an intercepted call like SDPA's signature. The class is a named
    tuple because Dynamo can trace its construction, which takes only a microsecond in eager code.

    Args:
        query: ``[..., H, S_q, D]``.
        key, value: ``[..., H_kv, S_k, D]`` and ``[..., H_kv, S_k, D_v]``.
        attn_mask: Bool or float, broadcastable to ``[..., H, S_q, S_k]``.
        dropout_p, is_causal, scale, enable_gqa: The other arguments of SDPA.
        lengths: Conditions that the lengths of the whole sequences must satisfy, for calls of FlashAttention's
            operators. SDPA has no such argument.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    lengths: LengthCheck | None = None

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> SdpaCall:
        """Return a copy of this call with other tensors. Unlike ``_replace``, Dynamo of torch 2.11 can trace it."""
        flags = (self.dropout_p, self.is_causal, self.scale, self.enable_gqa, self.lengths)
        return SdpaCall(query, key, value, attn_mask, *flags)

    def on_one_device(self) -> Tensor:
        """Compute the call on this rank alone, with SDPA's ``aten`` operator, which attention modes let through."""
        out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
            *self[:6], scale=self.scale, enable_gqa=self.enable_gqa
        )
        return out

    def original(self) -> Tensor:
        """Compute the call with ``F.scaled_dot_product_attention``, which outer modes intercept."""
        return F.scaled_dot_product_attention(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)


# An SdpaHandler is a function that computes an intercepted call of SDPA.
SdpaHandler = Callable[[SdpaCall], Tensor]
