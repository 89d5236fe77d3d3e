"""The kernels of merging, residuals and group norms, and their references, are compared with formulas in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from para_core.attention.merge import merge_on_gpu, merge_on_gpu_in_place
from para_core.cache.residual_operators import change_on_gpu, forecast_on_gpu
from para_core.kernels import merge, merge_reference, norm, norm_reference, residual, residual_reference
from para_core.spatial.norm import moments_on_gpu, normalized_on_gpu
from tests.kernels.layouts import laid_out, normal

pytestmark = pytest.mark.slow

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = residual.BLOCK * residual.BLOCKS_PER_CHUNK


def partial_results(shape, dtype=torch.float32, seed=0):
    """Return two sides. Rows 0 to 3 saw no key, only keys of a, only keys of b, and keys of very different scores."""
    outs = [normal(*shape, dtype=dtype, seed=seed + side) for side in range(2)]
    lses = [3 * normal(*shape[:3], seed=seed + side + 2) for side in range(2)]
    lses[0][:, :, 3:4] *= 1e4
    for row, sides in enumerate([(0, 1), (1,), (0,)][: shape[2]]):
        for side in sides:
            outs[side][:, :, row] = 0
            lses[side][:, :, row] = -torch.inf
    return outs[0], lses[0], outs[1], lses[1]


def exact_merge(out_a, lse_a, out_b, lse_b):
    """Return softmax over the union: each side is one key with its lse as score and its out as value."""
    weights = torch.softmax(torch.stack([lse_a, lse_b]), 0).nan_to_num(0.0)[..., None]
    return weights[0] * out_a + weights[1] * out_b, torch.logaddexp(lse_a, lse_b)


def far_from_zero(shape, dtype=torch.float32, last=False):
    x = normal(*shape, dtype=dtype, mean={torch.float32: 1e4, torch.bfloat16: 1e3, torch.float16: 300.0}[dtype])
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return [x.to(memory_format=formats[x.ndim]) if last else x]


WEIGHTS = [3.1, -3.2, 1.1]


def forecast_by(module):
    return lambda entry, *residuals: module.forecast(entry, residuals, WEIGHTS[: len(residuals)])


def several(count, shape, dtype=torch.float32):
    return [normal(*shape, dtype=dtype, seed=seed) for seed in range(count)]


# By name: the kernel, its reference, the formula, inputs by shape and dtype, and shapes that reach each branch.
FUNCTIONS = {
    "merge": (
        merge.merge,
        merge_reference.merge,
        exact_merge,
        partial_results,
        [(1, 1, 1, 1), (2, 3, 37, 20), (1, 2, 65, 64), (1, 1, 33, 300), (0, 2, 4, 8), (1, 2, 4, 0)],
    ),
    "change": (
        residual.change,
        residual_reference.change,
        lambda now, before: torch.stack([(now - before).abs().sum(-1), before.abs().sum(-1)], dim=-1),
        partial(several, 2),
        # Less than a block, less than a chunk, one chunk, and one more than some chunks.
        [(2, 1), (2, residual.BLOCK + 1), (2, CHUNK), (2, 3 * CHUNK + 1), (0, 5), (2, 0)],
    ),
    **{
        f"forecast of {count}": (
            forecast_by(residual),
            forecast_by(residual_reference),
            lambda entry, *residuals: entry + sum(w * x for w, x in zip(WEIGHTS, residuals, strict=False)),
            partial(several, count + 1),
            [(1,), (2, 700, 3), (0, 5)],
        )
        for count in (1, 2, 3)
    },
    **{
        f"moments{name}": (
            lambda x: norm.moments(x, 2),
            lambda x: norm_reference.moments(x, 2),
            lambda x: torch.stack(torch.var_mean(x.reshape(x.shape[0], 2, -1), -1, correction=0)),
            partial(far_from_zero, last=bool(name)),
            [(2, 6, 5, 7), (1, 12, 2, 3, 5), (1, 4, 1, 1), *([(1, 2, 180, 131)] if name else [])],
        )
        for name in ("", ", channels last")
    },
}


def check(name, actual, inputs, tolerance=3e-6):
    """Raise unless the results have one rounding to their dtype. Triton's interpreter truncates to 16 bits."""
    exact = FUNCTIONS[name][2](*[x.double() for x in inputs])
    for x, y in zip(*[(z,) if isinstance(z, Tensor) else z for z in (actual, exact)], strict=True):
        rounding = 0.0 if x.dtype in (torch.float32, torch.float64) else torch.finfo(x.dtype).eps
        assert x.shape == y.shape
        # float32 sums round each addition, of terms that may cancel.
        torch.testing.assert_close(x.double(), y, rtol=rounding + tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in FUNCTIONS for shape in FUNCTIONS[name][4]])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernel_and_reference_equal_float64(name, shape, dtype):
    kernel, reference, _, inputs_of, _ = FUNCTIONS[name]
    inputs = inputs_of(shape, dtype)
    actual = kernel(*inputs)
    check(name, actual, inputs)
    is_stored = name == "merge" or "forecast" in name
    assert (actual[0] if name == "merge" else actual).dtype == (dtype if is_stored else torch.float32)
    if dtype == torch.float32 or "moments" in name:
        check(name, reference(*inputs), inputs, tolerance=1e-4)


