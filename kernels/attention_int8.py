"""Attention with 8-bit queries and keys in Triton, which is not exact.

The reference is :mod:`para_core.kernels.attention_int8_reference`. There are three launches: the mean of the
keys, the rounding of the keys, and the kernel of exact attention. In this mode that kernel rounds queries
when it reads them, multiplies integers, and corrects lse for the subtracted mean. So masks, ranges, offsets
and continuation work as in exact attention. Each token and head has its own scale, unlike SageAttention
(arXiv:2410.02367), which has one per block of tokens, so tiles need not be aligned to blocks. The product of
weights and values is computed in 16 bits.

The caller is the backend "triton-int8" (``para_core/attention/backends/triton_int8.py``). Tests:
tests/kernels/test_attention.py, and tests/kernels/test_compiled.py for registers and shared memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from para_core.kernels.attention_configs import KernelCall, config_for
from para_core.kernels.attention_launch import (
    RoundedKeys,
    check_tensors,
    empty_outputs,
    launch_kernel,
    register,
)
from para_core.kernels.eight_bits import to_int8
from para_core.kernels.row_blocks import NUM_WARPS, block_of

INT8_DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def round_keys_kernel(
    key, mean, rounded, scales, step_kb, step_kh, step_k, num_heads, num_keys, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Subtract ``mean`` from the keys and round them to 8 bits, ROWS keys of one head per program.

    ``step_*`` are the strides of ``key`` in elements; its last dim has stride 1. ``mean``, ``rounded`` and
    ``scales`` are contiguous. WIDTH is a power of 2, at least ``width``, the head dim.
    """
    blocks = tl.cdiv(num_keys, ROWS)
    of_head = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_keys)[:, None] & (column < width)[None, :]
    at = key + (of_head // num_heads) * step_kb + (of_head % num_heads) * step_kh
    x = tl.load(at + row[:, None] * step_k + column[None, :], mask=inside, other=0.0).to(tl.float32)
    x -= tl.load(mean + of_head * width + column, mask=column < width, other=0.0)[None, :]
    x = tl.where(inside, x, 0.0)
    step = tl.maximum(tl.max(tl.abs(x), 1), 1e-30) / 127
    at = rounded + (of_head * num_keys + row)[:, None] * width + column[None, :]
    tl.store(at, to_int8(x / step[:, None]), mask=inside)
    tl.store(scales + of_head * num_keys + row, step, mask=row < num_keys)


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
) -> tuple[Tensor, Tensor]:
    """Compute :func:`para_core.kernels.attention_int8_reference.attention`, without a gradient. Not exact.

    The dtypes are float16 and bfloat16, head dims at most 256.

    Raises:
        TypeError: If the dtypes differ or are not supported.
        ValueError: If the shapes of query, key, value and mask do not fit, or a head dim is too large.
    """
    if query.dtype not in INT8_DTYPES:
        raise TypeError(
            f"query is {query.dtype}; attention in 8 bits expects float16 or bfloat16. Exact attention accepts it."
        )
    check_tensors(query, key, value, mask)
    out_so_far, lse_so_far = so_far or (None, None)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    outputs: tuple[Tensor, Tensor] = torch.ops.para_core.triton_attention_int8.default(
        query,
        key,
        value,
        mask,
        key_ranges,
        out_so_far,
        lse_so_far,
        is_causal,
        query_offset - key_offset,
        scale,
        out_dtype or query.dtype,
    )
    return outputs


def round_keys(key: Tensor) -> RoundedKeys:
    """Subtract from ``key`` ``[B, H_kv, S_k, D]`` its mean over dim 2, and round to 8 bits.
    S_k is at least 1.

    An integer cannot be NaN. A key that is not finite makes the mean so, too, and by the mean the attention
    kernel makes all results of the head NaN.
    """
    batch, heads, num_keys, width = key.shape
    if key.stride(-1) != 1:
        key = key.contiguous()
    rounded = RoundedKeys(
        key.new_empty(key.shape, dtype=torch.int8),
        key.new_empty(key.shape[:3], dtype=torch.float32),
        key.mean(2, dtype=torch.float32),
    )
    block = block_of(width)
    grid = (triton.cdiv(num_keys, block["ROWS"]) * batch * heads,)
    numbers = (*key.stride()[:3], heads, num_keys, width)
    with torch.cuda.device_of(key):
        round_keys_kernel[grid](
            key, rounded.mean, rounded.key, rounded.scales, *numbers, **block, num_warps=NUM_WARPS
        )
    return rounded


def _launch_int8(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator. Its arguments are the fields of :class:`KernelCall` in their order, then ``out_dtype``."""
    call, out_dtype = KernelCall(*arguments[:-1]), arguments[-1]
    out, lse = empty_outputs(call.query, call.value, out_dtype)
    rounded = None
    if call.key.numel():  # Without keys there is no mean, and nothing to round.
        rounded = round_keys(call.key)
    launch_kernel(config_for(call, eight_bits=True), call, out=out, lse=lse, rounded=rounded)
    return out, lse


register("triton_attention_int8", _launch_int8)
