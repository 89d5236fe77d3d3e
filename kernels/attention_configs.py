"""Block sizes of the attention kernel: a table of data, and what ``python -m para_core.kernels.tune`` found on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
import triton
from torch import Tensor

Length = Literal["long", "short"]
LENGTHS: tuple[Length, ...] = ("long", "short")
Tier = Literal["portable", "hopper"]
Mask = Literal["none", "bytes", "bits"]
# Up to so many queries "short" ones are taken: smaller tiles are more programs, for all multiprocessors.
SHORT = 1024
# The head dims that are tuned; others take the row of the next larger one.
HEAD_DIMS = (64, 96, 128, 256)
ARCHS = (80, 86, 89, 90, 100)


@dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Args:
        block_m, block_n: queries of a program, keys of a tile.
        num_stages: tiles of keys and values in shared memory, of which all but one are on their way.
        resident: programs that fit into a multiprocessor at once, by their registers and shared memory: what tests hold the
            compiled kernel to.
        spills: bytes of a thread that may not fit into registers.
        specialized: of the Hopper tier: warps have roles.
        split_values: values of more dims than ``block_m`` are two blocks side by side. Where a GPU multiplies by ``mma.sync`` (8.x), Triton
            shares the columns of a product that is wider than high among warps, not its rows: each warp then has every row's softmax,
            and its part of q·kᵀ may be less than an instruction computes.
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
    """What a row of the table is for.

    Args:
        arch: compute capability, as 90 for 9.0: one of ``ARCHS``.
        head_dim: one of ``HEAD_DIMS``.
        tier: ``"hopper"``: :mod:`para_core.kernels.attention_hopper`, for the calls that it takes.
    """

    arch: int
    head_dim: int
    is_causal: bool
    length: Length
    tier: Tier = "portable"

    def __str__(self) -> str:
        tier = "" if self.tier == "portable" else f" {self.tier}"
        return f"sm_{self.arch} D={self.head_dim} {'causal' if self.is_causal else 'full'} {self.length}{tier}"


# By (arch, head dim): for long and for short sequences, causal ones too. Nothing of it has been measured on a device: these are the
# largest tiles that the compiler puts into registers without spilling (causal ones included, and continuing ones, which take the
# most), with as many stages as shared memory has room for.
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
# Ada has Ampere's GeForce row: the same shared memory, the same instructions.
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
# What may be tried on sm_90 in the Hopper tier, by head dim; not taken unless ``tune --hopper`` kept it. None spills. Of 4 warps with
# roles the compiler makes 12; beside sums of 128 × 256 their shared memory has no room.
HOPPER: Mapping[int, tuple[Config, ...]] = {
    64: (Config(128, 128, 8, 3), Config(128, 128, 4, 3, specialized=True)),
    128: (Config(128, 128, 8, 2), Config(128, 128, 4, 2, specialized=True)),
    256: (Config(128, 64, 8, 2),),
}
# float32 is exact: no tensor core has that, so its products are in registers throughout, and few warps spill tens of KB. Up to D = 128,
# and above.
FLOAT32 = (Config(32, 32, 8, 1, spills=256), Config(32, 32, 16, 1))
# Of Triton's interpreter: the smallest tiles, for the smallest tensors.
INTERPRETED = Config(16, 16, 4, 1)


def config_for(query: Tensor, value: Tensor, *, is_causal: bool, mask: Tensor | None = None, ranges: int = 0) -> Config:
    """The block sizes for tensors like these: what was tuned on this machine, or the table's. ``ranges``: of keys, of a sample."""
    of_bits = mask is not None and mask.dtype == torch.int32
    if not query.is_cuda:
        return replace(INTERPRETED, block_n=32) if of_bits else INTERPRETED
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.dtype == torch.float32:
        return in_float32(head_dim)
    length: Length = "short" if query.shape[2] <= SHORT else "long"
    config = _on_device(query.device.index, head_dim, is_causal, length)
    kind: Mask = "none" if mask is None or mask.shape[2] == 1 else "bits" if of_bits else "bytes"
    return beside(config, row_of_dim(head_dim), mask=kind, ranges=ranges)


def config_for_int8(
    query: Tensor, value: Tensor, *, is_causal: bool, mask: Tensor | None = None, ranges: int = 0
) -> Config:
    """The block sizes where keys have 8 bits."""
    config = config_for(query, value, is_causal=is_causal, mask=mask, ranges=ranges)
    return in_int8(config, max(query.shape[-1], value.shape[-1])) if query.is_cuda else config


