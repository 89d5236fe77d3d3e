"""Every kind of launch, compiled for each GPU, stays within registers, shared memory and the allowed spills.

Triton ships the compiler, so no GPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from para_core.kernels import attention_int8, merge, norm, pack, product, residual
from para_core.kernels.attention_configs import FLOAT32, FLOAT32_WIDE, KernelCall, fit_inputs, row_of, row_of_dim
from para_core.kernels.attention_launch import RoundedKeys, launch_kernel
from para_core.kernels.pack_reference import CopyRegion

pytestmark = pytest.mark.slow

# The kernels are for these compute capabilities: Ampere (A100, then GeForce and A10), Ada, Hopper, Blackwell.
ARCHS = (80, 86, 89, 90, 100)
on_each_arch = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=pytest.mark.long if arch in (86, 100) else ()) for arch in ARCHS]
)
# The largest shared memory of a block and of a multiprocessor in bytes, and the threads of a multiprocessor (CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability"). A multiprocessor has 65,536 registers.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
THREAD_LIMIT = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048}
_devices = itertools.count()
_run = JITFunction.run  # Tests of this folder replace it.


class Compiled(NamedTuple):
    """A kernel as ``ptxas`` compiled it: registers and spilled bytes of a thread, bytes of shared memory of a block."""

    kernel: JITFunction[Any]
    registers: int
    spills: int
    shared: int
    ptx: str

    @property
    def warps(self) -> int:
        """The number of warps that the registers of a multiprocessor suffice for. Threads get them in units of 8."""
        return 65536 // (32 * 8 * -(-self.registers // 8))


def compiled_by(call: Callable[[], Any], arch: int) -> list[Compiled]:
    """Return the kernels that ``call`` launches, compiled for a GPU and not run. Its tensors may be on meta."""
    found = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = _run(self, *args, grid=grid, warmup=True, **options)
        registers, stores, loads = (
            int(re.search(pattern, log.getvalue())[1])
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
        )
        found.append(Compiled(self, registers, stores + loads, kernel.metadata.shared, kernel.asm["ptx"]))

    # Triton keeps kernels by device.
    device = next(_devices)
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
    )
    with (
        tempfile.TemporaryDirectory() as cache,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        knobs.language.scope(),
        mock.patch.object(driver, "_active", gpu),
        mock.patch.object(JITFunction, "run", run),
    ):
        knobs.cache.dir = cache
        knobs.nvidia.dump_ptxas_log = True
        # Triton 3.9 warns if it is unset.
        knobs.language.default_fp_fusion = True
        call()
    return found


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Rows of a mask of so many keys begin at any byte.
TOKENS, HEADS = 4097, 24


def empty(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(dim, dtype=BF16):
    """Return ``[2, HEADS, TOKENS, dim]``, with the memory of a projection."""
    return empty(2, TOKENS, HEADS, dim, dtype=dtype).transpose(1, 2)


def lse():
    return empty(2, HEADS, TOKENS)


def exchange(dims, dtype, *, packs, to=None):
    """Pack or unpack the heads of two ranks."""
    tensors = [heads(dim, dtype) for dim in dims]
    row = HEADS // 2 * (dims[0] + (4 if to else 0))
    regions = [CopyRegion(index, 0, TOKENS, 0, HEADS // 2, 0, row) for index in range(len(dims))]
    buffer = empty(2 * TOKENS * row, dtype=torch.uint8 if to else dtype)
    if packs:
        pack.pack(tensors, regions, buffer, to)
    else:
        pack.unpack(buffer, regions, tensors, to)


def image(last, dtype):
    return empty(2, 256, 64, 64, dtype=dtype).to(memory_format=torch.channels_last if last else torch.contiguous_format)


def normalize(last, dtype):
    norm.normalize(image(last, dtype), empty(2, 2, 2, 16), empty(2), 16, *[empty(256, dtype=dtype)] * 2, 1e-5)


def calls_of_head_dim(dim):
    """Yield the calls whose rows are heads, by name."""
    yield "merge, the first", partial(merge.merge, heads(dim), lse(), heads(dim), lse(), into=(heads(dim, FP32), lse()))
    yield "merge", partial(merge.merge, heads(dim, FP32), lse(), heads(dim), lse())
    yield "round keys", partial(attention_int8.round_keys, heads(dim))
    for to in (None, torch.int8, torch.float8_e4m3fn):
        yield f"pack {to}", partial(exchange, [dim] * 3, BF16, packs=True, to=to)
        yield f"unpack {to}", partial(exchange, [dim] * 3, BF16, packs=False, to=to)


def other_calls():
    yield "pack bytes", partial(exchange, [128, 128], torch.uint8, packs=True)
    yield "pack float32", partial(exchange, [64], FP32, packs=True)
    for dtype in (BF16, FP32):
        hidden = empty(2, 1 << 20, dtype=dtype)
        yield f"change {dtype}", partial(residual.change, hidden, hidden)
        for count in (1, 2, 3):
            yield f"forecast {dtype} of {count}", partial(residual.forecast, hidden, [hidden] * count, [1.0] * count)
        for last in (False, True):
            name = f"{dtype}, channels {'last' if last else 'first'}"
            yield f"moments {name}", partial(norm.moments, image(last, dtype), 16)
            yield f"norm {name}", partial(normalize, last, dtype)


SMALL = {f"{name}, D = {dim}": call for dim in (96, 256) for name, call in calls_of_head_dim(dim)} | dict(other_calls())
# These read a few numbers once.
LAST_STEPS = (residual.add_up_kernel, norm.merge_chunks_kernel)


@pytest.mark.sample(14)
@on_each_arch
@pytest.mark.parametrize("name", SMALL)
def test_small_kernel_fits_and_moves_16_bytes_at_once(name, arch):
    for compiled in compiled_by(SMALL[name], arch):
        assert compiled.spills == 0
        # The order of additions is fixed, and GPUs before sm_89 have no float8.
        assert "atom." not in compiled.ptx and "e4m3" not in compiled.ptx
        if compiled.kernel in LAST_STEPS:
            continue
        # These are four blocks of 8 warps.
        assert compiled.warps * 32 >= 1024 or compiled.kernel in (norm.moments_kernel, norm.normalize_kernel)
        # A row in 8 bits has a scale after it, so its beginning is a multiple of 4 bytes only.
        rounds, unpacks = "int8" in name or "float8" in name, name.startswith("unpack")
        assert ("ld.global.b32" if rounds and unpacks else "ld.global.v4.b32") in compiled.ptx
        if compiled.kernel is merge.merge_kernel:  # In place, no thread writes before all have read.
            assert "bar.sync" in compiled.ptx[compiled.ptx.rindex("ld.global") : compiled.ptx.index("st.global")]
        if compiled.kernel is pack.pack_kernel:
            assert ("st.global.b32" if rounds and not unpacks else "st.global.v4.b32") in compiled.ptx


# By name: the dtype, the number of inputs of a linear layer, and whether the weight is a matrix on the right.
PRODUCTS = {
    "bfloat16": (BF16, 3072, False),
    "float16, odd inputs": (FP16, 100, False),
    "bfloat16, a matrix on the right": (BF16, 3072, True),
    "float32": (FP32, 3072, False),
}


def multiply(dtype, inputs, is_on_the_right, rows):
    weight = empty(inputs, 12288, dtype=dtype).mT if is_on_the_right else empty(12288, inputs, dtype=dtype)
    product.launch_product(empty(rows, inputs, dtype=dtype), weight, empty(12288, dtype=dtype))


@on_each_arch
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_fits_and_is_one_kernel_for_all_numbers_of_rows(name, arch):
    dtype = PRODUCTS[name][0]
    compiled, other = (compiled_by(partial(multiply, *PRODUCTS[name], rows), arch)[0] for rows in (1, 4096))
    assert compiled.ptx == other.ptx
    assert compiled.spills == 0
    tile = product.TILE_FLOAT32 if dtype == FP32 else product.TILE
    assert tile.warps <= min(compiled.warps, THREAD_LIMIT[arch] // 32)
    assert compiled.shared <= SHARED_LIMIT[arch]
    # No sum is split, so nothing is added up in memory.
    assert not re.search(r"\b(atom|red)\.", compiled.ptx)
    if dtype == FP32:
        assert "tf32" not in compiled.ptx and "mma" not in compiled.ptx and "fma.rn.f32" in compiled.ptx
    else:
        assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync") in compiled.ptx
    # Blocks are copied while others are multiplied, 16 bytes at once.
    assert "cp.async.cg.shared.global" in compiled.ptx


# Name: (inputs that the block sizes depend on, further ones, bytes of a thread that may spill with head dims up to 128,
# and above: as measured when the rows of the table were chosen).
CONTINUING = {"is_causal": True, "continues": True}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "plain": ({}, {}, 40, 448),
    "continuing in float16": ({}, {**CONTINUING, "scale": -1.0, "dtype": FP16}, 40, 448),
    "a range": ({"ranges": 1}, CONTINUING, 40, 448),
    "ranges, a mask of keys": ({"ranges": 2}, {**CONTINUING, "mask": torch.bool, "rows": 1}, 224, 1280),
    "bool mask": ({"mask": "bytes"}, {"mask": torch.bool}, 384, 768),
    "float mask, ranges": ({"mask": "bytes", "ranges": 2}, {**CONTINUING, "mask": FP32}, 896, 1280),
    "mask of bits": ({"mask": "bits"}, {"mask": torch.int32}, 40, 288),
    "mask of bits, ranges": ({"mask": "bits", "ranges": 2}, {**CONTINUING, "mask": torch.int32}, 224, 1280),
    "8 bits": ({"eight_bits": True}, CONTINUING, 64, 608),
    "8 bits, float mask": ({"eight_bits": True, "mask": "bytes", "ranges": 2}, {**CONTINUING, "mask": FP32}, 896, 1280),
    "float32, float mask, ranges": ({"ranges": 2}, {**CONTINUING, "dtype": FP32, "mask": FP32}, 256, 0),
}


def launch_attention(config, dims, *, ranges, eight_bits, dtype=BF16, mask=None, rows=TOKENS, continues=False, **more):
    query, key, value = (heads(dim, dtype) for dim in (dims[0], *dims))
    words = -(-TOKENS // 32) if mask == torch.int32 else TOKENS
    call = KernelCall(
        query,
        key,
        value,
        mask=None if mask is None else empty(2, 1, rows, words, dtype=mask),
        key_ranges=empty(2, ranges, 2, dtype=torch.int32) if ranges else None,
        out_so_far=heads(dims[1], FP32) if continues else None,
        lse_so_far=lse() if continues else None,
        **more,
    )
    rounded = RoundedKeys(empty(*key.shape, dtype=torch.int8), lse(), empty(2, HEADS, dims[0])) if eight_bits else None
    launch_kernel(config, call, out=heads(dims[1], FP32 if continues else dtype), lse=lse(), rounded=rounded)


@pytest.mark.sample(5)
@on_each_arch
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (96, 96), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_attention_fits_its_gpu(name, dims, arch):
    inputs, more, *spills = CALLS[name]
    row_dim = row_of_dim(max(dims))
    config, is_exact = fit_inputs(row_of(arch // 10, arch % 10), row_dim, **inputs), more.get("dtype") == FP32
    if is_exact:
        config = FLOAT32_WIDE if row_dim > 128 else FLOAT32
    options = {"ranges": 0, "eight_bits": False, **inputs, **more, "mask": more.get("mask")}
    (compiled,) = compiled_by(lambda: launch_attention(config, dims, **options), arch)
    assert compiled.spills <= spills[row_dim > 128]
    # Two programs of 64 dims run at the same time if they have no more inputs. A block occupies 1 KiB more.
    at_once = 2 if row_dim == 64 and arch != 100 and name in ("plain", "continuing in float16") else 1
    assert at_once * config.num_warps <= min(compiled.warps, THREAD_LIMIT[arch] // 32)
    assert at_once * (compiled.shared + 1024) <= SHARED_LIMIT[arch] + 1024
    assert "ex2.approx" in compiled.ptx
    if is_exact:
        assert "tf32" not in compiled.ptx and "mma" not in compiled.ptx and "fma.rn.f32" in compiled.ptx
        return
    assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync") in compiled.ptx
    # Tiles are copied while others are computed, 16 bytes at once also if a head has 72 dims.
    assert "cp.async" in compiled.ptx
    if more.get("mask") is None:
        assert "ld.global.b16" not in compiled.ptx
    if "eight_bits" in inputs:
        assert {90: "s32.s8.s8", 100: "kind::i8"}.get(arch, "s32.s8.s8.s32") in compiled.ptx