@pytest.mark.parametrize("name", ["merge", "change", "forecast of 3", "moments"])
@settings(max_examples=8)
@given(data=st.data())
def test_any_strides_are_read(name, data):
    shape = {"merge": (2, 3, 5, 9), "change": (3, 37)}.get(name, (2, 4, 3, 5))
    kernel, _, _, inputs_of, _ = FUNCTIONS[name]
    inputs = inputs_of(shape)
    given_inputs = [data.draw(laid_out(x)) for x in inputs]
    check(name, kernel(*given_inputs), inputs)
    if name == "merge":
        merged = merge.merge(*given_inputs, into=(given_inputs[0], given_inputs[1]))
        assert merged[0] is given_inputs[0] and merged[1] is given_inputs[1]
        check(name, merged, inputs)


def test_same_numbers_give_the_same_bits_in_every_batch():
    now, before = normal(1, 2 * CHUNK + 5), normal(1, 2 * CHUNK + 5, seed=1)
    batch = residual.change(torch.cat([before, now]), torch.cat([now, before]))
    assert torch.equal(residual.change(now, before)[0], batch[1])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_element_is_seen_where_it_is(bad):
    now, before = normal(2, 100), normal(2, 100, seed=1)
    now[1, 99] = bad
    changed = residual.change(now, before)
    assert changed[0].isfinite().all() and not changed[1, 0].isfinite()
    x = normal(1, 4, 6, 10)
    x[0, 0, 5, 9] = bad
    (normalized,) = normalized_by_ranks(norm, [x], 2, None, None, 1e-5)
    assert normalized[:, :2].isnan().all() and normalized[:, 2:].isfinite().all()
    sides = partial_results((1, 1, 2, 4))
    sides[1][0, 0, 1], sides[3][0, 0, 1] = bad, -torch.inf
    for merged in merge.merge(*sides):
        assert not merged[0, 0, 0].isnan().any() and merged[0, 0, 1].isnan().all()


@pytest.mark.parametrize("name", ["change", "moments", "moments, channels last"])
def test_more_chunks_than_a_block_holds_are_added_in_rounds(name, monkeypatch):
    for module in (residual, norm):
        monkeypatch.setattr(module, "BLOCK", 16)
        monkeypatch.setattr(module, "BLOCKS_PER_CHUNK", 1)
    kernel, _, _, inputs_of, _ = FUNCTIONS[name]
    inputs = inputs_of((1, 4, 19, 17) if name.startswith("moments") else (2, 16 * 40 + 3))
    check(name, kernel(*inputs), inputs)


@pytest.mark.parametrize(("residuals", "weights"), [(4, 4), (2, 1), (1, 2), (0, 0)])
def test_other_numbers_of_residuals_or_weights_are_refused(residuals, weights):
    with pytest.raises(ValueError, match=rf"{residuals} residuals and {weights} weights; .*3"):
        residual.forecast(torch.empty(1), [torch.empty(1)] * residuals, [1.0] * weights)


def normalized_by_ranks(kernels, parts, groups, weight, bias, eps):
    """Return the norm of ``parts``, each of which one rank holds."""
    of_ranks = torch.stack([kernels.moments(x, groups) for x in parts])
    rows = torch.tensor([float(x.shape[2]) for x in parts])
    return [kernels.normalize(x, of_ranks, rows / rows.sum(), groups, weight, bias, eps) for x in parts]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("dtype", "mean"), [*[(dtype, 0.0) for dtype in FLOATS], (torch.float32, 100.0)])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_norm_over_ranks_equals_float64(dtype, mean, order, affine):
    parts = [normal(1, 34, rows, 3, dtype=dtype, mean=mean, seed=rows).to(memory_format=order) for rows in (3, 2)]
    weight = normal(34, dtype=dtype, seed=7) if affine != "none" else None
    bias = normal(34, dtype=dtype, seed=8) if affine == "both" else None
    affine = [x if x is None else x.double() for x in (weight, bias)]
    exact = F.group_norm(torch.cat(parts, 2).double(), 2, *affine, 1e-6)
    actual, own = (normalized_by_ranks(kernels, parts, 2, weight, bias, 1e-6) for kernels in (norm, norm_reference))
    error, own_error = ((torch.cat(y, 2).double() - exact).norm() / exact.norm() for y in (actual, own))
    assert all(y.dtype == dtype and y.stride() == part.stride() for y, part in zip(actual, parts, strict=True))
    # The interpreter truncates to 16 bits where a GPU rounds. float32 numbers near 100 have lost two digits.
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert own_error < max(bound, mean * 1e-6)
    assert error < max(bound, 2 * own_error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_form_of_the_gpu_takes_what_a_kernel_refuses(dtype):
    x, y = normal(2, 9).to(dtype), normal(2, 9, seed=1).to(dtype)
    check("change", change_on_gpu(x, y), [x, y])
    torch.testing.assert_close(forecast_on_gpu(x, [y] * 4, [0.25] * 4), x + y)
    torch.testing.assert_close(forecast_on_gpu(x, [y], [2.0]), x + 2 * y)
    sides = [x.to(dtype) for x in partial_results((1, 2, 5, 8))]
    check("merge", merge_on_gpu(*sides), sides)
    originals = [x.clone() for x in sides]
    merge_on_gpu_in_place(*sides)
    check("merge", sides[:2], originals)
    image, weight = normal(1, 4, 6, 10, mean=3.0).to(dtype), normal(4).to(dtype)
    normalized = normalized_on_gpu(image, moments_on_gpu(image, 2)[None], torch.ones(1), 2, weight, None, 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(normalized, F.group_norm(image, 2, weight), rtol=tolerance, atol=tolerance)
