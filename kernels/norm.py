"""Group norm over sharded rows, in three launches; the reference is :mod:`para_core.kernels.norm_reference`.

The statistics take two launches: one for chunks of each group, and one that merges the chunks. Each thread
keeps a running mean and the sum of squared deviations from this mean (Welford). Threads, then chunks, and in
the third launch ranks, are merged in two passes: first the mean of all their means, weighted by their numbers
of elements, then the squared deviations around it. So numbers far from zero do not lose precision. There are
no atomics, so the order of additions depends on shape and strides only. The third launch normalizes; each of
its programs merges the statistics of all ranks. Each element is read twice and written once.

Called by :mod:`para_core.spatial.norm` only, as ``load_kernel("norm")``. Tests:
tests/kernels/test_small_kernels.py and test_compiled.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
# Elements of a tile, and number of chunks that the second launch merges in a round.
BLOCK = 1024
# Number of tiles that a program of the first launch reads one after the other. tests/simulated_gpu/install.py
# replaces both numbers.
BLOCKS_PER_CHUNK = 16
# Maximum number of channels per tile of the normalizing launch, if channels are the last dim in memory.
MOST_CHANNELS = 32


# num_chunks, and num_blocks below, change with the number of rows, and no load gets faster if one of them is
# 1 or a multiple of 16, so Triton must not compile a kernel for that. With size it may: wide loads need to
# know its divisor.
@triton.jit(do_not_specialize=["num_chunks"])
def moments_kernel(
    x, parts, size, channels, num_chunks, groups, batch_step, group_step, channel_step, step,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCKS_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the count, mean and sum of squared deviations of one chunk of one group: ``[B * groups, chunks, 3]``."""
    # A single grid dim, here and below, because the other grid dims are limited to 65535 programs.
    chunk, group = tl.program_id(0) % num_chunks, (tl.program_id(0) // num_chunks).to(tl.int64)
    x += (group // groups) * batch_step + (group % groups) * group_step
    channel = tl.arange(0, CHANNELS)[:, None].to(tl.int64)
    # Subtract the first element of the group from all elements. Elements far from zero are usually close to
    # each other, so the differences are small and keep their precision.
    origin = tl.load(x).to(tl.float32)
    count = tl.zeros((CHANNELS, SIZE), tl.float32)
    mean = tl.zeros((CHANNELS, SIZE), tl.float32)
    squares = tl.zeros((CHANNELS, SIZE), tl.float32)
    for i in range(BLOCKS_PER_CHUNK):
        element = chunk.to(tl.int64) * (SIZE * BLOCKS_PER_CHUNK) + i * SIZE + tl.arange(0, SIZE)[None, :]
        inside = (channel < channels) & (element < size)
        number = (
            tl.load(x + channel * channel_step + element * step, mask=inside, other=0.0).to(tl.float32)
            - origin
        )
        count += tl.where(inside, 1.0, 0.0)
        apart = number - mean
        # The elements of a thread are inside up to some round and outside after it, so i + 1 is their number.
        mean += tl.where(inside, apart / (i + 1), 0.0)
        squares += tl.where(inside, apart * (number - mean), 0.0)
    # Not 0, because each chunk has at least one element.
    total = tl.sum(tl.sum(count, 1), 0)
    common = tl.sum(tl.sum(count * mean, 1), 0) / total
    apart = mean - common
    squares = tl.sum(tl.sum(squares + count * apart * apart, 1), 0)
    parts += (group * num_chunks + chunk) * 3
    tl.store(parts, total)
    tl.store(parts + 1, common)
    tl.store(parts + 2, squares)


@triton.jit
def merge_chunks_kernel(
    x, parts, moments, num_chunks, groups, batch_step, group_step, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    """Merge the chunks of one group, ``BLOCK`` in a round, and store its variance and mean: ``[2, B * groups]``."""
    group = tl.program_id(0).to(tl.int64)
    # The same element as in moments_kernel, because the means of the chunks are distances from it.
    origin = tl.load(x + (group // groups) * batch_step + (group % groups) * group_step).to(tl.float32)
    parts += group * num_chunks * 3
    count = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROUNDS):
        chunk = i * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(parts + chunk * 3, mask=chunk < num_chunks, other=0.0)
        count += number
        weighted += number * tl.load(parts + chunk * 3 + 1, mask=chunk < num_chunks, other=0.0)
    total = tl.sum(count, 0)
    mean = tl.sum(weighted, 0) / total
    squares = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROUNDS):
        chunk = i * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(parts + chunk * 3, mask=chunk < num_chunks, other=0.0)
        apart = tl.load(parts + chunk * 3 + 1, mask=chunk < num_chunks, other=0.0) - mean
        squares += tl.load(parts + chunk * 3 + 2, mask=chunk < num_chunks, other=0.0) + number * apart * apart
    tl.store(moments + group, tl.sum(squares, 0) / total)
    tl.store(moments + tl.num_programs(0) + group, origin + mean)


@triton.jit(do_not_specialize=["num_blocks"])
def normalize_kernel(
    x, out, of_ranks, shares, weight, bias, eps, size, num_blocks, channels, groups, per_group,
    batch_step, channel_step, step, out_batch_step, out_channel_step, out_step,
    RANKS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Normalize a tile of channels and elements of one sample with the merged statistics of ``RANKS`` ranks.

    ``num_blocks`` is the number of tiles along the elements, which vary fastest.
    """
    tiles = tl.cdiv(channels, CHANNELS)
    block, tile = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    batch = (tile // tiles).to(tl.int64)
    channel = (tile % tiles) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    group = batch * groups + channel // per_group
    of_all = (tl.num_programs(0) // (num_blocks * tiles)) * groups
    first = tl.load(of_ranks + of_all + group, mask=exists, other=0.0)
    mean = tl.zeros((CHANNELS,), tl.float32)
    for rank in range(RANKS):
        share = tl.load(shares + rank)
        mean += share * (tl.load(of_ranks + (2 * rank + 1) * of_all + group, mask=exists, other=0.0) - first)
    mean += first
    var = tl.zeros((CHANNELS,), tl.float32)
    for rank in range(RANKS):
        share = tl.load(shares + rank)
        apart = tl.load(of_ranks + (2 * rank + 1) * of_all + group, mask=exists, other=0.0) - mean
        var += share * (tl.load(of_ranks + 2 * rank * of_all + group, mask=exists, other=0.0) + apart * apart)
    scale = 1.0 / tl.sqrt(var + eps)
    if HAS_WEIGHT:
        scale *= tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    element = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = exists[:, None] & (element < size)
    channel = channel[:, None].to(tl.int64)
    number = tl.load(x + batch * batch_step + channel * channel_step + element * step, mask=inside, other=0.0)
    # Subtract the mean before scaling: number * scale + shift would lose precision if numbers are far from
    # zero.
    number = (number.to(tl.float32) - mean[:, None]) * scale[:, None]
    if HAS_BIAS:
        number += tl.load(bias + channel, mask=exists[:, None], other=0.0).to(tl.float32)
    out += batch * out_batch_step + channel * out_channel_step + element * out_step
    tl.store(out, number.to(out.dtype.element_ty), mask=inside)


def moments(x: Tensor, groups: int) -> Tensor:
    """Compute :func:`para_core.kernels.norm_reference.moments` for floats of 16 and 32 bits."""
    x = with_one_stride(x)
    batch, per_group = x.shape[0], x.shape[1] // groups
    statistics = x.new_empty(2, batch, groups, dtype=torch.float32)
    # A launch needs a program. No rank is without rows (require_rows of para_core/spatial/rules.py), so these
    # are no samples, or images without a column.
    if not x.numel():
        return statistics.zero_()
    batch_step, channel_step, step, size = _steps(x)
    channels = per_group
    if channel_step == size * step:
        # The channels of a group follow each other in memory, so treat the group as a single channel.
        channels, size = 1, per_group * size
    block = tile_of(channels)
    num_chunks = triton.cdiv(size, block["SIZE"] * BLOCKS_PER_CHUNK)
    parts = statistics.new_empty(batch * groups, num_chunks, 3)
    group_arguments = groups, batch_step, per_group * channel_step
    moments_kernel[(num_chunks * batch * groups,)](
        x,
        parts,
        size,
        channels,
        num_chunks,
        *group_arguments,
        channel_step,
        step,
        **block,
        BLOCKS_PER_CHUNK=BLOCKS_PER_CHUNK,
        num_warps=NUM_WARPS,
    )
    merge_chunks_kernel[(batch * groups,)](
        x,
        parts,
        statistics,
        num_chunks,
        *group_arguments,
        BLOCK=BLOCK,
        ROUNDS=triton.cdiv(num_chunks, BLOCK),
        num_warps=NUM_WARPS,
    )
    return statistics


def normalize(
    x: Tensor,
    of_ranks: Tensor,
    shares: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute :func:`para_core.kernels.norm_reference.normalize` for floats of 16 and 32 bits."""
    x, of_ranks, shares = with_one_stride(x), of_ranks.contiguous(), shares.contiguous()
    out = torch.empty_like(x)
    if not out.numel():
        return out
    batch_step, channel_step, step, size = _steps(x)
    channels_per_tile = 1
    if step != 1:
        # The elements of a channel are apart in memory, so its neighbours there are those of other channels.
        channels_per_tile = min(x.shape[1], MOST_CHANNELS)
    block = tile_of(channels_per_tile)
    tiles = triton.cdiv(x.shape[1], block["CHANNELS"])
    # Every pointer argument must be a tensor, so pass x in place of a missing one.
    weight_or_x = bias_or_x = x
    if weight is not None:
        weight_or_x = weight.contiguous()
    if bias is not None:
        bias_or_x = bias.contiguous()
    num_blocks = triton.cdiv(size, block["SIZE"])
    normalize_kernel[(num_blocks * x.shape[0] * tiles,)](
        x, out, of_ranks, shares, weight_or_x, bias_or_x, eps, size, num_blocks, x.shape[1], groups,
        x.shape[1] // groups, batch_step, channel_step, step, *_steps(out)[:3],
        RANKS=shares.shape[0], **block, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def tile_of(channels: int) -> dict[str, Any]:
    """Return the tile of one program, CHANNELS × SIZE elements, for this number of channels."""
    tile = triton.next_power_of_2(channels)
    return {"CHANNELS": tile, "SIZE": max(1, BLOCK // tile)}


def with_one_stride(x: Tensor) -> Tensor:
    """Return ``x`` if the elements of each channel have one common stride, as the kernels read them,
    otherwise a contiguous copy.
    """
    try:
        x.view(*x.shape[:2], -1)
    except RuntimeError:
        return x.contiguous()
    return x


def _steps(x: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of samples, channels and elements of a channel, and the number of elements per channel."""
    rows = x.view(*x.shape[:2], -1)
    size, step = rows.shape[2], rows.stride(2)
    if size == 1:
        # The stride of a single element has no meaning.
        step = 1
    return rows.stride(0), rows.stride(1), step, size
