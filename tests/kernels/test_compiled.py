"""The compiler's report on known kernels, which shows that the assertions on other kernels read it correctly."""

import pytest
import triton
import triton.language as tl

from tests.kernels.compiled import ARCHS, SHARED_LIMIT, compile_kernel

pytestmark = pytest.mark.slow


@triton.jit
def scaled_product(a, b, out, num_rows, step, scale, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = rows < num_rows
    x = tl.load(a + rows * step + columns, mask=inside, other=0.0)
    y = tl.load(b + rows * step + columns)
    tl.store(out + rows * step + columns, scale * tl.dot(x, y), mask=inside)


ARGUMENTS = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "num_rows": "i32", "step": 64, "scale": "fp32", "BLOCK": 64}


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_compiles_for_every_gpu_with_tensor_cores(arch):
    compiled = compile_kernel(scaled_product, ARGUMENTS, arch=arch)
    assert 16 <= compiled.registers <= 255
    # Triton 3.6 keeps four registers of a tcgen05 result in local memory. Later versions keep none.
    assert compiled.spills <= (32 if arch == 100 else 0)
    assert 64 * 64 * 2 <= compiled.shared <= SHARED_LIMIT[arch]
    tensor_core = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
    assert tensor_core in compiled.ptx
    assert f".target sm_{arch}" in compiled.ptx


def test_low_register_limit_shows_spills():
    compiled = compile_kernel(scaled_product, {**ARGUMENTS, "BLOCK": 128}, arch=80, maxnreg=32)
    assert compiled.registers <= 32
    assert compiled.spill_stores > 0
    assert compiled.spill_loads > 0


def test_numbers_are_specialised_as_a_launch_does():
    aligned, odd, constant = (
        compile_kernel(scaled_product, {**ARGUMENTS, "step": step}, arch=80) for step in (64, 65, 1)
    )
    # 16 bytes are loaded at once if rows begin at multiples of 16 bytes.
    assert ".v4.b32" in aligned.ptx
    assert ".v4.b32" not in odd.ptx.split("mma.sync", maxsplit=1)[0]
    parameters = [compiled.ptx.count(".param .u32") for compiled in (odd, constant)]
    assert parameters[1] == parameters[0] - 1


def test_the_machines_instructions_can_be_read():
    assert "HMMA" in compile_kernel(scaled_product, ARGUMENTS, arch=80).sass()


def test_a_missing_argument_is_named():
    with pytest.raises(TypeError, match=r"\['scale'\]"):
        compile_kernel(scaled_product, {name: x for name, x in ARGUMENTS.items() if name != "scale"}, arch=80)
