"""Triton kernels compiled for GPUs that this machine lacks: registers, spills and shared memory of every launch of the
small kernels. Triton ships the compiler, so no GPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from para_core.kernels import attention_int8, merge, norm, pack, residual
from para_core.kernels.pack_reference import LARGEST

# The kernels are for these compute capabilities: Ampere (A100, then GeForce and A10), Ada, Hopper, Blackwell.
ARCHS = (80, 86, 89, 90, 100)
# This is the largest shared memory of a block in bytes (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability").
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# This is the number of threads of a multiprocessor, from the same table. Each one has 65,536 registers.
THREAD_LIMIT = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048}


@dataclass(frozen=True)
class Compiled:
    """A kernel as ``ptxas`` compiled it.

    Args:
        registers: registers of a thread.
        spill_stores, spill_loads: bytes of a thread that did not fit into registers.
        shared: bytes of shared memory of a block, including dynamic ones.
        ttgir: Triton's own representation, with layouts.
    """

    arch: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    ttgir: str
    ptx: str
    cubin: bytes

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    @property
    def threads(self) -> int:
        """Return the number of threads of a multiprocessor that its registers suffice for. Warps get registers in units
        of 8 per thread.
        """
        warps = 65536 // (32 * 8 * -(-self.registers // 8))
        return min(THREAD_LIMIT[self.arch], 32 * warps)

    def sass(self) -> str:
        """Return the machine code in text form."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_kernel(
    kernel: Any, arguments: Mapping[str, Any], *, arch: int, num_warps: int = 4, num_stages: int = 3, **options: Any
) -> Compiled:
    """Compile ``kernel``, a ``@triton.jit`` function, as a launch with these arguments would. Needs no GPU, and caches
    nothing.

    Args:
        arguments: all arguments, by name. A type as Triton writes it (``"*bf16"``, ``"i32"``, ``"fp32"``) is a pointer
            aligned to 16 bytes, or a number with no known property. A number is specialized as in a launch: a constant
            if it is 1, and known to be divisible by 16 if it is, unless the kernel has ``do_not_specialize``. A
            parameter that is ``tl.constexpr`` takes the value.
        options: further launch options of Triton (``maxnreg``, ``num_ctas``).

    Raises:
        TypeError: An argument is missing or unknown, or the kernel was imported under TRITON_INTERPRET=1.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        raise TypeError(
            f"{kernel!r} is no compilable kernel; expected a @triton.jit function, without TRITON_INTERPRET=1."
        )
    if set(arguments) != set(kernel.arg_names):
        difference = sorted(set(arguments) ^ set(kernel.arg_names))
        raise TypeError(f"{kernel.__name__} takes {kernel.arg_names}; missing or unknown: {difference}.")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_specialized = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_specialized and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        aligned = value.startswith("*") if isinstance(value, str) else is_specialized and value % 16 == 0
        signature[parameter.name] = value if isinstance(value, str) else _type_of(value)
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as cache,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.cache.dir = str(Path(cache))
        knobs.nvidia.dump_ptxas_log = True
        # A launch sets this option until Triton 3.10. Triton 3.9 warns if it is unset.
        launch = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options}
        kernel_binary = compile_source(source, target=GPUTarget("cuda", arch, 32), options=launch)
    return Compiled(
        arch,
        _number(r"Used (\d+) registers", log),
        _number(r"(\d+) bytes spill stores", log),
        _number(r"(\d+) bytes spill loads", log),
        kernel_binary.metadata.shared,
        kernel_binary.asm["ttgir"],
        kernel_binary.asm["ptx"],
        kernel_binary.asm["cubin"],
    )


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _number(pattern: str, log: io.StringIO) -> int:
    match = re.search(pattern, log.getvalue())
    if match is None:
        raise RuntimeError(f"ptxas said nothing of {pattern!r}: {log.getvalue()!r}")
    return int(match[1])


# -- The launches of the small kernels.

HEAD_DIMS = (64, 96, 128, 256)
_BYTES = {"*i8": 1, "*i16": 2, "*i32": 4}
_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of a launch.

    Args:
        common: whether models launch it today, in 16 bits.
        rounded: whether it rounds to 8 bits.
    """

    kernel: Any
    name: str
    arguments: dict[str, Any]
    num_warps: int
    common: bool = True
    rounded: bool = False

    def compiled(self, arch: int) -> Compiled:
        return compile_kernel(self.kernel, self.arguments, arch=arch, num_warps=self.num_warps)


def launches() -> Iterator[Launch]:
    """Yield every launch once. Lengths and strides do not distinguish launches."""
    for head_dim in HEAD_DIMS:
        yield from _merges(head_dim)
        yield from _exchanges(head_dim)
        yield from _of_rounded_keys(head_dim)
    yield from _of_residuals()
    yield from _of_norms()


def _merges(head_dim: int) -> Iterator[Launch]:
    # These are the first merge of a ring, and the later ones.
    for a, b, common in (
        ("bf16", "bf16", True),
        ("fp32", "bf16", True),
        ("fp16", "fp16", False),
        ("fp32", "fp32", False),
    ):
        args: dict[str, Any] = {"out_a": f"*{a}", "out_b": f"*{b}", "out": "*fp32", "width": head_dim}
        args |= dict.fromkeys(("lse_a", "lse_b", "lse"), "*fp32") | dict.fromkeys(("num_heads", "num_rows"), "i32")
        args |= merge.block_of(head_dim)
        # The steps are multiples of 16, as strides of whole heads are.
        steps = {
            name: 1 if name.endswith("column") else 64 for name in merge.merge_kernel.arg_names if name not in args
        }
        yield Launch(
            merge.merge_kernel, f"merge {a} and {b}, D = {head_dim}", {**args, **steps}, merge.NUM_WARPS, common
        )


