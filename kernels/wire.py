"""Not exact: numbers in 8 bits on the way; the contract is :mod:`para_core.kernels.wire_reference`, bit for bit.

Writing is two launches: the largest amount of each head, which every element needs, and one that divides, rounds and puts the scale behind. Reading is
one. Bytes of an element of e: 2 e + 1 and e + 1. Rounding is done on integers, since GPUs before sm_89 have no such floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from para_core.kernels.wire_reference import SCALE_BYTES

NUM_WARPS = 4
# Elements of a program: 16 bytes at once of 16-bit numbers for each of its 128 threads.
ELEMENTS = 1024


@triton.jit
def to_e4m3(x):
    """The bits of float8_e4m3fn, nearest, ties to even, as uint8: 4 of exponent, 3 of mantissa. NaN where ``x`` is not finite; at most 464."""
    bits = x.to(tl.int32, bitcast=True)
    amount = bits & 0x7FFFFFFF
    # 3 of 23 bits of mantissa; the bias of the exponent is 7, not 127.
    normal = ((amount + 0x7FFFF + ((amount >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are of 2^-9, which are those of floats at 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    eight = tl.where(amount < 0x3C800000, small, normal)
    eight = tl.where(amount < 0x7F800000, eight, 0x7F)
    return (eight | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(eight):
    """The number of these bits, float32."""
    bits = eight.to(tl.int32)
    amount = bits & 0x7F
    normal = ((amount << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(amount < 8, amount.to(tl.float32) * 0.001953125, normal)
    number = tl.where(amount == 0x7F, float("nan"), number)
    return tl.where(bits >= 128, -number, number)


@triton.jit
def write_kernel(
    x, largest, out, step_b, step_h, step_s, step_d, num_heads, width, scale_elements, elements, FINEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one head of a sample some elements, in the order in which ``out`` has them: tokens, then the scale's rows."""
    of_head = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    at = x + (of_head // num_heads) * step_b + (of_head % num_heads) * step_h
    at += (element // width).to(tl.int64) * step_s + (element % width) * step_d
    number = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.load(largest + of_head).to(tl.float32), 448.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    eight = to_e4m3(tl.div_rn(number, scale + tl.zeros_like(number)))
    behind = element - elements
    byte = (scale.to(tl.int32, bitcast=True) >> (8 * tl.minimum(tl.maximum(behind, 0), 3))) & 0xFF
    eight = tl.where(inside, eight, tl.where(behind < FINEST, byte, 0).to(tl.uint8))
    tl.store(out + of_head * (elements + scale_elements) + element, eight, mask=element < elements + scale_elements)


@triton.jit
def read_kernel(
    x, out, step_b, step_h, step_s, step_d, num_heads, width, elements, FINEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    of_head = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    head = x + (of_head // num_heads) * step_b + (of_head % num_heads) * step_h
    byte = tl.arange(0, FINEST)
    behind = elements + byte
    scale = tl.load(head + (behind // width).to(tl.int64) * step_s + (behind % width) * step_d).to(tl.int32)
    scale = tl.sum(scale << (8 * byte), 0).to(tl.float32, bitcast=True)
    at = head + (element // width).to(tl.int64) * step_s + (element % width) * step_d
    number = from_e4m3(tl.load(at, mask=inside, other=0)) * scale
    tl.store(out + of_head * elements + element, number.to(out.dtype.element_ty), mask=inside)


def write(x: Tensor, scale_rows: int) -> Tensor:
    """:func:`para_core.kernels.wire_reference.write`, of 16 and 32-bit floats."""
    batch, heads, tokens, width = x.shape
    out = x.new_empty(batch, heads, tokens + scale_rows, width, dtype=torch.uint8)
    if out.numel():
        largest = torch.linalg.vector_norm(x, torch.inf, (2, 3)) if tokens else x.new_zeros(batch, heads)
        grid = (triton.cdiv((tokens + scale_rows) * width, ELEMENTS), batch * heads)
        sizes = (heads, width, scale_rows * width, tokens * width)
        write_kernel[grid](
            x, largest, out, *x.stride(), *sizes, FINEST=SCALE_BYTES, BLOCK=ELEMENTS, num_warps=NUM_WARPS
        )
    return out


def read(x: Tensor, scale_rows: int, dtype: torch.dtype) -> Tensor:
    """:func:`para_core.kernels.wire_reference.read`, into 16 and 32-bit floats."""
    batch, heads, tokens, width = x.shape
    tokens -= scale_rows
    out = x.new_empty(batch, heads, tokens, width, dtype=dtype)
    if out.numel():
        grid = (triton.cdiv(tokens * width, ELEMENTS), batch * heads)
        sizes = (heads, width, tokens * width)
        read_kernel[grid](x, out, *x.stride(), *sizes, FINEST=SCALE_BYTES, BLOCK=ELEMENTS, num_warps=NUM_WARPS)
    return out
