"""The merge kernel: interpreted and compared with float64, compiled for every GPU, and used as an operator."""

import os
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core import triton_support
from para_core.attention.merge import Merged, merge_on_gpu, merge_on_gpu_in_place
from para_core.distributed.collectives import LIBRARY
from para_core.kernels import merge, merge_reference
from tests.kernels.launches import by_use, on_each_arch

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def partial_results(shape, dtype=torch.float32, *, seed=0):
    """Return two sides. The first row saw no key, the second only keys of a, the third only keys of b."""
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    lses = [3 * torch.randn(shape[:3], generator=generator) for _ in range(2)]
    for row, sides in enumerate([(0, 1), (1,), (0,)][: shape[2]]):
        for side in sides:
            outs[side][:, :, row] = 0
            lses[side][:, :, row] = -torch.inf
    return outs[0], lses[0], outs[1], lses[1]


def exactly(*sides):
    return merge_reference.merge(*[x.double() for x in sides])


def relative_error(x, exact):
    return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def require_equal(merged, sides):
    (out, lse), (exact_out, exact_lse) = merged, exactly(*sides)
    # Triton's interpreter truncates to 16 bits where a GPU rounds, so the error is at most eps per element, not eps /
    # 2.
    rounding = 0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
    assert relative_error(out, exact_out) <= rounding + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def merge_in_place(out_a, lse_a, out_b, lse_b):
    merged = merge.merge(out_a, lse_a, out_b, lse_b, into=(out_a, lse_a))
    assert merged[0] is out_a
    assert merged[1] is lse_a
    return merged


# -- Interpreted.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 37, 20), (1, 2, 65, 64), (1, 1, 3, 256), (1, 1, 33, 300)])
def test_the_kernel_is_the_reference_in_float64(interpreter, shape, in_place, dtype):
    sides = partial_results(shape, dtype)
    require_equal(interpreter(merge_in_place if in_place else merge.merge, *sides), sides)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_merge_writes_float32(interpreter, dtype):
    sides = partial_results((1, 2, 9, 16), dtype)
    out, lse = interpreter(merge_on_gpu, *sides)
    assert out.dtype == torch.float32
    require_equal((out, lse), sides)


def test_row_without_keys_gives_zero_and_minus_infinity(interpreter):
    out, lse = interpreter(merge_in_place, *partial_results((1, 2, 4, 8)))
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 8))
    assert torch.equal(lse[:, :, 0], torch.full((1, 2), -torch.inf))
    assert out.isfinite().all()


def test_scores_far_apart_do_not_overflow(interpreter):
    out_a, lse_a, out_b, lse_b = partial_results((1, 2, 8, 8))
    sides = out_a, 1e4 * lse_a, out_b, 1e4 * lse_b
    require_equal(interpreter(merge_in_place, *sides), sides)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 0, 4, 8), (1, 2, 0, 8), (1, 2, 4, 0)])
def test_empty_results_are_not_merged(interpreter, shape):
    sides = partial_results(shape)
    out, lse = interpreter(merge_in_place, *sides)
    assert out.shape == shape
    torch.testing.assert_close(lse, torch.logaddexp(sides[1], sides[3]))


@st.composite
def strided(draw, shape):
    """Return a view of this shape in memory with another order, step and beginning. The last dim is not always the
    fastest.
    """
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    begins = [draw(st.integers(0, 1)) for _ in shape]
    room = [n * step + begin for n, step, begin in zip(shape, steps, begins, strict=True)]
    memory = torch.full([room[dim] for dim in order], torch.nan).permute(
        [order.index(dim) for dim in range(len(shape))]
    )
    for dim, (n, step, begin) in enumerate(zip(shape, steps, begins, strict=True)):
        memory = memory.narrow(dim, begin, n * step)[(slice(None),) * dim + (slice(None, None, step),)]
    assert memory.shape == shape
    return memory


