"""Change and forecast of residuals in Triton; the reference is :mod:`para_core.kernels.residual_reference`.

The change of a residual takes two launches: sums per chunk, and the sum over chunks. There are no atomics,
and chunks have the same length on every GPU. So the order of additions, and with it every bit of the result,
depends only on the number of elements, and on whether it, the addresses and the steps between samples are
multiples of 16: the compiler then loads, and adds, in another order. Ranks with equal inputs in equal places
get equal bits. The launches move 2 · e bytes per element of e bytes, and 16 per chunk. Sums and differences
are in float32.

A forecast of up to 3 residuals is one launch. It is rounded once, and the reference after each residual, so
in 16 bits they differ by a rounding. The launch moves (2 + residuals) · e bytes per element.

Called by :mod:`para_core.cache.residual_operators` only. ``tests/kernels/test_small_kernels.py`` compares the
numbers with float64, and ``tests/kernels/test_compiled.py`` reads registers, spills and widths of loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
# Elements that a program holds at once. In 16-bit dtypes a thread then loads 8 elements, 16 bytes, of each
# tensor.
BLOCK = 1024
# Number of blocks that a program sums one after the other. tests/simulated_gpu/install.py replaces both
# numbers.
BLOCKS_PER_CHUNK = 16
MOST_RESIDUALS = 3  # The x, y and z of forecast_kernel.


@triton.jit
def change_kernel(
    now, before, sums, num_elements, now_batch, before_batch,
    BLOCK: tl.constexpr, BLOCKS_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    """Store Σ|now - before| and Σ|before| of one chunk of one sample: ``sums`` is ``[B, chunks, 2]``.

    ``num_elements`` is specialised like any integer: only if it is known to be a multiple of 16 can the mask
    be one for 16 bytes. That makes two variants at most.
    """
    chunk, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = chunk.to(tl.int64) * BLOCK * BLOCKS_PER_CHUNK
    changed = tl.zeros((BLOCK,), tl.float32)
    size = tl.zeros((BLOCK,), tl.float32)
    for step in range(BLOCKS_PER_CHUNK):
        element = start + step * BLOCK + tl.arange(0, BLOCK)
        inside = element < num_elements
        x = tl.load(now + sample * now_batch + element, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(before + sample * before_batch + element, mask=inside, other=0.0).to(tl.float32)
        changed += tl.abs(x - y)
        size += tl.abs(y)
    pair = sums + (sample * tl.num_programs(0) + chunk) * 2
    tl.store(pair, tl.sum(changed, axis=0))
    tl.store(pair + 1, tl.sum(size, axis=0))


@triton.jit
def add_up_kernel(sums, totals, num_chunks, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Store the sums over the chunks of one sample: ``totals`` is ``[B, 2]``. A round adds ``BLOCK`` chunks."""
    sample = tl.program_id(0).to(tl.int64)
    changed = tl.zeros((BLOCK,), tl.float32)
    size = tl.zeros((BLOCK,), tl.float32)
    for step in range(ROUNDS):
        chunk = step * BLOCK + tl.arange(0, BLOCK)
        pair = sums + (sample * num_chunks + chunk) * 2
        changed += tl.load(pair, mask=chunk < num_chunks, other=0.0)
        size += tl.load(pair + 1, mask=chunk < num_chunks, other=0.0)
    tl.store(totals + sample * 2, tl.sum(changed, axis=0))
    tl.store(totals + sample * 2 + 1, tl.sum(size, axis=0))


@triton.jit
def forecast_kernel(
    entry, x, y, z, out, of_x, of_y, of_z, num_elements, RESIDUALS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store ``entry + of_x * x + of_y * y + of_z * z`` for the first ``RESIDUALS`` of x, y and z, on flat tensors."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_elements
    total = tl.load(entry + element, mask=inside).to(tl.float32)
    total += of_x * tl.load(x + element, mask=inside).to(tl.float32)
    if RESIDUALS > 1:
        total += of_y * tl.load(y + element, mask=inside).to(tl.float32)
    if RESIDUALS > 2:
        total += of_z * tl.load(z + element, mask=inside).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=inside)


def change(now: Tensor, before: Tensor) -> Tensor:
    """Return Σ|now - before| and Σ|before| of each sample, ``[B, 2]``, for floats of 16 and 32 bits.

    The reference is :func:`para_core.kernels.residual_reference.change`.
    """
    now, before = (x if x.stride(1) == 1 else x.contiguous() for x in (now, before))
    batch, num_elements = now.shape
    totals = now.new_empty(batch, 2, dtype=torch.float32)
    if not now.numel():
        return totals.zero_()
    num_chunks = triton.cdiv(num_elements, BLOCK * BLOCKS_PER_CHUNK)
    sums = totals.new_empty(batch, num_chunks, 2)
    change_kernel[(num_chunks, batch)](
        now,
        before,
        sums,
        num_elements,
        now.stride(0),
        before.stride(0),
        BLOCK=BLOCK,
        BLOCKS_PER_CHUNK=BLOCKS_PER_CHUNK,
        num_warps=NUM_WARPS,
    )
    # Triton 3.6's interpreter supports only constant ranges, so the number of rounds is a compile-time
    # constant. One round covers 16.8 million elements, so the kernel is hardly ever compiled again.
    rounds = triton.cdiv(num_chunks, BLOCK)
    add_up_kernel[(batch,)](sums, totals, num_chunks, BLOCK=BLOCK, ROUNDS=rounds, num_warps=NUM_WARPS)
    return totals


def forecast(entry: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute :func:`para_core.kernels.residual_reference.forecast` for floats of 16 and 32 bits, up to 3
    residuals.

    Raises:
        ValueError: There are no residuals or more than 3, or another number of weights.
    """
    if not 1 <= len(residuals) <= MOST_RESIDUALS or len(weights) != len(residuals):
        raise ValueError(
            f"{len(residuals)} residuals and {len(weights)} weights; expected 1 to {MOST_RESIDUALS} of both, as many "
            "of one as of the other."
        )
    entry, *residuals = (x.contiguous() for x in (entry, *residuals))
    out = torch.empty_like(entry)
    number = out.numel()
    if number:
        # Every pointer argument must be a tensor, so pass the first residual in place of missing ones.
        x, y, z = [*residuals, *residuals[:1] * 2][:MOST_RESIDUALS]
        of_x, of_y, of_z = [*map(float, weights), 0.0, 0.0][:MOST_RESIDUALS]
        grid = (triton.cdiv(number, BLOCK),)
        counts = {"RESIDUALS": len(residuals), "BLOCK": BLOCK}
        forecast_kernel[grid](entry, x, y, z, out, of_x, of_y, of_z, number, **counts, num_warps=NUM_WARPS)
    return out
