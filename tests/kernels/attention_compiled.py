"""The attention kernel compiled for GPUs that this machine lacks, with the block sizes of its table as in a launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from para_core.kernels import attention_launch
from para_core.kernels.attention_configs import Config, KernelCall, MaskKind
from para_core.kernels.attention_kernel import attention_kernel
from para_core.kernels.attention_launch import RoundedKeys
from tests.kernels.compiled import Compiled, compile_kernel

# This is the largest register file and shared memory of a multiprocessor (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"). A block occupies 1 KiB more shared memory than it requests.
REGISTERS = 65536
SHARED_OF_SM = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
}


def compile_attention(
    config: Config,
    *,
    arch: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    continues: bool = False,
    mask: Literal["none", "bool", "bits", "float"] = "none",
    mask_has_rows: bool = False,
    ranges: int = 0,
    eight_bits: bool = False,
    scale: float = 1.0,
    tokens: int = 4096,
) -> Compiled:
    """Compile the kernel that :mod:`para_core.kernels.attention_launch` launches for tensors of ``[2, tokens, 24,
    head_dim]`` in memory.

    Args:
        value_dim: the head dim of values if it is not ``head_dim``. mask: the kind of mask. A float mask is float32.
    """

    def of_heads(dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(2, tokens, 24, dim, dtype=dtype, device="meta").transpose(1, 2)

    value_dim = head_dim if value_dim is None else value_dim
    query, key, value = (of_heads(dim, dtype) for dim in (head_dim, head_dim, value_dim))
    lse = torch.empty(2, 24, tokens, device="meta")
    words = -(-tokens // 32) if mask == "bits" else tokens
    kinds = {"bool": torch.bool, "bits": torch.int32, "float": torch.float32}
    shape = (2, 1, tokens if mask_has_rows else 1, words)
    arguments = _arguments_of_launch(
        config,
        query,
        key,
        value,
        None if mask == "none" else torch.empty(shape, dtype=kinds[mask], device="meta"),
        torch.empty(2, ranges, 2, dtype=torch.int32, device="meta") if ranges else None,
        of_heads(value_dim, torch.float32) if continues else None,
        lse if continues else None,
        is_causal,
        0,
        scale,
        out=of_heads(value_dim, torch.float32 if continues else dtype),
        lse=lse,
        rounded=RoundedKeys(torch.empty(key.shape, dtype=torch.int8, device="meta"), lse, lse) if eight_bits else None,
    )
    return compile_kernel(
        attention_kernel, arguments, arch=arch, num_warps=config.num_warps, num_stages=config.num_stages
    )


def _arguments_of_launch(config: Config, *call: Any, **more: Any) -> dict[str, Any]:
    """Return the arguments that ``launch`` passes to the kernel, by name, in the form of ``compile_kernel``."""
    arguments: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **kwargs: arguments.update(
                zip(attention_kernel.arg_names, args, strict=False), **kwargs
            )

    with patch.object(attention_launch, "attention_kernel", Kernel()):
        attention_launch.launch(config, KernelCall(*call), **more)
    del arguments["num_warps"], arguments["num_stages"]
    return {
        parameter.name: "i32"
        if parameter.do_not_specialize
        else _POINTERS.get(getattr(argument, "dtype", None), argument)
        for parameter in attention_kernel.params
        for argument in [arguments[parameter.name]]
    }


def allowed_spills(
    arch: int, head_dim: int, *, mask: MaskKind = "none", ranges: int = 0, eight_bits: bool = False
) -> int:
    """Return the bytes of a thread that a call of :func:`fit_inputs` may spill: as measured when its row was chosen.

    ``arch`` is a row of the table, and ``head_dim`` one of its head dims.
    """
    is_wide = head_dim > 128
    spills = {(80, 256): 128, (86, 64): 40, (86, 256): 192, (90, 256): 448, (100, 256): 368}.get((arch, head_dim), 0)
    if ranges > 1:
        spills = max(spills, 1280 if is_wide else 224)
    if mask == "bits":
        spills = max(spills, 288 if is_wide else 8)
    elif mask == "bytes":
        # Tiles are then smaller than in the row.
        spills = {64: 0, 96: 96, 128: 384, 256: 768}[head_dim]
        if ranges > 1:
            spills += 512
    if eight_bits:
        spills = max(spills, 608 if is_wide else 64)
    return spills


# -- What its instructions do.


@dataclass(frozen=True)
class Counts:
    """The work of a program of BLOCK_M queries on one tile of keys, in the loop without comparisons.

    Args:
        flops: operations of the matrix instructions, 2 per multiplication.
        bytes: bytes loaded from global memory.
        exponentials: operations of the special function units.
    """

    flops: int
    bytes: int
    exponentials: int


_MMA = re.compile(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
# The shape is in the instruction's descriptor, N / 8 from bit 17 and M / 16 from bit 24 on. K is 32 bytes (PTX ISA,
# "tcgen05", "Instruction Descriptor"). One thread of a block issues it.
_TCGEN05 = re.compile(r"tcgen05\.mma\.cta_group::1\.kind::(f16|i8) [^;]*, (%r\d+), %p\d+;")
_DEEP = {"f16": 16, "i8": 32}
_COPIED = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (\w+)")
_LABEL = re.compile(r"^\$L__BB\d+_\d+:", re.MULTILINE)


def loop_counts(compiled: Compiled, num_warps: int) -> Counts:
    """Return the counts of the loop with most matrix instructions per comparison in the PTX, which handles tiles that
    all queries see.

    Instructions in PTX belong to a thread, but ``mma.sync`` to a warp, ``wgmma`` to four warps, and ``tcgen05`` to a
    block.
    """
    return _counts(_loops(compiled.ptx)[0], num_warps, compiled.ptx)


def _counts(body: str, num_warps: int, ptx: str) -> Counts:
    threads = 32 * num_warps
    flops = sum(2 * m * n * k * num_warps for m, n, k in _sizes(_MMA, body))
    flops += sum(2 * m * n * k * num_warps // 4 for m, n, k in _sizes(_WGMMA, body))
    for kind, register in _TCGEN05.findall(body):
        shape = re.search(rf"mov\.b32 \s*{re.escape(register)}, (\d+);", ptx)
        if shape is None:
            raise RuntimeError(f"no constant is moved to {register}, the descriptor of a tcgen05.mma.")
        n, m = (int(shape[1]) >> 17 & 63) * 8, (int(shape[1]) >> 24 & 31) * 16
        flops += 2 * m * n * _DEEP[kind]
    copied = threads * sum(int(size, 0) for size in _COPIED.findall(body))
    return Counts(flops, copied, len(re.findall(r"ex2\.approx", body)) * threads)


def _sizes(pattern: re.Pattern[str], text: str) -> list[tuple[int, int, int]]:
    return [(int(m), int(n), int(k)) for m, n, k in pattern.findall(text)]


def _loops(ptx: str) -> list[str]:
    """Return the bodies of the innermost loops with matrix instructions, in order. A body extends from a label to the
    last jump back to it.
    """
    spans = []
    for label in _LABEL.finditer(ptx):
        jumps = re.finditer(rf"bra(?:\.uni)? \t?\s*{re.escape(label[0][:-1])};", ptx[label.end() :])
        back = [jump.end() for jump in jumps]
        if back:
            spans.append((label.end(), label.end() + back[-1]))
    inner = [
        span
        for span in spans
        if not any(span != other and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    bodies = [ptx[start:end] for start, end in inner if "mma" in ptx[start:end]]
    if not bodies:
        raise RuntimeError("no loop with matrix instructions was found in the PTX.")
    return bodies
