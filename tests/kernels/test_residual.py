"""The cache's kernels: interpreted and compared with float64, compiled for every GPU, and used as operators."""

import doctest
from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core.cache.residual_operators import change, change_on_gpu, forecast, forecast_on_gpu
from para_core.cache.residuals import Residuals
from para_core.cache.rules import rule_of
from para_core.kernels import residual
from para_core.recorder.run_counter import RunCounter
from tests.kernels.launches import by_use, on_each_arch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = residual.BLOCK * residual.STEPS
# The lengths are less than a block, less than a chunk, and one more than some chunks.
LENGTHS = [1, 63, residual.BLOCK + 1, CHUNK, 3 * CHUNK + 1]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums(now, before):
    now, before = now.double(), before.double()
    return torch.stack([(now - before).abs().sum(-1), before.abs().sum(-1)], dim=-1)


# -- Interpreted.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_change_is_that_of_float64(interpreter, length, dtype):
    now, before = normal(2, length, dtype=dtype), normal(2, length, dtype=dtype, seed=1)
    actual = interpreter(residual.change, now, before)
    assert actual.dtype == torch.float32
    # The numbers are positive, so a sum is off by at most one float32 eps for each addition in a row. A thread has 16.
    torch.testing.assert_close(actual.double(), sums(now, before), rtol=3e-6, atol=0)


def test_small_change_is_not_rounded_to_16_bits(interpreter):
    before = normal(1, 5000, dtype=torch.bfloat16)
    now = before.clone()
    now[0, ::7] *= 1.01
    torch.testing.assert_close(interpreter(residual.change, now, before).double(), sums(now, before), rtol=3e-6, atol=0)


def change_of_views(whole, other):
    """Return the change of inputs whose rows, or elements, are not adjacent in memory."""
    return residual.change(whole[:, 3:40], other[:, 3:40]), residual.change(whole[:, ::2], other[:, ::2])


def test_rows_and_elements_may_be_apart(interpreter):
    now, before = normal(3, 50), normal(3, 50, seed=1)
    rows, elements = interpreter(change_of_views, now, before)
    torch.testing.assert_close(rows.double(), sums(now[:, 3:40], before[:, 3:40]), rtol=3e-6, atol=0)
    torch.testing.assert_close(elements.double(), sums(now[:, ::2], before[:, ::2]), rtol=3e-6, atol=0)


def change_of_two_lyings(whole, other):
    return residual.change(whole[:, 3:40], other), residual.change(other, whole[:, 3:40])


def test_each_of_both_may_lie_in_its_own_way(interpreter):
    now, before = normal(3, 50), normal(3, 37, seed=1)
    actual, the_other_way = interpreter(change_of_two_lyings, now, before)
    torch.testing.assert_close(actual.double(), sums(now[:, 3:40], before), rtol=3e-6, atol=0)
    torch.testing.assert_close(the_other_way.double(), sums(before, now[:, 3:40]), rtol=3e-6, atol=0)