def _exchanges(head_dim: int) -> Iterator[Launch]:
    for packs in (True, False):
        verb = "pack" if packs else "unpack"
        for pointer, size in _BYTES.items():
            name = f"{verb} {size} byte{'s' * (size > 1)}, D = {head_dim}"
            args = _of_exchange(head_dim, pointer, pointer, packs=packs)
            yield Launch(pack.pack_kernel, name, args, pack.NUM_WARPS, common=size == 2)
        for dtype in ("bf16", "fp16", "fp32"):
            for eight in LARGEST:
                name = f"{verb} {dtype} as {_NAMES[eight]}, D = {head_dim}"
                args = _of_exchange(head_dim, f"*{dtype}", "*u8", packs=packs, eight_bits=eight)
                yield Launch(pack.pack_kernel, name, args, pack.NUM_WARPS, dtype == "bf16", rounded=True)


def _of_exchange(
    head_dim: int, tensors: str, buffer: str, *, packs: bool, eight_bits: torch.dtype | None = None
) -> dict[str, Any]:
    size = {"*bf16": 2, "*fp16": 2, "*fp32": 4, **_BYTES}[tensors]
    names = pack.pack_kernel.arg_names
    args = {**dict.fromkeys(("x", "y", "z"), tensors), "buffer": buffer, "regions": "*i64", "PACK": packs}
    args |= pack.block_of([head_dim], size, eight_bits)
    args |= {name: head_dim for name in names if name.endswith("_width")}
    args |= {name: 1 if name.endswith("column") else 64 for name in names if name[1:2] == "_" and name not in args}
    return args | {name: "i32" for name in names if name not in args}


def _of_rounded_keys(head_dim: int) -> Iterator[Launch]:
    for dtype, common in (("bf16", True), ("fp16", False)):
        args: dict[str, Any] = {"key": f"*{dtype}", "mean": "*fp32", "rounded": "*i8", "scales": "*fp32"}
        args |= dict.fromkeys(("step_kb", "step_kh", "step_k"), 64) | {"num_heads": "i32", "num_keys": "i32"}
        args |= {"width": head_dim, **merge.block_of(head_dim)}
        name = f"round keys {dtype}, D = {head_dim}"
        yield Launch(attention_int8.round_keys_kernel, name, args, merge.NUM_WARPS, common)


def _of_residuals() -> Iterator[Launch]:
    for dtype, common in (("bf16", True), ("fp16", False), ("fp32", False)):
        tensors = dict.fromkeys(("now", "before"), f"*{dtype}")
        numbers = {"sums": "*fp32", "num_elements": 16, "now_batch": 16, "before_batch": 16}
        block = {"BLOCK": residual.BLOCK, "STEPS": residual.STEPS}
        yield Launch(
            residual.change_kernel, f"change {dtype}", {**tensors, **numbers, **block}, residual.NUM_WARPS, common
        )
        for residuals in range(1, residual.MOST_RESIDUALS + 1):
            args: dict[str, Any] = dict.fromkeys(("entry", "x", "y", "z", "out"), f"*{dtype}")
            args |= dict.fromkeys(("of_x", "of_y", "of_z"), "fp32")
            args |= {"num_elements": 16, "RESIDUALS": residuals, "BLOCK": residual.BLOCK}
            name = f"forecast {dtype} of {residuals}"
            yield Launch(residual.forecast_kernel, name, args, residual.NUM_WARPS, common)
    sums = {"sums": "*fp32", "totals": "*fp32", "num_chunks": "i32", "BLOCK": residual.BLOCK, "STEPS": 1}
    yield Launch(residual.add_up_kernel, "change, adding up", sums, residual.NUM_WARPS)


def _of_norms() -> Iterator[Launch]:
    """Yield launches of a group norm over rows with 16 channels per group, with channels first or last in memory."""
    for dtype, common in (("bf16", True), ("fp16", False), ("fp32", False)):
        for last in (False, True):
            name = f"{dtype}, channels {'last' if last else 'first'}"
            steps = {"batch_step": 64, "channel_step": 1 if last else 64, "step": 64 if last else 1}
            args: dict[str, Any] = {"x": f"*{dtype}", "parts": "*fp32", "size": 64, "groups": "i32", **steps}
            args |= {"channels": 16 if last else 1, "group_step": 64, **norm.block_of(16 if last else 1)}
            args |= {"STEPS": norm.STEPS}
            yield Launch(norm.moments_kernel, f"moments {name}", args, norm.NUM_WARPS, common)
            args = {**steps, **{f"out_{step}": size for step, size in steps.items()}, "eps": "fp32", "size": 64}
            args |= {**dict.fromkeys(("x", "out", "weight", "bias"), f"*{dtype}"), "channels": 64, "per_group": 16}
            args |= {**dict.fromkeys(("of_ranks", "shares"), "*fp32"), "groups": "i32", "RANKS": 2}
            args |= {"HAS_WEIGHT": True, "HAS_BIAS": True, **norm.block_of(norm.CHANNELS if last else 1)}
            yield Launch(norm.normalize_kernel, f"normalize {name}", args, norm.NUM_WARPS, common)
    merged = {
        "x": "*bf16",
        "parts": "*fp32",
        "moments": "*fp32",
        "num_chunks": "i32",
        "groups": "i32",
        "batch_step": 64,
    }
    merged |= {"group_step": 64, "BLOCK": norm.BLOCK, "STEPS": 1}
    yield Launch(norm.merge_kernel, "moments, merged", merged, norm.NUM_WARPS)
