"""The attention kernel compiled for GPUs that are not here: as a launch with its table's block sizes would."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.compiled import Compiled, compile_kernel
from para_core.kernels.attention import blocks_of
from para_core.kernels.attention_configs import Config
from para_core.kernels.attention_hopper import attention_hopper_kernel
from para_core.kernels.attention_kernel import attention_kernel

# The largest register file and shared memory of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"; a block's own share of shared memory is 1 KiB more than it asks for.
REGISTERS = 65536
SHARED_OF_SM = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10}


def compile_attention(
    config: Config,
    *,
    arch: int,
    head_dim: int,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    is_causal: bool = False,
    continues: bool = False,
    mask: Literal["none", "bool", "bits", "float"] = "none",
    mask_has_rows: bool = False,
    has_ranges: bool = False,
    eight_bits: bool = False,
) -> Compiled:
    """Compile a call with tensors of ``[B, S, 24, head_dim]`` in memory; a float mask is float32."""
    v, v_rest = blocks_of(head_dim)
    d, d_rest = blocks_of(head_dim, least=32) if eight_bits else (v, v_rest)
    steps = {name: 24 * head_dim * 16 for name in attention_kernel.arg_names if name.startswith("step_")}
    arguments: dict[str, Any] = {
        **dict.fromkeys(("query", "key", "value"), f"*{dtype}"),
        **({"key": "*i8"} if eight_bits else {}),
        **dict.fromkeys(("key_scales", "key_mean"), "*fp32" if eight_bits else None),
        "mask": {"none": None, "bool": "*u8", "bits": "*i32", "float": "*fp32"}[mask],
        "ranges": "*i32" if has_ranges else None,
        "out_so_far": "*fp32" if continues else None,
        "lse_so_far": "*fp32" if continues else None,
        "out": "*fp32" if continues else f"*{dtype}",
        "lse": "*fp32",
        **steps,
        "step_mask_keys": 1,
        **dict.fromkeys(("num_queries", "num_keys", "num_ranges", "shift"), "i32"),
        "score_scale": "fp32",
        "HEADS": 24,
        "GROUP": 1,
        "D": d,
        "D_REST": d_rest,
        "D_END": head_dim,
        "V": v,
        "V_REST": v_rest,
        "V_END": head_dim,
        "MASK": mask,
        "MASK_HAS_ROWS": mask_has_rows,
        "CAUSAL": is_causal,
        "HAS_RANGES": has_ranges,
        "CONTINUES": continues,
        "NEGATIVE": False,
        "EIGHT_BITS": eight_bits,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    return compile_kernel(
        attention_kernel, arguments, arch=arch, num_warps=config.num_warps, num_stages=config.num_stages
    )


def compile_hopper(
    config: Config,
    *,
    head_dim: int,
    arch: int = 90,
    is_causal: bool = False,
    continues: bool = False,
    has_range: bool = False,
) -> Compiled:
    """Compile a call of the Hopper tier with tensors of ``[B, S, 24, head_dim]`` in bfloat16; all seen, or compared."""
    steps = {name: 24 * head_dim * 16 for name in attention_hopper_kernel.arg_names if name.startswith("step_")}
    arguments: dict[str, Any] = {
        **dict.fromkeys(("query", "key", "value"), "*bf16"),
        "ranges": "*i32" if has_range else None,
        "out_so_far": "*fp32" if continues else None,
        "lse_so_far": "*fp32" if continues else None,
        "out": "*fp32" if continues else "*bf16",
        "lse": "*fp32",
        **steps,
        **dict.fromkeys(("num_queries", "num_keys", "shift"), "i32"),
        "score_scale": "fp32",
        "HEADS": 24,
        "GROUP": 1,
        "D": head_dim,
        "CAUSAL": is_causal,
        "HAS_RANGE": has_range,
        "ALL_SEEN": not (is_causal or has_range),
        "CONTINUES": continues,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPECIALIZED": config.specialized,
    }
    return compile_kernel(
        attention_hopper_kernel, arguments, arch=arch, num_warps=config.num_warps, num_stages=config.num_stages
    )


# -- what its instructions do


@dataclass(frozen=True)
class Counts:
    """Of one tile of keys of the loop without comparisons, for a program of BLOCK_M queries.

    Args:
        flops: of the matrix instructions, 2 per multiplication.
        bytes: loaded from global memory, by threads or by Hopper's copy engine.
        exponentials: of the special function units.
    """

    flops: int
    bytes: int
    exponentials: int


_MMA = re.compile(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
_COPIED = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (\w+)")
_EXPECTED = re.compile(r"mbarrier\.arrive\.expect_tx[^;]*?\], (\d+);")
_LABEL = re.compile(r"^\$L__BB\d+_\d+:", re.MULTILINE)


def loop_counts(compiled: Compiled, num_warps: int) -> Counts:
    """Read the loop with most matrix instructions per comparison from the PTX: that of the tiles all queries see.

    Instructions in PTX are those of a thread; ``mma.sync`` is one of a warp, ``wgmma`` one of four.
    """
    return _counts(_loops(compiled.ptx, "mma")[0], num_warps)


def loop_counts_of_roles(compiled: Compiled) -> Counts:
    """The same of a kernel whose warps have roles: each role is four warps and has a loop of its own, of which one loads."""
    loops = [_counts(body, num_warps=4) for body in _loops(compiled.ptx, "mma", "bulk.tensor")]
    return Counts(*(sum(getattr(one, name) for one in loops) for name in ("flops", "bytes", "exponentials")))


def _counts(body: str, num_warps: int) -> Counts:
    threads = 32 * num_warps
    flops = sum(2 * m * n * k * num_warps for m, n, k in _sizes(_MMA, body))
    flops += sum(2 * m * n * k * num_warps // 4 for m, n, k in _sizes(_WGMMA, body))
    copied = threads * sum(int(size, 0) for size in _COPIED.findall(body))
    # One thread tells a barrier how many bytes the copy engine is to bring.
    copied += sum(int(size) for size in _EXPECTED.findall(body))
    return Counts(flops, copied, len(re.findall(r"ex2\.approx", body)) * threads)


def _sizes(pattern: re.Pattern[str], text: str) -> list[tuple[int, int, int]]:
    return [(int(m), int(n), int(k)) for m, n, k in pattern.findall(text)]


def _loops(ptx: str, *instructions: str) -> list[str]:
    """The bodies of the innermost loops with one of these instructions, in order: a label, and the first jump back to it."""
    spans = []
    for label in _LABEL.finditer(ptx):
        back = re.search(rf"bra(?:\.uni)? \t?\s*{re.escape(label[0][:-1])};", ptx[label.end() :])
        if back is not None:
            spans.append((label.end(), label.end() + back.end()))
    # Warps that wait for a role do so in a loop around that role's own.
    inner = [
        one for one in spans if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in spans)
    ]
    found = [ptx[start:end] for start, end in inner if any(name in ptx[start:end] for name in instructions)]
    if not found:
        raise RuntimeError(f"no loop with any of {', '.join(instructions)} was found in the PTX.")
    return found
