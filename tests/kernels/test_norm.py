"""The kernels of a group norm over rows: interpreted and compared with float64, compiled for every GPU, and used as
operators.
"""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.harness import fake_group
from para_core.kernels import norm, norm_reference
from para_core.recorder.run_counter import RunCounter
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.norm import moments_on_gpu, normalized_on_gpu
from tests.kernels.launches import by_use, on_each_arch
from tests.pairwise import long_beyond_pairs

pytestmark = pytest.mark.slow

CHUNK = norm.BLOCK * norm.STEPS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def image(*shape, dtype=torch.float32, mean=0.0, seed=0, last=False):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.ndim]) if last else x


def exact_moments(x, groups):
    grouped = x.double().reshape(x.shape[0], groups, -1)
    return torch.stack(torch.var_mean(grouped, -1, correction=0))


def normalized_by_ranks(parts, groups, weight, bias, eps, kernels):
    """Return the norm of ``parts``, each of which one rank holds."""
    of_ranks = torch.stack([kernels.moments(x, groups) for x in parts])
    rows = torch.tensor([float(x.shape[2]) for x in parts])
    return [kernels.normalized(x, of_ranks, rows / rows.sum(), groups, weight, bias, eps) for x in parts]


def with_kernels(*args):
    return normalized_by_ranks(*args, norm)


# -- Interpreted.


@pytest.mark.parametrize(
    ("shape", "dtype", "last"),
    long_beyond_pairs([(2, 6, 5, 7), (1, 12, 2, 3, 5), (1, 4, 1, 1), (1, 2, 180, 131)], DTYPES, [False, True]),
)
def test_moments_are_those_of_float64(interpreter, shape, dtype, last):
    x = image(*shape, dtype=dtype, last=last)
    actual = interpreter(norm.moments, x, 2)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact_moments(x, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mean", [30.0, 1e4])
@pytest.mark.parametrize("last", [False, True])
def test_far_from_zero_nothing_cancels(interpreter, mean, last):
    x = image(1, 4, 80, 70, mean=mean, last=last)
    actual, exact = interpreter(norm.moments, x, 2), exact_moments(x, 2)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("of_values", "last", "affine"),
    long_beyond_pairs(
        [*[(dtype, 0.0) for dtype in DTYPES], (torch.float32, 100.0)], [False, True], ["both", "weight", "none"]
    ),
)
def test_norm_over_ranks_equals_float64(interpreter, of_values, last, affine):
    dtype, mean = of_values
    parts = [image(1, 34, rows, 3, dtype=dtype, mean=mean, seed=rows, last=last) for rows in (3, 2)]
    weight = image(34, dtype=dtype, seed=7) if affine != "none" else None
    bias = image(34, dtype=dtype, seed=8) if affine == "both" else None
    actual = interpreter(with_kernels, parts, 17, weight, bias, 1e-6)
    x = torch.cat(parts, 2)
    exact = F.group_norm(x.double(), 17, *[y if y is None else y.double() for y in (weight, bias)], 1e-6)
    own = torch.cat(normalized_by_ranks(parts, 17, weight, bias, 1e-6, norm_reference), 2)
    error, own_error = ((y.double() - exact).norm() / exact.norm() for y in (torch.cat(actual, 2), own))
    assert all(y.dtype == dtype and y.stride() == part.stride() for y, part in zip(actual, parts, strict=True))
    # The interpreter truncates to 16 bits where a GPU rounds. float32 numbers near 100 have lost two digits.
    assert error < max({torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], 2 * own_error)


def test_a_view_that_is_not_evenly_spaced_is_copied(interpreter):
    x = image(1, 4, 6, 10)
    assert torch.equal(interpreter(moments_of_part, x), interpreter(norm.moments, x[:, :, :, 2:8].contiguous(), 2))


def moments_of_part(x):
    return norm.moments(x[:, :, :, 2:8], 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_elements_stay_in_their_group(interpreter, bad):
    x = image(1, 4, 6, 10)
    x[0, 0, 5, 9] = bad
    (actual,) = interpreter(with_kernels, [x], 2, None, None, 1e-5)
    assert actual[:, :2].isnan().all()
    assert actual[:, 2:].isfinite().all()


def test_no_sample_gives_no_sample(interpreter):
    assert interpreter(norm.moments, torch.empty(0, 4, 2, 2), 2).shape == (2, 0, 2)
    (actual,) = interpreter(with_kernels, [torch.empty(0, 4, 2, 2)], 2, None, None, 1e-5)
    assert actual.shape == (0, 4, 2, 2)


def by_operators(x, weight):
    """Normalize with the GPU form of both operators on one rank."""
    return normalized_on_gpu(x, moments_on_gpu(x, 2)[None], torch.ones(1), 2, weight, None, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_accept_inputs_that_kernels_refuse(interpreter, dtype):
    x, weight = image(1, 4, 6, 10, mean=3.0).to(dtype), torch.rand(4, dtype=dtype)
    actual = interpreter(by_operators, x, weight)
    exact = F.group_norm(x.double(), 2, weight.double())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


# -- Compiled.


@pytest.mark.sample(3)
@on_each_arch
@pytest.mark.parametrize("launch", by_use(norm.moments_kernel, norm.merge_kernel, norm.normalize_kernel))
def test_every_launch_compiles_without_a_spill(launch, arch):
    compiled = launch.compiled(arch)
    assert compiled.spills == 0
    if launch.kernel is not norm.merge_kernel:
        # In 16 bits these are 8 elements at once.
        assert "ld.global.v4.b32" in compiled.ptx


# -- Counted.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("ranks", [2, 8])
def test_group_norm_over_rows_launches_4(ranks, last, dtype):
    import torch.distributed as dist

    with fake_group(ranks), torch.no_grad(), SpatialShardMode(dist.group.WORLD) as mode:
        # Meta tensors represent those of CUDA.
        x = mode.shard(torch.empty(1, 64, 32, 6, dtype=dtype, device="meta"))
        x = x.to(memory_format=torch.channels_last) if last else x
        weight = torch.empty(64, dtype=dtype, device="meta")
        # The first call makes the table of shares.
        F.group_norm(x, 32, weight, weight)
        with RunCounter() as counter:
            y = F.group_norm(x, 32, weight, weight)
    assert y.shape == x.shape and y.dtype == dtype and y.stride() == x.stride()
    # Plain operators need 20 launches in float32 and 27 in 16 bits.
    assert counter.launches == 4, str(counter)
