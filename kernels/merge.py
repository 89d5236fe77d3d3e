"""Merge partial attention results in one launch; the reference is :mod:`para_core.kernels.merge_reference`.

One program merges some rows of one head. It reads out and lse of both sides once and writes the result once,
optionally in place. Bytes per row, with e bytes per element: D · (e_a + e_b + e_out) + 12.

The caller is :mod:`para_core.attention.merge`, which checks dtypes and falls back to PyTorch without Triton.
Tests: tests/kernels/test_small_kernels.py, and tests/kernels/test_compiled.py for registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from para_core.kernels.row_blocks import NUM_WARPS, block_of


@triton.jit
def merge_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, num_heads, num_rows, width, a_batch, a_head, a_row, a_column, b_batch,
    b_head, b_row, b_column, out_batch, out_head, out_row, out_column, lse_a_batch, lse_a_head, lse_a_row,
    lse_b_batch, lse_b_head, lse_b_row, lse_batch, lse_head, lse_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of one head per program.

    ``a_batch`` … ``lse_row`` are strides in elements: those of out_a, out_b, out, lse_a, lse_b and lse. WIDTH
    is a power of 2, at least ``width``, the head dim. A program reads its rows before it writes them, so the
    result may be written to the memory of a or b. Several threads read the lse of a row, which are exchanged
    through shared memory to weight the outputs, so a barrier comes after all reads and before the first write.
    """
    # Use a single grid dim, because the other grid dims are limited to 65535 programs. Blocks of rows vary
    # fastest.
    blocks = tl.cdiv(num_rows, ROWS)
    of_batch_and_head = tl.program_id(0) // blocks
    batch = (of_batch_and_head // num_heads).to(tl.int64)
    head = (of_batch_and_head % num_heads).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH).to(tl.int64)
    is_row = row < num_rows
    inside = is_row[:, None] & (column < width)[None, :]

    minus_infinity = float("-inf")
    of_a = tl.load(
        lse_a + batch * lse_a_batch + head * lse_a_head + row * lse_a_row, mask=is_row, other=minus_infinity
    )
    of_b = tl.load(
        lse_b + batch * lse_b_batch + head * lse_b_head + row * lse_b_row, mask=is_row, other=minus_infinity
    )
    # By default, the maximum of NaN and -inf is -inf, and the row would seem to see no key.
    peak = tl.maximum(of_a, of_b, propagate_nan=tl.PropagateNan.ALL)
    # -inf minus -inf is NaN, so give rows without a key finite numbers here; their result is set below.
    empty = peak == minus_infinity
    peak = tl.where(empty, 0.0, peak)
    weight_a = tl.exp(of_a - peak)
    weight_b = tl.exp(of_b - peak)
    total = tl.where(empty, 1.0, weight_a + weight_b)

    x = tl.load(
        out_a + batch * a_batch + head * a_head + row[:, None] * a_row + column[None, :] * a_column,
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    y = tl.load(
        out_b + batch * b_batch + head * b_head + row[:, None] * b_row + column[None, :] * b_column,
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    merged = (weight_a / total)[:, None] * x + (weight_b / total)[:, None] * y
    tl.store(
        out + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :] * out_column,
        merged.to(out.dtype.element_ty),
        mask=inside,
    )
    merged_lse = tl.where(empty, minus_infinity, peak + tl.log(total))
    tl.store(lse + batch * lse_batch + head * lse_head + row * lse_row, merged_lse, mask=is_row)


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge like :func:`para_core.kernels.merge_reference.merge`, for floats of 16 and 32 bits, without gradients.

    The result is written to ``into`` and returned. ``into`` may be ``(out_a, lse_a)``. Shapes and dtypes are
    not checked.
    """
    if into is None:
        into = torch.empty_like(out_a), torch.empty_like(lse_a)
    out, lse = into
    batch, heads, rows, width = out_a.shape
    if not out_a.numel():
        lse.copy_(torch.logaddexp(lse_a, lse_b))
        return into
    block = block_of(width)
    merge_kernel[(triton.cdiv(rows, block["ROWS"]) * batch * heads,)](
        out_a, lse_a, out_b, lse_b, out, lse, heads, rows, width, *out_a.stride(), *out_b.stride(), *out.stride(),
        *lse_a.stride(), *lse_b.stride(), *lse.stride(),
        **block, num_warps=NUM_WARPS,
    )  # fmt: skip
    return into
