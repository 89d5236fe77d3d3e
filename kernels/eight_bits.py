"""Convert numbers to int8 and to float8_e4m3fn in Triton.

GPUs before sm_89 have no float8 instructions, so float8 uses integer operations. pack.py and the attention in
8 bits call these functions. Tests: tests/kernels/test_pack.py and tests/kernels/test_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_int8(x):
    """Round to the nearest integers and return them as int8. Halves are rounded up; NaN becomes 0."""
    x = tl.floor(x + 0.5)
    return tl.where(x == x, x, 0.0).to(tl.int8)


@triton.jit
def to_e4m3(x):
    """Round to PyTorch's float8_e4m3fn, to nearest even, and return its bits as uint8.

    ``x`` must be at most 464 in absolute value. Numbers that are not finite become NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    amount = bits & 0x7FFFFFFF
    # Keep 3 of the 23 mantissa bits, and change the bias of the exponent from 127 to 7.
    normal = ((amount + 0x7FFFF + ((amount >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2^-6 are subnormal in float8, with a spacing of 2^-9. float32 numbers near 2^14 have the
    # same spacing, so adding 2^14 rounds to it.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    eight = tl.where(amount < 0x3C800000, small, normal)
    eight = tl.where(amount < 0x7F800000, eight, 0x7F)
    return (eight | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(eight):
    """Return the float32 numbers that these bits of float8_e4m3fn stand for."""
    bits = eight.to(tl.int32)
    amount = bits & 0x7F
    normal = ((amount << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(amount < 8, amount.to(tl.float32) * 0.001953125, normal)
    number = tl.where(amount == 0x7F, float("nan"), number)
    return tl.where(bits >= 128, -number, number)
