"""Triton kernels compiled for GPUs that are not here: registers, spills, shared memory, PTX and SASS."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Compute capabilities that the kernels are for: Ampere (A100, then GeForce and A10), Ada, Hopper, Blackwell.
ARCHS = (80, 86, 89, 90, 100)
# The largest shared memory of a block, in bytes: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Threads of a multiprocessor, likewise; each has 65,536 registers.
THREAD_LIMIT = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048}


@dataclass(frozen=True)
class Compiled:
    """A kernel as ``ptxas`` left it.

    Args:
        registers: of a thread.
        spill_stores, spill_loads: bytes of a thread that did not fit into registers.
        shared: bytes of a block, the dynamic ones too.
        ttgir: Triton's own form, with layouts.
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
        """So many of a multiprocessor have room in its registers, which warps get in units of 8 for each thread."""
        warps = 65536 // (32 * 8 * -(-self.registers // 8))
        return min(THREAD_LIMIT[self.arch], 32 * warps)

    def sass(self) -> str:
        """The machine's own instructions."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_kernel(
    kernel: Any,
    arguments: Mapping[str, Any],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: Any,
) -> Compiled:
    """Compile ``kernel``, a ``@triton.jit`` function, as a launch with these arguments would; no GPU is needed, nothing is cached.

    Args:
        arguments: by name, all of them. A type as Triton writes it (``"*bf16"``, ``"i32"``, ``"fp32"``): a pointer aligned to
            16 bytes, or a number of which nothing is known. A number: what Triton makes of it at a launch, a constant if it is 1,
            and known to be divisible by 16 where it is, unless the kernel says ``do_not_specialize``. Of parameters that are
            ``tl.constexpr``: the value.
        options: more of Triton's launch options (``maxnreg``, ``num_ctas``).

    Raises:
        TypeError: an argument is missing or unknown, or the kernel was imported under TRITON_INTERPRET=1.
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
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        known = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (known and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        aligned = value.startswith("*") if isinstance(value, str) else known and value % 16 == 0
        signature[parameter.name] = value if isinstance(value, str) else _type_of(value)
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
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
        # As a launch does, until Triton 3.10; unset, 3.9 warns of it.
        launch = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options}
        found = compile_source(source, target=GPUTarget("cuda", arch, 32), options=launch)
    return Compiled(
        arch,
        _number(r"Used (\d+) registers", log),
        _number(r"(\d+) bytes spill stores", log),
        _number(r"(\d+) bytes spill loads", log),
        found.metadata.shared,
        found.asm["ttgir"],
        found.asm["ptx"],
        found.asm["cubin"],
    )


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _number(pattern: str, log: io.StringIO) -> int:
    found = re.search(pattern, log.getvalue())
    if found is None:
        raise RuntimeError(f"ptxas said nothing of {pattern!r}: {log.getvalue()!r}")
    return int(found[1])
