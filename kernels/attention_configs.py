"""Block sizes of the attention kernels: a table, and those that ``python -m para_core.kernels.tune`` stored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

Length = Literal["long", "short"]
LENGTHS: tuple[Length, ...] = ("long", "short")
Tier = Literal["portable", "hopper"]
Mask = Literal["none", "bytes", "bits"]
# Sequences of up to this number of queries are "short": smaller tiles then give enough programs for all
# multiprocessors.
SHORT = 1024
# Head dims that have a row in the table. Another head dim uses the row of the next larger one.
HEAD_DIMS = (64, 96, 128, 256)
ARCHS = (80, 86, 89, 90, 100)


class KernelCall(NamedTuple):
    """The arguments of one launch of an attention kernel; see :func:`para_core.kernels.attention_reference.attention`.

    ``out_so_far`` and ``lse_so_far`` are ``so_far``, and ``shift`` is ``query_offset - key_offset``.
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

    def prepared(self) -> KernelCall:
        """Return the call with int32 ranges, contiguous ranges and lse, and contiguous rows of ``out_so_far``."""
        call = self
        if call.key_ranges is not None:
            call = call._replace(key_ranges=call.key_ranges.to(torch.int32).contiguous())
        out, lse = call.out_so_far, call.lse_so_far
        if out is not None and lse is not None:
            out = out if out.stride(-1) == 1 else out.contiguous()
            call = call._replace(out_so_far=out, lse_so_far=lse.contiguous())
        return call


