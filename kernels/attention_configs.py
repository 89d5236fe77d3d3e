"""Block sizes of the attention kernel: one row of a table per kind of GPU and head dim.

They are a table rather than candidates of ``triton.autotune``, although the rows were chosen by what the
compiler says of registers and shared memory (tests/kernels/test_compiled.py checks it), and not by times,
because a choice by timing would cost more than it gains:

- Another tile size adds the same numbers in another order. Ranks that time for themselves may choose
  differently, so text tokens that each rank holds a copy of would differ from rank to rank, and an image from
  one start to the next.
- The autotuner times each candidate at the first call with a new key, and waits for the device after each. In
  a ring the other ranks wait as well, and the collectives in flight distort the times.
- It cannot time inside the capture of a CUDA graph, so a first call there would fail.

:mod:`para_core.kernels.attention` and :mod:`para_core.kernels.attention_int8` call :func:`config_for` for
each launch. Tests: tests/kernels/test_attention_configs.py, and tests/kernels/test_compiled.py for registers
and shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MaskKind = Literal["none", "bytes", "bits"]
# Here and not beside the launch, because code that must not import Triton checks it, too.
LARGEST_HEAD_DIM = 256


class KernelCall(NamedTuple):
    """The arguments of one launch of the attention kernel; see
    :func:`para_core.kernels.attention_reference.attention`.

    ``out_so_far`` and ``lse_so_far`` are ``so_far``, and ``shift`` is ``query_offset - key_offset``. The
    fields are in the order of the operators' arguments (``_SCHEMA`` in attention_launch.py), which are passed
    by position.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    key_ranges: Tensor | None = None
    out_so_far: Tensor | None = None
    lse_so_far: Tensor | None = None
    is_causal: bool = False
    shift: int = 0
    scale: float = 1.0

    def prepare(self) -> KernelCall:
        """Return the call with contiguous int32 ranges, a contiguous lse, and contiguous rows of
        ``out_so_far``, as the kernel reads them without strides.
        """
        call = self
        if call.key_ranges is not None:
            call = call._replace(key_ranges=call.key_ranges.to(torch.int32).contiguous())
        if call.out_so_far is not None and call.out_so_far.stride(-1) != 1:
            call = call._replace(out_so_far=call.out_so_far.contiguous())
        if call.lse_so_far is not None:
            call = call._replace(lse_so_far=call.lse_so_far.contiguous())
        return call


