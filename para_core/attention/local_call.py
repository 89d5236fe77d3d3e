"""A call of attention on one device, and the tensors that backends make for it.

:mod:`.blocks` and :mod:`.usp` make the calls, :mod:`.local` computes them. Tests:
tests/attention/test_local.py and tests/attention/test_cuda_paths.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor


class LocalAttentionCall(NamedTuple):
    """The arguments of attention on one device.

    H_kv divides H: query head i uses key head ``i // (H // H_kv)``. PyTorch's backends take calls that
    :meth:`fold` returned, without dims of size 0.
    """

    query: Tensor  # [B, H, S_q, D]
    key: Tensor  # [B, H_kv, S_k, D]
    value: Tensor  # [B, H_kv, S_k, D_v]
    # Broadcastable to [B, H, S_q, S_k]: bool (True shows a key) or float (added to the scores).
    mask: Tensor | None = None
    is_causal: bool = False  # Whether query i sees only keys 0 … i, in addition to the mask.
    scale: float | None = None  # Factor of the scores; 1 / √D if None.

    def fold(self) -> LocalAttentionCall:
        """Return the call with its causal mask merged into ``mask``, so that at most one of them is set.

        The mask gets a dtype that SDPA accepts: bool, or that of :func:`bias_dtype`. Without a mask the call is
        returned unchanged.
        """
        query, key, value, mask, is_causal, scale = self
        if mask is None:
            return self
        is_taken = mask.dtype in (torch.bool, bias_dtype(mask, query))
        if is_taken and not is_causal:
            return self
        if is_causal:
            causal = mask.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            if mask.dtype == torch.bool:
                mask = mask & causal
            else:
                mask = mask.masked_fill(~causal, -inf)
        if not is_taken:
            largest = torch.finfo(query.dtype).max
            if torch.finfo(mask.dtype).max <= largest:
                mask = mask.to(query.dtype)
            else:
                # finfo(float32).min must not become -inf: in a row full of finfo.min SDPA gives all keys
                # equal weights, but a row full of -inf has no keys. Clamp to half of the range, because
                # kernels multiply scores by log2(e).
                hidden = mask == -inf
                mask = mask.clamp(min=-largest / 2).to(query.dtype).masked_fill_(hidden, -inf)
        return LocalAttentionCall(query, key, value, mask, False, scale)

    def with_dense_rows(self) -> LocalAttentionCall:
        """Return the call with query, key and value whose last dim has stride 1.

        PyTorch's fused backends take no other tensors. SDPA chooses none of them then, but a backend that the
        user named is called directly, and FlashAttention on a CPU would read wrong memory without an error.
        """
        query, key, value = self.query, self.key, self.value
        if query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            return self
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        return self._replace(query=query, key=key, value=value)

    def expand_key_heads(self) -> LocalAttentionCall:
        """Return the call with one key head per query head."""
        heads, key_heads = self.query.shape[1], self.key.shape[1]
        if heads == key_heads:
            return self
        key, value = (x.repeat_interleave(heads // key_heads, dim=1) for x in (self.key, self.value))
        return self._replace(key=key, value=value)

    @property
    def factor(self) -> float:
        """The factor by which q·k is multiplied: ``scale``, or 1 / √D if ``scale`` is None."""
        if self.scale is not None:
            return self.scale
        factor: float = self.query.shape[-1] ** -0.5
        return factor

    @property
    def bias(self) -> Tensor | None:
        """``mask`` as an additive mask ``[B or 1, H or 1, S_q or 1, S_k]`` in the dtype of query, with
        aligned rows.

        Rows begin at multiples of 8 elements, because memory-efficient attention loads 16 bytes at a time
        (mem_eff/kernel_forward.h and kernel_backward.h, ``check_supported``). SDPA pads masks in the same way
        (transformers/attention.cpp, ``preprocess_mask``).
        """
        query, mask, num_keys = self.query, self.mask, self.key.shape[-2]
        if mask is None:
            return None
        *strides, last = mask.stride()
        is_aligned = (
            last == 1 and mask.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in strides)
        )
        if is_aligned and mask.dtype == query.dtype and mask.shape[-1] == num_keys:
            return mask
        bias = aligned_rows(query, (*mask.shape[:-1], num_keys), query.dtype).copy_(mask)
        if mask.dtype == torch.bool:
            return bias.log_()  # log(True) = 0, log(False) = -inf
        return bias

    @property
    def expanded_bias(self) -> Tensor | None:
        """:attr:`bias` expanded to ``[B, H, S_q, S_k]``, as memory-efficient attention takes it, without a copy."""
        bias = self.bias
        if bias is None:
            return None
        return bias.expand(*self.query.shape[:-1], self.key.shape[-2])


def bias_dtype(mask: Tensor, query: Tensor) -> torch.dtype:
    """Return the dtype in which SDPA takes ``mask`` as an additive mask: that of ``query``; on a CPU also float32.

    With float64 queries SDPA takes a float32 mask too, but the result of torch 2.13 is wrong from 16 keys on.
    """
    if mask.dtype == torch.float32 and query.is_cpu and query.dtype != torch.float64:
        return mask.dtype
    return query.dtype


def aligned_rows(
    query: Tensor, shape: Sequence[int], dtype: torch.dtype, *, fill: float | None = None
) -> Tensor:
    """Return a tensor of ``shape`` on the device of ``query`` whose rows begin at multiples of 8 elements.

    It is filled with ``fill``, or uninitialised if that is None. The padding of the rows is initialised in
    both cases.
    """
    *leading, width = shape
    padding = -width % 8
    padded = (*leading, width + padding)
    if fill is not None:
        return query.new_full(padded, fill, dtype=dtype)[..., :width]
    # Kernels also read the padding of a row, so it must not be NaN.
    if padding:
        rows = query.new_zeros(padded, dtype=dtype)
    else:
        rows = query.new_empty(padded, dtype=dtype)
    return rows[..., :width]


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return an uninitialised ``[B, H, S_q, D_v]`` with the memory layout of SDPA's result, ``[B, S_q, H, D_v]``."""
    batch, heads, num_queries, _ = query.shape
    return query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)


def fully_masked_rows(mask: Tensor) -> Tensor:
    """Return a bool tensor ``[B or 1, H or 1, S_q or 1]`` that is True for rows of ``mask`` that hide every key."""
    if mask.dtype == torch.bool:
        return ~mask.any(-1)
    return (mask == -inf).all(-1)