def test_the_same_numbers_give_the_same_bits(interpreter):
    now, before = normal(1, 2 * CHUNK + 5), normal(1, 2 * CHUNK + 5, seed=1)
    once = interpreter(residual.change, now, before)
    # The sample must give the same in a batch with others.
    batch = interpreter(residual.change, torch.cat([before, now]), torch.cat([now, before]))
    assert torch.equal(once[0], batch[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen(interpreter, bad):
    now, before = normal(2, 100), normal(2, 100, seed=1)
    now[1, 99] = bad
    actual = interpreter(residual.change, now, before)
    assert actual[0].isfinite().all()
    assert not actual[1, 0].isfinite()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_of_nothing_nothing_has_changed(interpreter, shape):
    assert torch.equal(interpreter(residual.change, torch.empty(shape), torch.empty(shape)), torch.zeros(shape[0], 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [[1.0], [1.7, -0.7], [3.1, -3.2, 1.1]])
@pytest.mark.parametrize("shape", [(1,), (2, 3, 5), (2, 700, 3)])
def test_a_forecast_is_that_of_float64_rounded_once(interpreter, shape, weights, dtype):
    entry, *residuals = (normal(*shape, dtype=dtype, seed=seed) for seed in range(len(weights) + 1))
    actual = interpreter(residual.forecast, entry, residuals, weights)
    exact = entry.double() + sum(w * x.double() for w, x in zip(weights, residuals, strict=True))
    assert actual.dtype == dtype
    assert actual.shape == entry.shape
    # The interpreter truncates to 16 bits, hence eps. float32 sums round each addition.
    terms = entry.double().abs() + sum(abs(w) * x.double().abs() for w, x in zip(weights, residuals, strict=True))
    rounding = torch.finfo(dtype).eps * exact.abs() if dtype != torch.float32 else 0
    assert ((actual.double() - exact).abs() <= rounding + 4 * torch.finfo(torch.float32).eps * terms).all()


def forecast_of_views(x, y):
    return residual.forecast(x.transpose(0, 1), [y.transpose(0, 1)], [2.0])


def test_forecast_accepts_views(interpreter):
    x, y = normal(7, 5), normal(7, 5, seed=1)
    torch.testing.assert_close(interpreter(forecast_of_views, x, y), (x + 2 * y).T)


def test_too_many_residuals_for_a_launch_are_refused():
    with pytest.raises(ValueError, match=r"4 residuals; .*3"):
        residual.forecast(torch.empty(1), [torch.empty(1)] * 4, [1.0] * 4)


# -- Compiled.


@on_each_arch
@pytest.mark.parametrize("launch", by_use(residual.change_kernel, residual.forecast_kernel))
def test_every_launch_compiles_without_spills(launch, arch):
    compiled = launch.compiled(arch)
    assert compiled.spills == 0
    assert compiled.threads >= 1024
    assert "ld.global.v4.b32" in compiled.ptx
    assert "atom." not in compiled.ptx


@on_each_arch
@pytest.mark.parametrize("launch", by_use(residual.add_up_kernel))
def test_adding_up_compiles_without_a_spill(launch, arch):
    assert launch.compiled(arch).spills == 0


# -- As operators.


@pytest.mark.parametrize("name", ["residual_change", "forecast"])
def test_cuda_has_a_form_of_its_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"para_core::{name}", "CUDA")


def test_the_operators_are_one_full_graph():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x, y):
        return torch.ops.para_core.residual_change(x, y), torch.ops.para_core.forecast(x, [y, y], [2.0, -1.0])

    x, y = normal(2, 9), normal(2, 9, seed=1)
    changed, added = both(x, y)
    torch.testing.assert_close(changed.double(), sums(x, y), rtol=3e-6, atol=0)
    torch.testing.assert_close(added, x + y)
    with FakeTensorMode():
        changed, added = both(*[torch.empty(2, 9, dtype=torch.bfloat16, device="cuda") for _ in range(2)])
    assert (changed.device.type, changed.dtype, changed.shape) == ("cuda", torch.float32, (2, 2))
    assert (added.device.type, added.dtype, added.shape) == ("cuda", torch.bfloat16, (2, 9))


def gpu_forms(x, y):
    return change_on_gpu(x, y), forecast_on_gpu(x, [y] * 4, [0.25] * 4), forecast_on_gpu(x, [y], [2.0])


def test_inputs_that_a_kernel_refuses_use_plain_pytorch(interpreter):
    x, y = normal(2, 9).double(), normal(2, 9, seed=1).double()
    changed, of_four, of_one = interpreter(gpu_forms, x, y)
    torch.testing.assert_close(changed.double(), sums(x, y), rtol=3e-6, atol=0)
    torch.testing.assert_close(of_four, x + y)
    torch.testing.assert_close(of_one, x + 2 * y)


def test_a_gradient_follows_a_forecast():
    entry = normal(3).requires_grad_()
    forecast(entry, [normal(3)], [2.0]).sum().backward()
    assert torch.equal(entry.grad, torch.ones(3))


def test_on_a_gpu_each_is_one_operator():
    x = torch.empty(2, 9, device="meta")
    with torch.profiler.profile(acc_events=True) as profile:
        change(x, x)
        forecast(x, [x], [1.0])
    names = [event.name for event in profile.events() if event.name.startswith("para_core::")]
    assert names == ["para_core::residual_change", "para_core::forecast"]


def test_the_doctests_of_the_reference_hold():
    result = doctest.testmod(import_module("para_core.kernels.residual_reference"))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_decision_launches_2_and_a_forecast_1():
    x = torch.empty(2, 9, device="meta", dtype=torch.bfloat16)
    with torch.no_grad(), RunCounter() as counter:
        rule_of("first_block").sums(x, x)
        forecast(x, [x, x], [2.0, -1.0])
    assert dict(counter.by_operator) == {"para_core::residual_change": 2, "para_core::forecast": 1}


def test_storing_a_residual_launches_1_for_each_stream():
    residuals, streams = Residuals(room=1), [torch.empty(2, 9, device="meta", dtype=torch.bfloat16) for _ in range(2)]
    with torch.no_grad():
        residuals.store(streams, streams, in_graph=False)
        with RunCounter() as counter:
            residuals.store(streams, streams, in_graph=False)
    assert dict(counter.by_operator) == {"sub": 2}
