"""Pack and unpack the tensors that ranks send to each other, in one launch each for any number of ranks.

The reference is :mod:`para_core.kernels.pack_reference`. One program copies some rows ``[D]`` of one head of
one region. Each element is read once and written once. If nothing is rounded, the kernel copies integers of
the same size, whatever the dtype. Rounding to 8 bits takes no further launch, because a program holds whole
rows in registers and can compute their largest absolute values.

The operators of :mod:`para_core.attention.pack_ops` call it. Tests: tests/kernels/test_pack.py (bits, in
Triton's interpreter, which also checks what the kernel tells the compiler of offsets),
tests/kernels/test_compiled.py (registers, and 16 bytes per load).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from para_core.kernels.device_tables import MOST_TABLES, keep_outside_graphs, new_table
from para_core.kernels.eight_bits import from_e4m3, to_e4m3, to_int8
from para_core.kernels.pack_reference import LARGEST, SCALE_BYTES, CopyRegion

MOST_TENSORS = 3
NUM_WARPS = 4
# Bytes that a program copies: two 16-byte loads for each of its 128 threads.
_BYTES = 4096
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIELDS = tl.constexpr(len(CopyRegion._fields))


@triton.jit
def _copy_rows(
    x, buffer, region, head, block, batch, units, x_batch, x_head, x_token, x_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, PACK: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Copy rows ``block * ROWS`` to ``(block + 1) * ROWS`` of head number ``head`` of one region, if they exist.

    ``x`` is the region's tensor, whose rows have ``units * UNIT`` elements, and ``region`` points to the
    region's fields. The other arguments are those of :func:`pack_kernel`.
    """
    # Computing the width as a product tells the compiler that it is a multiple of UNIT, so that UNIT elements
    # are copied at once.
    width = units * UNIT
    # The fields of a CopyRegion, by their positions.
    token = tl.load(region + 1)
    num_tokens = tl.load(region + 2)
    first_head = tl.load(region + 3)
    num_heads = tl.load(region + 4)
    offset = tl.multiple_of(tl.load(region + 5), ALIGNED)
    step = tl.multiple_of(tl.load(region + 6), ALIGNED)
    num_rows = tl.where(head < num_heads, num_tokens * batch, 0)
    row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    of_tensor = (row % batch) * x_batch + (token + row // batch) * x_token
    x += (first_head + head) * x_head + of_tensor[:, None] + column[None, :] * x_column
    of_buffer = buffer + offset + head * (width + SCALE) + (row * step)[:, None]
    if SCALE == 0:
        if PACK:
            tl.store(of_buffer + column[None, :], tl.load(x, mask=inside), mask=inside)
        else:
            tl.store(x, tl.load(of_buffer + column[None, :], mask=inside), mask=inside)
    elif PACK:
        _write_rounded(x, of_buffer, column, inside, width, (row < num_rows)[:, None], SCALE, LARGEST)
    else:
        _read_rounded(x, of_buffer, column, inside, width, (row < num_rows)[:, None], SCALE, LARGEST)


@triton.jit
def _write_rounded(x, of_buffer, column, inside, width, exists, SCALE: tl.constexpr, LARGEST: tl.constexpr):
    """Round rows of ``width`` elements at the pointers ``x`` ``[ROWS, WIDTH]``, and store each with its scale.

    ``of_buffer`` ``[ROWS, 1]`` points to the beginnings of the rows in the buffer. ``exists`` ``[ROWS, 1]``
    masks rows, and ``inside`` ``[ROWS, WIDTH]`` masks elements.
    """
    number = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    amount = tl.abs(number)
    # tl.max ignores NaN, so replace NaN by inf: a row with NaN must become NaN.
    largest = tl.max(tl.where(amount == amount, amount, float("inf")), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)[:, None]
    number = tl.div_rn(number, scale + tl.zeros_like(number))
    eight = to_int8(number) if LARGEST == 127 else to_e4m3(number)
    tl.store(of_buffer + column[None, :], eight.to(tl.uint8, bitcast=True), mask=inside)
    byte = tl.arange(0, SCALE)[None, :]
    of_scale = (scale.to(tl.int32, bitcast=True) >> (8 * byte)) & 0xFF
    tl.store(of_buffer + width + byte, of_scale.to(tl.uint8), mask=exists)


@triton.jit
def _read_rounded(x, of_buffer, column, inside, width, exists, SCALE: tl.constexpr, LARGEST: tl.constexpr):
    """Store the numbers of rounded rows of the buffer in ``x``. The arguments are those of
    :func:`_write_rounded`.
    """
    byte = tl.arange(0, SCALE)[None, :]
    of_scale = tl.load(of_buffer + width + byte, mask=exists, other=0).to(tl.int32)
    scale = tl.sum(of_scale << (8 * byte), 1).to(tl.float32, bitcast=True)
    eight = tl.load(of_buffer + column[None, :], mask=inside, other=0)
    number = eight.to(tl.int8, bitcast=True).to(tl.float32) if LARGEST == 127 else from_e4m3(eight)
    tl.store(x, (number * scale[:, None]).to(x.dtype.element_ty), mask=inside)


# These arguments differ between ranks. Triton would otherwise compile the kernel again if one of them is 1 or
# a multiple of 16, which could happen on one rank in the middle of a run, while the others wait. Strides and
# pointers cannot be in this list: a load takes 16 bytes only if the compiler knows that they are multiples of
# 16. Strides of whole rows [D] always are if D is. With another D, for example 40, they are for some numbers of
# tokens and heads only, so a rank may compile a second variant later. It costs the others a wait, once.
@triton.jit(do_not_specialize=["num_blocks", "most_heads", "batch", "x_width", "y_width", "z_width"])
def pack_kernel(
    x, y, z, buffer, regions, num_blocks, most_heads, batch, x_width, y_width, z_width,
    x_batch, x_head, x_token, x_column, y_batch, y_head, y_token, y_column, z_batch, z_head, z_token, z_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, PACK: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Copy rows of up to three tensors into ``buffer``, or back. One program copies up to ROWS rows ``[D]``.

    Args:
        regions: The fields of all regions, one region after the other, int64.
        num_blocks: Number of programs for one head of the region with the most rows.
        most_heads: The largest number of heads of a region. Programs for heads or rows that a region does not
            have copy nothing.
        x_width: D of ``x``, in units of UNIT elements, as are ``y_width`` and ``z_width``.
        WIDTH: Number of columns of a program: a power of two, at least the D of every tensor.
        ALIGNED: Divisor of all offsets and steps in the buffer, a power of two.
        PACK: Whether to copy into the buffer.
        SCALE: Number of bytes of the scale after each row; 0 if rows are not rounded.
        LARGEST: Largest number of the format that rows are rounded to.
    """
    # The head varies fastest, so that programs that run at the same time copy neighbouring memory.
    head = (tl.program_id(0) % most_heads).to(tl.int64)
    of_region = tl.program_id(0) // most_heads
    block = (of_region % num_blocks).to(tl.int64)
    region = regions + (of_region // num_blocks) * _FIELDS
    tensor = tl.load(region)
    if tensor == 0:
        _copy_rows(
            x, buffer, region, head, block, batch, x_width, x_batch, x_head, x_token, x_column,
            ROWS, WIDTH, UNIT, ALIGNED, PACK, SCALE, LARGEST,
        )  # fmt: skip
    elif tensor == 1:
        _copy_rows(
            y, buffer, region, head, block, batch, y_width, y_batch, y_head, y_token, y_column,
            ROWS, WIDTH, UNIT, ALIGNED, PACK, SCALE, LARGEST,
        )  # fmt: skip
    else:
        _copy_rows(
            z, buffer, region, head, block, batch, z_width, z_batch, z_head, z_token, z_column,
            ROWS, WIDTH, UNIT, ALIGNED, PACK, SCALE, LARGEST,
        )  # fmt: skip


def pack(
    tensors: Sequence[Tensor], regions: Sequence[CopyRegion], buffer: Tensor, to: torch.dtype | None = None
) -> Tensor:
    """Copy or round like :func:`para_core.kernels.pack_reference.pack`, bit for bit, from up to three tensors.

    Raises:
        TypeError: Elements have more than 8 bytes, and are not rounded.
        ValueError: There are more than ``MOST_TENSORS`` tensors.
    """
    _launch_copy(tensors, buffer, regions, pack=True, eight_bits=to)
    return buffer


def unpack(
    buffer: Tensor, regions: Sequence[CopyRegion], tensors: Sequence[Tensor], of: torch.dtype | None = None
) -> Sequence[Tensor]:
    """Copy like :func:`para_core.kernels.pack_reference.unpack`, into up to three tensors.

    Raises:
        TypeError: Elements have more than 8 bytes, and were not rounded.
        ValueError: There are more than ``MOST_TENSORS`` tensors.
    """
    _launch_copy(tensors, buffer, regions, pack=False, eight_bits=of)
    return tensors


def _launch_copy(
    tensors: Sequence[Tensor],
    buffer: Tensor,
    regions: Sequence[CopyRegion],
    *,
    pack: bool,
    eight_bits: torch.dtype | None,
) -> None:
    if len(tensors) > MOST_TENSORS:
        raise ValueError(
            f"{len(tensors)} tensors; expected at most {MOST_TENSORS}. Pack the others in another call."
        )
    regions = tuple(regions)
    extent = _extent_of(regions)
    batch = tensors[0].shape[0]
    rows = batch * extent.tokens
    if not rows * extent.heads or not buffer.numel():
        return
    if eight_bits is None:
        integers = _INTEGERS.get(buffer.element_size())
        if integers is None:
            raise TypeError(
                f"Elements of dtype {buffer.dtype} have {buffer.element_size()} bytes; expected 1, 2, 4 or 8. "
                "Pack them with para_core.kernels.pack_reference."
            )
        tensors, buffer = [x.view(integers) for x in tensors], buffer.view(integers)
    # Every pointer argument must be a tensor, so pass the first tensor in place of missing ones.
    x, y, z = [*tensors, tensors[0], tensors[0]][:MOST_TENSORS]
    widths = [x.shape[3], y.shape[3], z.shape[3]]
    block = _constants_of(widths, x.element_size(), eight_bits, extent.divisor)
    num_blocks = triton.cdiv(rows, block["ROWS"])
    pack_kernel[(num_blocks * extent.heads * len(regions),)](
        x, y, z, buffer, _regions_on_device(regions, buffer.device), num_blocks, extent.heads, batch,
        *[width // block["UNIT"] for width in widths], *x.stride(), *y.stride(), *z.stride(),
        **block, PACK=pack, num_warps=NUM_WARPS,
    )  # fmt: skip


class _Extent(NamedTuple):
    """The most tokens and the most heads of a region, and a divisor of all offsets and steps: the largest up
    to 16.
    """

    tokens: int
    heads: int
    divisor: int


@lru_cache(maxsize=MOST_TABLES)
def _extent_of(regions: tuple[CopyRegion, ...]) -> _Extent:
    """Return the extent of ``regions``, which is kept for later calls like their table on the device."""
    tokens = max([region.tokens for region in regions], default=0)
    heads = max([region.heads for region in regions], default=0)
    positions = chain.from_iterable([(region.offset, region.step) for region in regions])
    return _Extent(tokens, heads, gcd(16, *positions))


@keep_outside_graphs
def _regions_on_device(regions: tuple[CopyRegion, ...], device: torch.device) -> Tensor:
    """Return the fields of all regions as one int64 tensor ``[fields * regions]``, which is kept for later
    calls.
    """
    return new_table(list(chain.from_iterable(regions)), torch.int64, device)


def _constants_of(
    widths: Sequence[int], size: int, eight_bits: torch.dtype | None, divisor: int
) -> dict[str, Any]:
    """Return the kernel's constants for elements of ``size`` bytes: the block of one program, and the 8-bit
    format.

    If offsets and steps are sums of whole rows ``[heads, D]``, as in the regions of swap.py and ring.py, the
    constants depend on widths and dtypes only, and so are equal on all ranks and in all calls. ``divisor``
    divides all offsets and steps. It is looked at for regions with gaps, which the reference allows as well.
    """
    columns = triton.next_power_of_2(max(1, *widths))
    scale_bytes, aligned, largest = 0, 16, 0.0
    if eight_bits is not None:
        scale_bytes, aligned, largest = SCALE_BYTES, SCALE_BYTES, LARGEST[eight_bits]
    # A divisor of the widths alone is not enough if there are gaps, and a divisor of the regions alone would be
    # larger on ranks with an even number of heads.
    if any(number % aligned for number in (*widths, divisor)):
        aligned = 1
    return {
        "ROWS": max(1, _BYTES // (columns * size)),
        "WIDTH": columns,
        "UNIT": gcd(16, *widths),
        "ALIGNED": aligned,
        "SCALE": scale_bytes,
        "LARGEST": largest,
    }