@dataclass(frozen=True)
class Config:
    """Launch options of the attention kernel.

    Args:
        block_m (`int`): Number of queries per program.
        block_n (`int`): Number of keys per tile.
        num_warps (`int`): Number of warps per program.
        num_stages (`int`): Number of tiles of keys and values in shared memory: one in use, the others being loaded.
        resident (`int`): Minimum number of programs that fit in a multiprocessor at once, by registers and shared
            memory. Only tests use it.
        spills (`int`): Maximum number of bytes per thread that may spill from registers. Only tests use it.
        specialized (`bool`): For the Hopper kernel: whether warps have different roles.
        split_values (`bool`): Whether values with more dims than ``block_m`` are computed in two blocks. Needed on GPUs
            with ``mma.sync`` (8.x), where Triton distributes a product with more columns than rows over warps by
            columns. Each warp would then compute the softmax of every row, and its part of q·kᵀ might be smaller than
            one instruction.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1
    spills: int = 0
    specialized: bool = False
    split_values: bool = False


@dataclass(frozen=True)
class ConfigKey:
    """Key of a row of the table: one of ``ARCHS`` (90 for compute capability 9.0), one of ``HEAD_DIMS``, whether
    attention is causal, and whether the call has more than ``SHORT`` queries.

    ``tier`` is the kernel: :mod:`para_core.kernels.attention`, or :mod:`para_core.kernels.attention_hopper`.
    """

    arch: int
    head_dim: int
    is_causal: bool
    length: Length
    tier: Tier = "portable"

    def __str__(self) -> str:
        tier = "" if self.tier == "portable" else f" {self.tier}"
        return f"sm_{self.arch} D={self.head_dim} {'causal' if self.is_causal else 'full'} {self.length}{tier}"


# Block sizes for long and for short sequences, by (arch, head dim). They were not measured on a device. They are the
# largest tiles that the compiler keeps in registers without spilling (in causal calls, and in calls that continue a
# partial result, which need the most registers), with as many stages as fit in shared memory.
_ROWS: Mapping[tuple[int, int], tuple[Config, Config]] = {
    (80, 64): (Config(128, 64, 4, 3, resident=2), Config(64, 64, 4, 3, resident=2)),
    (80, 96): (Config(128, 64, 8, 3), Config(64, 64, 4, 3, resident=2)),
    (80, 128): (Config(128, 64, 8, 3), Config(64, 64, 4, 3, resident=2)),
    (80, 256): (Config(128, 32, 8, 2, spills=128), Config(128, 32, 8, 2, spills=128)),
    (86, 64): (Config(128, 64, 4, 3, resident=2, spills=40), Config(64, 64, 4, 3, resident=2)),
    (86, 96): (Config(128, 64, 8, 2), Config(64, 64, 4, 2, resident=2)),
    (86, 128): (Config(128, 64, 8, 2), Config(64, 64, 4, 2, resident=2)),
    (86, 256): (Config(128, 32, 8, 2, spills=192), Config(128, 32, 8, 2, spills=192)),
    (90, 64): (Config(128, 64, 4, 3, resident=2), Config(64, 64, 4, 3, resident=2)),
    (90, 96): (Config(128, 128, 8, 3), Config(64, 64, 4, 3, resident=2)),
    (90, 128): (Config(128, 128, 8, 3), Config(64, 64, 4, 3)),
    (90, 256): (Config(128, 64, 8, 2, spills=448), Config(64, 32, 4, 2, spills=400)),
    (100, 64): (Config(128, 128, 8, 3), Config(64, 64, 4, 3)),
    (100, 96): (Config(128, 128, 8, 3), Config(64, 64, 4, 3, spills=32)),
    (100, 128): (Config(128, 128, 8, 3), Config(64, 64, 4, 3)),
    (100, 256): (Config(128, 64, 8, 2, spills=368), Config(64, 32, 4, 2, spills=136)),
}
# Ada (89) uses the rows of 86, because it has the same shared memory and instructions.
_ROW_OF = {arch: 86 if arch == 89 else arch for arch in ARCHS}
TABLE: Mapping[ConfigKey, Config] = {
    ConfigKey(arch, head_dim, is_causal, length): replace(
        _ROWS[_ROW_OF[arch], head_dim][LENGTHS.index(length)], split_values=arch < 90
    )
    for arch in ARCHS
    for head_dim in HEAD_DIMS
    for is_causal in (False, True)
    for length in LENGTHS
}
# Candidates for the Hopper kernel on sm_90, by head dim. A candidate is used only if ``tune --hopper`` has stored it.
# No candidate spills registers. For head dim 256 there is no specialized candidate: the compiler turns 4 specialized
# warps into 12, whose shared memory does not fit next to accumulators of 128 × 256.
HOPPER: Mapping[int, tuple[Config, ...]] = {
    64: (Config(128, 128, 8, 3), Config(128, 128, 4, 3, specialized=True)),
    128: (Config(128, 128, 8, 2), Config(128, 128, 4, 2, specialized=True)),
    256: (Config(128, 64, 8, 2),),
}
# Block sizes for float32, for head dims up to 128 and for larger ones. Tensor cores do not compute exact float32, so
# the products take many registers. With fewer warps, tens of KB would spill.
FLOAT32 = (Config(32, 32, 8, 1, spills=256), Config(32, 32, 16, 1))
# The smallest tiles, for the small tensors that tests pass to Triton's interpreter.
INTERPRETED = Config(16, 16, 4, 1)


def config_for(call: KernelCall, *, eight_bits: bool = False) -> Config:
    """Return the block sizes for ``call``, from this machine's tuning or else from the table.

    ``eight_bits`` says whether keys are in 8 bits.
    """
    query, mask = call.query, call.mask
    of_bits = mask is not None and mask.dtype == torch.int32
    if not query.is_cuda:
        return replace(INTERPRETED, block_n=32) if of_bits else INTERPRETED
    head_dim = max(query.shape[-1], call.value.shape[-1])
    if query.dtype == torch.float32:
        config = FLOAT32[head_dim > 128]
    else:
        length: Length = "short" if query.shape[2] <= SHORT else "long"
        kind: Mask = "none" if mask is None or mask.shape[2] == 1 else "bits" if of_bits else "bytes"
        ranges = 0 if call.key_ranges is None else call.key_ranges.shape[1]
        config = _on_device(query.device.index, head_dim, call.is_causal, length)
        config = adjusted(config, row_of_dim(head_dim), mask=kind, ranges=ranges)
    return in_int8(config, head_dim) if eight_bits else config


@lru_cache
def adjusted(config: Config, head_dim: int, *, mask: Mask = "none", ranges: int = 0) -> Config:
    """Return ``config`` with smaller tiles and, for masks, more warps, because masks and ranges need registers too.

    Args:
        mask: Kind of a mask that has a row per query: ``"bits"``, or ``"bytes"`` for bool and float masks. ``"none"``
            if there is no mask, or one row for all queries.
        ranges: Number of key ranges per sample. One needs comparisons; several need a second loop and more registers.
    """
    if ranges:
        few = ranges == 1
        largest = 32 if head_dim > 128 and not few else 64
        spills = 0 if few else 224 if head_dim <= 128 else 1280
        config = replace(config, block_n=min(config.block_n, largest), spills=max(config.spills, spills))
    # Use more warps, so that each has fewer queries and needs fewer registers. 16 queries per warp is the minimum of
    # the matrix instructions.
    warps = max(config.num_warps, config.block_m // 16)
    if mask == "bits":
        # A mask of bits needs few registers and almost no shared memory.
        block_n = min(config.block_n, 32 if head_dim > 128 or config.block_m < 128 else 64)
        spills = max(config.spills, 8 if head_dim <= 128 else 288)
        config = replace(config, block_n=block_n, num_warps=warps, resident=1, spills=spills)
    elif mask == "bytes":
        # A mask of bytes is loaded byte by byte, because its rows may begin at any byte and tiles at any key. The
        # scores then exist in two register layouts at once, so tiles must be smaller.
        spills = {64: 0, 96: 96, 128: 384, 256: 768}[head_dim] + (512 if ranges > 1 else 0)
        block_n = 16 if head_dim > 128 else 32
        config = replace(config, block_n=block_n, num_warps=warps, num_stages=2, resident=1, spills=spills)
    return config


@lru_cache
def in_int8(config: Config, head_dim: int) -> Config:
    """Return ``config`` with fewer keys per tile, because a program holds scores both as integers and as floats."""
    if head_dim > 128:
        spills = max(config.spills, 608)
        return replace(config, block_m=128, block_n=min(config.block_n, 32), num_warps=8, num_stages=2, spills=spills)
    return replace(config, block_n=min(config.block_n, 64), spills=max(config.spills, 64))


@lru_cache
def _on_device(index: int, head_dim: int, is_causal: bool, length: Length) -> Config:
    case = ConfigKey(row_of(*torch.cuda.get_device_capability(index)), row_of_dim(head_dim), is_causal, length)
    return tuned(torch.cuda.get_device_name(index)).get(case, TABLE[case])


def hopper_config_for(query: Tensor, *, is_causal: bool) -> Config | None:
    """Return the block sizes of the Hopper kernel if ``tune --hopper`` found it faster on this machine, else None."""
    if not query.is_cuda or query.shape[-1] not in HOPPER:
        return None
    length: Length = "short" if query.shape[2] <= SHORT else "long"
    return _tuned_hopper(query.device.index, query.shape[-1], is_causal, length)


@lru_cache
def _tuned_hopper(index: int, head_dim: int, is_causal: bool, length: Length) -> Config | None:
    if torch.cuda.get_device_capability(index) != (9, 0):
        return None
    return tuned(torch.cuda.get_device_name(index)).get(ConfigKey(90, head_dim, is_causal, length, "hopper"))


def row_of(major: int, minor: int) -> int:
    """Return the table's ``arch`` for a compute capability.

    GeForce Blackwell (12.x) uses the rows of Ada (89), because it has the same shared memory and instructions.

    >>> [row_of(8, 0), row_of(8, 7), row_of(9, 0), row_of(10, 3), row_of(12, 0)]
    [80, 86, 90, 100, 89]

    Raises:
        RuntimeError: If the capability is lower than 8.0.
    """
    if (major, minor) < (8, 0):
        raise RuntimeError(
            f"this device has compute capability {major}.{minor}; the attention kernel needs 8.0 (Ampere) or later. "
            "scaled_dot_product_attention runs on it."
        )
    if major == 8:
        return 80 if minor == 0 else 89 if minor == 9 else 86
    return {9: 90, 10: 100}.get(major, 89)


def row_of_dim(head_dim: int) -> int:
    """Return the smallest tuned head dim that is at least ``head_dim``.

    >>> [row_of_dim(dim) for dim in (8, 64, 80, 128, 192)]
    [64, 64, 96, 128, 256]
    """
    return next(dim for dim in HEAD_DIMS if head_dim <= dim)


# -- The following functions read and write the block sizes that ``tune`` found on this machine.


def cache_file() -> Path:
    """Return the path of tuned block sizes: para_core/attention.json in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "para_core" / "attention.json"


def tuned(device_name: str) -> dict[ConfigKey, Config]:
    """Return the block sizes tuned for a device of this name and this version of Triton; empty if none are stored."""
    try:
        rows = json.loads(cache_file().read_text(encoding="utf-8")).get(_key(device_name), [])
        return {ConfigKey(**row["case"]): Config(**row["config"]) for row in rows}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        # The file is incomplete or from another version of para_core, so ignore it and use the table.
        return {}


def keep(device_name: str, tuning: Mapping[ConfigKey, Config | None]) -> Path:
    """Write tuned block sizes for a device name to the cache file, and return its path. None removes an entry."""
    path = cache_file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = {}
    content = content if isinstance(content, dict) else {}
    merged = {**tuned(device_name), **tuning}
    content[_key(device_name)] = [
        {"case": vars(case), "config": vars(config)} for case, config in merged.items() if config
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _on_device.cache_clear()
    _tuned_hopper.cache_clear()
    return path


def _key(device_name: str) -> str:
    return f"{device_name}, triton {triton.__version__}"
