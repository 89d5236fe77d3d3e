"""Not exact: attention with queries and keys of 8 bits (SageAttention, arXiv:2410.02367). What the kernel rounds, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.kernels.attention_reference import attention as exact_attention
from para_core.kernels.merge_reference import merge

# An element of which all are smaller is rounded to 0.
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
    """:func:`para_core.kernels.attention_reference.attention`, each query and each key rounded to 255 steps of its own.

    From the keys of a head their mean is taken first (*smoothing*): it adds the same to all scores of a query, which softmax does not
    see, and what is left has no channel that is far off for all keys and would leave the others few steps. ``lse`` is that of the scores
    before, so that results over other keys, whose mean is another, can be merged with it.

    Args:
        query, …, out_dtype: as there; float16 or bfloat16. All keys are in the mean, hidden ones too.
        smooth: without it, as a figure shows it beside.

    Returns:
        ``out`` and ``lse`` as there. Weights and values are not rounded to less than they have.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mean = key.mean(2, dtype=torch.float32) if smooth else key.new_zeros(key[:, :, 0].shape, dtype=torch.float32)
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
    mean = mean.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    lse = lse + scale * (query.float() @ mean[..., None])[..., 0]
    if so_far is not None:
        earlier_out, earlier_lse = so_far
        out, lse = merge(earlier_out.to(lse.dtype), earlier_lse, out, lse)
    return out.to(query.dtype if out_dtype is None else out_dtype), lse


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., D]`` as int8, and what its rows were divided by, float32: a 127th of their largest amount.

    >>> round_rows(torch.tensor([[127.0, -63.4, 0.5]]))
    (tensor([[127, -63,   1]], dtype=torch.int8), tensor([1.]))
    """
    steps = x.abs().amax(-1).clamp_min(SMALLEST) / 127
    return torch.floor(x / steps[..., None] + 0.5).to(torch.int8), steps
