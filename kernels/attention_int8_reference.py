"""Reference of attention with 8-bit queries and keys (arXiv:2410.02367), in plain PyTorch. Not exact.

Only tests and benchmarks call it: without Triton the backend "triton-int8" is refused, not replaced. Tests:
tests/kernels/test_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.kernels.attention_reference import attention as exact_attention
from para_core.kernels.merge_reference import merge

# Lower bound of a row's largest absolute value, so that the scale of a row of zeros is not 0.
SMALLEST = 1e-30


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    key_ranges: Tensor | None = None,
    scale: float | None = None,
    so_far: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    smooth: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`para_core.kernels.attention_reference.attention` with queries and keys rounded to int8.
    Not exact.

    First the mean of each head's keys, masked ones included, is subtracted unless ``smooth`` is False. That
    adds the same number to all scores of a query, which softmax ignores. Without it, channels that are far
    from zero for all keys would take up most of the 8-bit range. ``lse`` is computed for the original scores,
    so results over different keys, with different means, can be merged. Inputs are float16 or bfloat16.
    Weights and values are not rounded.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    mean = key.mean(2, dtype=torch.float32)
    if not smooth or key.shape[2] == 0:  # The mean of no keys is NaN.
        mean = torch.zeros_like(mean)
    rounded_key, key_steps = round_rows(key.float() - mean[:, :, None])
    rounded_query, query_steps = round_rows(query.float())
    out, lse = exact_attention(
        rounded_query * query_steps[..., None],
        rounded_key * key_steps[..., None],
        value.float(),
        mask=mask,
        is_causal=is_causal,
        query_offset=query_offset,
        key_offset=key_offset,
        key_ranges=key_ranges,
        scale=scale,
        out_dtype=torch.float32,
    )
    mean = mean.repeat_interleave(query.shape[1] // max(1, key.shape[1]), dim=1)
    lse = lse + scale * (query.float() @ mean[..., None])[..., 0]
    if so_far is not None:
        earlier_out, earlier_lse = so_far
        out, lse = merge(earlier_out.to(lse.dtype), earlier_lse, out, lse)
    return out.to(out_dtype or query.dtype), lse


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` ``[..., D]`` rounded to int8, and the scale ``[...]`` of each row: its largest absolute
    value / 127.

    >>> round_rows(torch.tensor([[127.0, -63.4, 0.5]]))
    (tensor([[127, -63,   1]], dtype=torch.int8), tensor([1.]))
    """
    steps = x.abs().amax(-1).clamp_min(SMALLEST) / 127
    return torch.floor(x / steps[..., None] + 0.5).to(torch.int8), steps
