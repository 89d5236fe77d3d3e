"""Numbers in 8 bits on the way: the kernels give the bits of PyTorch's own float8, compiled for every GPU, and as operators."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.compiled import ARCHS
from benchmarks.launches import LaunchCounter
from para_core.attention.approximate.wire import Wire, read_on_gpu, write_on_gpu
from para_core.kernels import wire, wire_reference
from tests.kernels.launches import by_use

SHAPES = [(2, 2, 5, 16), (1, 3, 7, 3), (1, 2, 70, 33), (2, 1, 1, 1), (1, 1, 0, 8), (0, 2, 3, 4)]


def spread(shape, dtype):
    """Numbers of very different sizes, some of which become subnormal, some 0; ``[B, S, H, D]`` in memory."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return x.clamp(-6e4, 6e4).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_give_the_bits_of_pytorch(interpreter, shape, dtype):
    x, rows = spread(shape, dtype), Wire(shape[3]).scale_rows
    expected = wire_reference.write(x, rows)
    assert torch.equal(interpreter(wire.write, x, rows), expected)
    found, exact = interpreter(wire.read, expected, rows, dtype), wire_reference.read(expected, rows, dtype)
    if dtype == torch.bfloat16:  # to which the interpreter truncates
        torch.testing.assert_close(found, exact, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(found, exact)


def test_every_number_of_8_bits_is_read_as_pytorch_reads_it_and_written_as_it_was(interpreter):
    every = torch.arange(256, dtype=torch.uint8)
    one = torch.tensor([1.0]).view(torch.uint8)
    written = torch.cat([every, one]).view(1, 1, 65, 4)
    found = interpreter(wire.read, written, 1, torch.float32)
    expected = every.view(torch.float8_e4m3fn).float().view(1, 1, 64, 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # 448 is the largest one, so the scale is 1.
    finite = expected.nan_to_num(0.0)
    assert torch.equal(interpreter(wire.write, finite, 1)[:, :, :64].view(torch.float8_e4m3fn).float(), finite)


def test_halves_go_to_the_even_neighbour_and_steps_below_the_least_are_rounded_too(interpreter):
    least = 2.0**-9
    x = torch.tensor([448.0, 17.0, 19.0, -17.0, least / 2, 1.5 * least, -2.5 * least, 0.4 * least]).view(1, 1, 2, 4)
    found = interpreter(wire.write, x, 1)[:, :, :2].view(torch.float8_e4m3fn).float().flatten()
    assert found.tolist() == [448.0, 16.0, 20.0, -16.0, 0.0, 2 * least, -2 * least, 0.0]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen(interpreter, bad):
    x = spread((1, 2, 5, 16), torch.float16)
    x[0, 1, 2, 3] = bad
    found = interpreter(wire.read, interpreter(wire.write, x, 1), 1, torch.float16)
    assert found[0, 0].isfinite().all()
    assert found[0, 1, 2, 3].isnan()


def gpu_forms(x):
    return write_on_gpu(x, 1), read_on_gpu(write_on_gpu(x, 1), 1, torch.float64)


def test_what_a_kernel_does_not_take_is_plain_pytorch(interpreter):
    x = spread((1, 2, 5, 16), torch.float64)
    written, found = interpreter(gpu_forms, x)
    assert torch.equal(written, wire_reference.write(x, 1))
    assert torch.equal(found, wire_reference.read(written, 1, torch.float64))


@pytest.mark.parametrize("launch", by_use(wire.write_kernel, wire.read_kernel))
def test_every_launch_compiles_without_a_spill_for_gpus_without_such_floats_too(launch):
    for arch in ARCHS:
        found = launch.compiled(arch)
        assert found.spills == 0
        assert found.threads >= 1024
        assert "e4m3" not in found.ptx


@pytest.mark.parametrize("name", ["write_8_bits", "read_8_bits"])
def test_cuda_has_a_form_of_its_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"para_core::{name}", "CUDA")


def test_writing_launches_2_and_reading_1_and_both_are_of_a_whole_graph():
    x, rounded = torch.empty(1, 2, 5, 16, device="meta", dtype=torch.bfloat16), Wire(16)
    with LaunchCounter() as counter:
        assert rounded.read(rounded.write(x), torch.bfloat16).shape == x.shape
    assert dict(counter.by_operator) == {"para_core::write_8_bits": 2, "para_core::read_8_bits": 1}
    with FakeTensorMode():
        written = rounded.write(torch.empty(1, 2, 5, 16, device="cuda"))
        assert (written.device.type, written.dtype, written.shape) == ("cuda", torch.uint8, (1, 2, 6, 16))