@lru_cache
def beside(config: Config, head_dim: int, *, mask: Mask = "none", ranges: int = 0) -> Config:
    """``config`` with room for what else a call takes.

    Args:
        head_dim: one of ``HEAD_DIMS``.
        mask: with a row for each query. ``"bytes"``: numbers, too, of up to 4 bytes.
        ranges: of keys. One is compared with, several are a loop around those over tiles, in which the compiler finds fewer registers.
    """
    if ranges:
        few = ranges == 1
        largest = 32 if head_dim > 128 and not few else 64
        spills = 0 if few else 224 if head_dim <= 128 else 1280
        config = replace(config, block_n=min(config.block_n, largest), spills=max(config.spills, spills))
    # The fewer queries a warp has, the fewer registers it needs; its instructions multiply 16.
    warps = max(config.num_warps, config.block_m // 16)
    if mask == "bits":
        # A few registers, and next to no shared memory.
        block_n = min(config.block_n, 32 if head_dim > 128 or config.block_m < 128 else 64)
        spills = max(config.spills, 8 if head_dim <= 128 else 288)
        config = replace(config, block_n=block_n, num_warps=warps, resident=1, spills=spills)
    elif mask == "bytes":
        # Where a row begins at any byte, or a tile at any key, each byte is loaded by itself, and two layouts of the scores are held.
        spills = {64: 0, 96: 96, 128: 384, 256: 768}[head_dim] + (512 if ranges > 1 else 0)
        block_n = 16 if head_dim > 128 else 32
        config = replace(config, block_n=block_n, num_warps=warps, num_stages=2, resident=1, spills=spills)
    return config


def in_float32(head_dim: int) -> Config:
    return FLOAT32[head_dim > 128]


@lru_cache
def in_int8(config: Config, head_dim: int) -> Config:
    """With registers for scores as integers and as floats."""
    if head_dim > 128:
        spills = max(config.spills, 608)
        return replace(config, block_m=128, block_n=min(config.block_n, 32), num_warps=8, num_stages=2, spills=spills)
    return replace(config, block_n=min(config.block_n, 64), spills=max(config.spills, 64))


@lru_cache
def _on_device(index: int, head_dim: int, is_causal: bool, length: Length) -> Config:
    case = ConfigKey(row_of(*torch.cuda.get_device_capability(index)), row_of_dim(head_dim), is_causal, length)
    return tuned(torch.cuda.get_device_name(index)).get(case, TABLE[case])


def hopper_config_for(query: Tensor, *, is_causal: bool) -> Config | None:
    """The block sizes of the Hopper tier, where ``tune --hopper`` found it to be faster on this machine; else None."""
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
    """The row of the table for a compute capability.

    GeForce's Blackwell (12.x) has the shared memory and the instructions of Ada.

    >>> [row_of(8, 0), row_of(8, 7), row_of(9, 0), row_of(10, 3), row_of(12, 0)]
    [80, 86, 90, 100, 89]
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
    """The smallest tuned head dim that is not smaller.

    >>> [row_of_dim(dim) for dim in (8, 64, 80, 128, 192)]
    [64, 64, 96, 128, 256]
    """
    return next(dim for dim in HEAD_DIMS if head_dim <= dim)


# -- what was tuned


def cache_file() -> Path:
    """Where the tuned block sizes of this user are: ``~/.cache/para_core/attention.json``, or in ``XDG_CACHE_HOME``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "para_core" / "attention.json"


def tuned(device_name: str) -> dict[ConfigKey, Config]:
    """What was tuned on a device of this name with this version of Triton; nothing if the file is missing or unreadable."""
    return dict(_read(cache_file(), device_name))


def _read(path: Path, device_name: str) -> Iterator[tuple[ConfigKey, Config]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8")).get(_key(device_name), [])
        for row in rows:
            yield ConfigKey(**row["case"]), Config(**row["config"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        # Of another version, or cut off: the table holds.
        return


def keep(device_name: str, found: Mapping[ConfigKey, Config | None]) -> Path:
    """Write what was tuned on a device of this name, beside what the file holds of others; None: nothing is to be kept of a case."""
    path = cache_file()
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    merged = {**tuned(device_name), **found}
    known[_key(device_name)] = [
        {"case": vars(case), "config": vars(config)} for case, config in merged.items() if config
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    _on_device.cache_clear()
    _tuned_hopper.cache_clear()
    return path


def _key(device_name: str) -> str:
    return f"{device_name}, triton {triton.__version__}"