@given(data=st.data())
def test_any_strides_are_read_and_written(interpreter, data):
    shape = tuple(data.draw(st.tuples(*[st.integers(1, top) for top in (2, 3, 5, 9)])))
    sides = partial_results(shape, seed=data.draw(st.integers(0, 99)))
    given_sides = [data.draw(strided(x.shape)).copy_(x) for x in sides]
    require_equal(interpreter(merge_in_place, *given_sides), sides)


def merge_four(query_dtype, count):
    """Merge four results as a ring does, by kernels only. The operators' CPU form is the GPU's."""
    LIBRARY.impl("merge", merge_on_gpu, "CPU", allow_override=True)
    LIBRARY.impl("merge_", merge_on_gpu_in_place, "CPU", allow_override=True)
    parts = [partial_results((1, 2, 13, 8), query_dtype, seed=seed)[:2] for seed in range(count)]
    merged = Merged()
    with torch.no_grad():
        for out, lse in parts:
            merged.add(out, lse)
    return parts, merged.out, merged.lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_partial_results_merge_without_changing_inputs(interpreter, dtype):
    parts, out, lse = interpreter(merge_four, dtype, 4)
    originals = [partial_results((1, 2, 13, 8), dtype, seed=seed)[:2] for seed in range(4)]
    assert all(
        torch.equal(x, y) for part, own in zip(parts, originals, strict=True) for x, y in zip(part, own, strict=True)
    )
    exact = [x.double() for x in parts[0]]
    for part in parts[1:]:
        exact = exactly(*exact, *part)
    assert out.dtype == torch.float32
    assert relative_error(out, exact[0]) < 1e-6
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=1e-6)


# -- Compiled.


@pytest.mark.sample(3)
@on_each_arch
@pytest.mark.parametrize("launch", by_use(merge.merge_kernel))
def test_every_launch_compiles_without_spills(launch, arch):
    compiled = launch.compiled(arch)
    assert compiled.spills == 0
    assert compiled.threads >= 1024
    assert "ld.global.v4.b32" in compiled.ptx


# -- As an operator.


def test_plain_pytorch_merges_without_triton():
    sides = [x.double() for x in partial_results((1, 2, 5, 8))]
    torch.testing.assert_close(merge_on_gpu(*sides), exactly(*sides))
    merge_on_gpu_in_place(*sides)
    torch.testing.assert_close(sides[:2], list(exactly(*[x.double() for x in partial_results((1, 2, 5, 8))])))
    missing = [
        mock.patch.object(triton_support, "import_module", side_effect=ModuleNotFoundError("no triton")),
        mock.patch.dict(os.environ, {"PATH": "", "CC": ""}),  # There is no compiler.
    ]
    for patch in missing:
        triton_support.load_kernel.cache_clear()
        with patch:
            sides = partial_results((1, 2, 5, 8), torch.bfloat16)
            require_equal(merge_on_gpu(*sides), sides)
    triton_support.load_kernel.cache_clear()


@pytest.mark.parametrize("name", ["merge", "merge_"])
def test_cuda_has_a_form_of_its_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"para_core::{name}", "CUDA")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_operators_are_one_full_graph(device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.para_core.merge(out_a, lse_a, out_b, lse_b)
        torch.ops.para_core.merge_(out, lse, out_b, lse_b)
        return out, lse

    sides = partial_results((1, 2, 5, 8), torch.bfloat16)
    with torch.no_grad():
        if device == "cpu":
            first = exactly(*sides)
            out, lse = twice(*sides)
            exact = exactly(*first, *sides[2:])
            assert relative_error(out, exact[0]) < 1e-6
            torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=1e-6)
            return
        with FakeTensorMode():
            out, lse = twice(*[torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in sides])
        assert (out.device.type, out.dtype, out.shape) == ("cuda", torch.float32, sides[0].shape)
        assert (lse.dtype, lse.shape) == (torch.float32, sides[1].shape)