class Config(NamedTuple):
    """Launch options of the attention kernel.

    Args:
        block_m (`int`): Number of queries per program.
        block_n (`int`): Number of keys per tile.
        num_warps (`int`): Number of warps per program.
        num_stages (`int`): Number of tiles of keys and values in shared memory: one in use, the others being
            loaded.
        split_values (`bool`): Whether values with more dims than ``block_m`` are computed in two blocks.
            Needed on GPUs with ``mma.sync`` (8.x), where Triton distributes a product with more columns than
            rows over warps by columns. Each warp would then compute the softmax of every row, and its part of
            q·kᵀ might be smaller than one instruction.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_values: bool = False


# Block sizes by kind of GPU and head dim. Another head dim uses the row of the next larger one. These are the
# largest tiles that the compiler keeps in registers (in causal calls, and in calls that continue a partial
# result, which need the most registers), with as many stages as fit in shared memory. Tiles of head dim 256
# spill some registers. All rows have the same head dims, and at least 32 keys per tile, those of a word of a
# mask of bits.
TABLE: Mapping[int, Mapping[int, Config]] = {
    80: {
        64: Config(128, 64, 4, 3),
        96: Config(128, 64, 8, 3),
        128: Config(128, 64, 8, 3),
        256: Config(128, 32, 8, 2, split_values=True),
    },
    # Less shared memory than 80: Ampere and Ada for graphics, and GeForce Blackwell.
    86: {
        64: Config(128, 64, 4, 3),
        96: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2),
        256: Config(128, 32, 8, 2, split_values=True),
    },
    90: {
        64: Config(128, 64, 4, 3),
        96: Config(128, 128, 8, 3),
        128: Config(128, 128, 8, 3),
        256: Config(128, 64, 8, 2),
    },
    100: {
        64: Config(128, 128, 8, 3),
        96: Config(128, 128, 8, 3),
        128: Config(128, 128, 8, 3),
        256: Config(128, 64, 8, 2),
    },
}
# Tensor cores do not compute exact float32, so its products take many registers. With fewer warps, tens of KB
# would spill.
FLOAT32 = Config(32, 32, 8, 1)
FLOAT32_WIDE = Config(32, 32, 16, 1)  # for head dims above 128
# The smallest tiles, for the small tensors that tests pass to Triton's interpreter.
INTERPRETED = Config(16, 16, 4, 1)
INTERPRETED_BITS = Config(16, 32, 4, 1)  # A word of a mask of bits has 32 keys.


def config_for(call: KernelCall, *, eight_bits: bool = False) -> Config:
    """Return the block sizes for ``call``; ``eight_bits`` says whether keys are in 8 bits.

    They must depend only on what is equal on all ranks and in all calls of a model: tiles decide the order of
    sums.

    Raises:
        RuntimeError: If the compute capability of the device is lower than 8.0.
    """
    query, mask = call.query, mask_kind(call.mask)
    if not query.is_cuda:
        if mask == "bits":
            return INTERPRETED_BITS
        return INTERPRETED
    head_dim = max(query.shape[-1], call.value.shape[-1])
    if query.dtype == torch.float32 and head_dim > 128:
        return FLOAT32_WIDE
    if query.dtype == torch.float32:
        return FLOAT32
    if call.mask is not None and call.mask.shape[2] == 1:
        mask = "none"  # One row for all queries needs no room.
    num_ranges = 0
    if call.key_ranges is not None:
        num_ranges = call.key_ranges.shape[1]
    return fit_inputs(
        row_of_device(query.device.index), head_dim, mask=mask, ranges=num_ranges, eight_bits=eight_bits
    )


def mask_kind(mask: Tensor | None) -> MaskKind:
    """Return how the kernel reads ``mask``: as 32 keys per word, or as a byte or number per key."""
    if mask is None:
        return "none"
    if mask.dtype == torch.int32:
        return "bits"
    return "bytes"


@lru_cache
def fit_inputs(
    arch: int, head_dim: int, *, mask: MaskKind = "none", ranges: int = 0, eight_bits: bool = False
) -> Config:
    """Return the block sizes of the table's row, with smaller tiles and more warps if a call has more inputs.

    Args:
        arch: A row of ``TABLE``.
        head_dim: The larger head dim of queries and values.
        mask: Kind of a mask that has a row per query. ``"none"`` if there is no mask, or one row for all
            queries.
        ranges: Number of key ranges per sample. One needs comparisons; several need a second loop and more
            registers.
        eight_bits: Whether keys are in 8 bits. A program then holds scores both as integers and as floats.
    """
    row_dim = row_of_dim(head_dim)
    config, is_wide = TABLE[arch][row_dim], row_dim > 128
    if ranges == 1 or (ranges and not is_wide):
        config = limit_tile(config, 64)
    elif ranges:
        config = limit_tile(config, 32)
    if mask != "none":
        # With more warps each has fewer queries and needs fewer registers. 16 queries per warp is the minimum
        # of the matrix instructions.
        config = config._replace(num_warps=max(config.num_warps, config.block_m // 16))
    if mask == "bits":
        # A mask of bits needs few registers and almost no shared memory.
        config = limit_tile(config, 32 if is_wide else 64)
    elif mask == "bytes":
        # A mask of bytes is loaded byte by byte, because its rows may begin at any byte and tiles at any key.
        # The scores then exist in two register layouts at once, so tiles must be smaller.
        config = limit_tile(config, 16 if is_wide else 32)._replace(num_stages=2)
    if eight_bits:
        config = limit_tile(config, 32 if is_wide else 64)
    return config


def limit_tile(config: Config, block_n: int) -> Config:
    """Return ``config`` with at most ``block_n`` keys per tile."""
    return config._replace(block_n=min(config.block_n, block_n))


@lru_cache
def row_of_device(index: int) -> int:
    """Return the row of ``TABLE`` for the CUDA device ``index``. Raise ``RuntimeError`` like :func:`row_of`."""
    return row_of(*torch.cuda.get_device_capability(index))


def row_of(major: int, minor: int) -> int:
    """Return the row of ``TABLE`` for a compute capability.

    Ada (8.9) and GeForce Blackwell (12.x) use the row of 8.6, because they have its shared memory and
    instructions; a later kind that is not known gets it, too, as the row with the smallest tiles.

    >>> [row_of(8, 0), row_of(8, 7), row_of(8, 9), row_of(9, 0), row_of(10, 3), row_of(12, 0)]
    [80, 86, 86, 90, 100, 86]

    Raises:
        RuntimeError: If the capability is lower than 8.0.
    """
    if (major, minor) < (8, 0):
        raise RuntimeError(
            f"this device has compute capability {major}.{minor}; the attention kernel needs 8.0 (Ampere) or later. "
            "scaled_dot_product_attention runs on it."
        )
    if (major, minor) == (8, 0):
        return 80
    return {9: 90, 10: 100}.get(major, 86)


def row_of_dim(head_dim: int) -> int:
    """Return the smallest head dim of the table that is at least ``head_dim``, at most 256.

    >>> [row_of_dim(dim) for dim in (8, 64, 80, 128, 192)]
    [64, 64, 96, 128, 256]
    >>> all(list(row) == list(TABLE[80]) for row in TABLE.values())
    True
    """
    return next(dim for dim in TABLE[80] if head_dim <= dim)
