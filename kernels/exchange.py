"""Packing and unpacking in one launch each, whatever the number of ranks and tensors; see :mod:`para_core.kernels.exchange_reference`.

A program copies some rows ``[D]`` of one head of one box. Each element is read once and written once. Copies know no dtype: the
kernel sees integers of as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from para_core.kernels.exchange_reference import Box

MOST_TENSORS = 3
NUM_WARPS = 4
# Bytes that a program copies: two loads of 16 bytes for each of its 128 threads.
_BYTES = 4096
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _copy_rows(
    x, buffer, box, head, block, batch, width, x_batch, x_head, x_token, x_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    token = tl.load(box + 1)
    num_tokens = tl.load(box + 2)
    first_head = tl.load(box + 3)
    num_heads = tl.load(box + 4)
    offset = tl.load(box + 5)
    step = tl.load(box + 6)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
        step = tl.multiple_of(step, 16)
    num_rows = tl.where(head < num_heads, num_tokens * batch, 0)
    row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    of_tensor = (row % batch) * x_batch + (token + row // batch) * x_token
    of_tensor = (first_head + head) * x_head + of_tensor[:, None] + column[None, :] * x_column
    of_buffer = offset + head * width + (row * step)[:, None] + column[None, :]
    if PACK:
        tl.store(buffer + of_buffer, tl.load(x + of_tensor, mask=inside), mask=inside)
    else:
        tl.store(x + of_tensor, tl.load(buffer + of_buffer, mask=inside), mask=inside)


@triton.jit
def exchange_kernel(
    x, y, z, buffer, boxes, num_blocks, most_heads, batch, x_width, y_width, z_width,
    x_batch, x_head, x_token, x_column, y_batch, y_head, y_token, y_column, z_batch, z_head, z_token, z_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    # Heads fastest: what lies beside each other in memory is copied at the same time.
    head = (tl.program_id(0) % most_heads).to(tl.int64)
    of_box = tl.program_id(0) // most_heads
    block = (of_box % num_blocks).to(tl.int64)
    box = boxes + (of_box // num_blocks) * 7
    tensor = tl.load(box)
    if tensor == 0:
        _copy_rows(
            x, buffer, box, head, block, batch, x_width, x_batch, x_head, x_token, x_column, ROWS, WIDTH, ALIGNED, PACK
        )
    elif tensor == 1:
        _copy_rows(
            y, buffer, box, head, block, batch, y_width, y_batch, y_head, y_token, y_column, ROWS, WIDTH, ALIGNED, PACK
        )
    else:
        _copy_rows(
            z, buffer, box, head, block, batch, z_width, z_batch, z_head, z_token, z_column, ROWS, WIDTH, ALIGNED, PACK
        )


def pack(tensors: Sequence[Tensor], boxes: Sequence[Box], buffer: Tensor) -> Tensor:
    """:func:`para_core.kernels.exchange_reference.pack`, of up to three tensors."""
    _launch(tensors, boxes, buffer, pack=True)
    return buffer


def unpack(buffer: Tensor, boxes: Sequence[Box], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """:func:`para_core.kernels.exchange_reference.unpack`, of up to three tensors."""
    _launch(tensors, boxes, buffer, pack=False)
    return tensors


def _launch(tensors: Sequence[Tensor], boxes: Sequence[Box], buffer: Tensor, *, pack: bool) -> None:
    if len(tensors) > MOST_TENSORS:
        raise ValueError(f"{len(tensors)} tensors; expected at most {MOST_TENSORS}. Pack the others on their own.")
    batch, size = tensors[0].shape[0], buffer.element_size()
    rows = batch * max([box.tokens for box in boxes], default=0)
    most_heads = max([box.heads for box in boxes], default=0)
    if not rows * most_heads or not buffer.numel():
        return
    flat = [x.view(_INTEGERS[size]) for x in (*tensors, buffer)]
    # Every pointer has to be one, though no box may say so.
    x, y, z = [*flat[:-1], flat[0], flat[0]][:MOST_TENSORS]
    block = block_of([x.shape[3], y.shape[3], z.shape[3]], size)
    num_blocks = triton.cdiv(rows, block["ROWS"])
    exchange_kernel[(num_blocks * most_heads * len(boxes),)](
        x,
        y,
        z,
        flat[-1],
        _on_device(tuple(boxes), buffer.device),
        num_blocks,
        most_heads,
        batch,
        x.shape[3],
        y.shape[3],
        z.shape[3],
        *x.stride(),
        *y.stride(),
        *z.stride(),
        **block,
        PACK=pack,
        num_warps=NUM_WARPS,
    )


@lru_cache(maxsize=256)
def _on_device(boxes: tuple[Box, ...], device: torch.device) -> Tensor:
    # Once per shape of a call; the host waits for nothing.
    return torch.tensor(boxes, dtype=torch.int64).to(device, non_blocking=True)


def block_of(widths: Sequence[int], size: int) -> dict[str, int]:
    """The part of a box that a program copies, of elements of ``size`` bytes; ``ALIGNED``: all rows begin at 16 elements."""
    columns = triton.next_power_of_2(max(widths))
    return {
        "ROWS": max(1, _BYTES // (columns * size)),
        "WIDTH": columns,
        "ALIGNED": all(width % 16 == 0 for width in widths),
    }
