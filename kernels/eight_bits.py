"""Numbers of 8 bits in Triton: integers, and float8_e4m3fn by integers, since GPUs before sm_89 have no such floats."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_int8(x):
    """The nearest integers, halves upwards; 0 for NaN."""
    x = tl.floor(x + 0.5)
    return tl.where(x == x, x, 0.0).to(tl.int8)


@triton.jit
def to_e4m3(x):
    """The bits of PyTorch's float8_e4m3fn, nearest, ties to even, as uint8: 4 of exponent, 3 of mantissa. NaN where ``x`` is not finite; at most 464."""
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
