"""Attention with queries and keys in 8 bits: the kernel is compared with its reference, and both with float64 by the
paper's measures.
"""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.attention import low_precision as int8_attention
from benchmarks.harness import fake_group
from para_core import init_context_parallel_mesh
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.backends import LocalAttentionCall
from para_core.attention.local import continued_attention
from para_core.attention.merge import Merged
from para_core.attention.spec import AttentionSpec
from para_core.attention.usp import usp_forward
from para_core.dataclass_json import to_json
from para_core.distributed.mesh import sequence_mesh
from para_core.kernels import attention_int8_reference as reference
from para_core.kernels.attention_int8 import attention, round_keys_kernel
from para_core.layout.sequence import even_layout
from tests.kernels.attention_cases import OPTIONS, by_formula, check_lse, error, make
from tests.kernels.compiled import ARCHS
from tests.kernels.interpreted import interpreted
from tests.kernels.launches import by_use
from tests.launches import count_attention

# The kernel and its reference round queries and keys equally. The kernel then rounds weights and the result to float16.
OF_FLOAT16 = 1e-3
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


def with_outliers(num_queries, num_keys, head_dim=16, **options):
    """Return keys like those of diffusion transformers, in which some channels have a large mean over all tokens."""
    query, key, value = make(num_queries, num_keys, head_dim, dtype=torch.float16, **options)
    far = torch.randn(head_dim, generator=torch.Generator().manual_seed(5)) * (torch.arange(head_dim) % 8 == 0) * 20
    return query, key + far.half(), value


def cosine(actual, exact):
    return float(torch.cosine_similarity(actual.double().flatten(), exact.flatten(), dim=0))


def relative_l1(actual, exact):
    return float((actual.double() - exact).abs().sum() / exact.abs().sum())


SELDOM = {"negative scale", "bool mask of keys", "padded, causal", "causal, earlier queries", "finfo.min"}
KINDS = [
    "plain",
    "causal, later queries",
    "bool mask",
    "bias",
    "padded segments",
    "nothing but padding",
    *sorted(SELDOM),
]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind in SELDOM else []) for kind in KINDS]
)
def test_the_kernel_rounds_as_its_reference_does(kind):
    tensors = with_outliers(18, 21, key_heads=1)
    out, lse = attention(*tensors, **OPTIONS[kind])
    expected, expected_lse = reference.attention(*tensors, **OPTIONS[kind], out_dtype=torch.float32)
    assert out.dtype == torch.float16
    assert error(out, expected.double()) < OF_FLOAT16
    if "finfo" not in kind:
        check_lse(lse, expected_lse.double(), 1e-4)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (36, 20), (96, 96)])
def test_any_head_dim_is_read_in_blocks_of_32(head_dim, value_dim):
    tensors = with_outliers(5, 18, head_dim, value_dim=value_dim, batch=1)
    out, lse = attention(*tensors)
    expected, expected_lse = reference.attention(*tensors, out_dtype=torch.float32)
    assert error(out, expected.double()) < OF_FLOAT16
    check_lse(lse, expected_lse.double(), 1e-4)


def test_grouped_query_heads_share_a_key_head():
    tensors = with_outliers(3, 17, batch=1, heads=6, key_heads=2)
    out, lse = attention(*tensors)
    expected, expected_lse = reference.attention(*tensors, out_dtype=torch.float32)
    assert error(out, expected.double()) < OF_FLOAT16
    check_lse(lse, expected_lse.double(), 1e-4)


@pytest.mark.parametrize("function", [attention, reference.attention])
@pytest.mark.parametrize("tensors", [make, with_outliers])
def test_error_is_that_of_8_bits(function, tensors):
    query, key, value = (x.half() for x in tensors(50, 70, 64, batch=1))
    out, lse = function(query, key, value)
    exact, exact_lse = by_formula(query, key, value)
    # The error is a 254th of the largest of 64 numbers, which is about 2.5 times their size. That is 0.6 % of a factor
    # of each score of size 1.
    assert cosine(out, exact) > 0.9999
    assert relative_l1(out, exact) < 0.02
    check_lse(lse, exact_lse, 0.02)


def test_without_smoothing_outlier_channel_costs_precision():
    tensors = with_outliers(50, 70, 64, batch=1)
    exact, _ = by_formula(*tensors)
    smooth, rough = (reference.attention(*tensors, smooth=smooth)[0] for smooth in (True, False))
    assert relative_l1(rough, exact) > 3 * relative_l1(smooth, exact)


def test_lse_is_that_of_the_scores_before_smoothing():
    # Here smoothing subtracts a large number from the scores, which differs between queries.
    query, key, value = with_outliers(9, 20, 16, batch=1)
    _, lse = attention(query, key, value)
    _, exact = by_formula(query, key, value)
    assert exact.std() > 5
    check_lse(lse, exact, 0.05)


@pytest.mark.parametrize("is_causal", [False, True])
def test_continued_ring_merges_different_means(is_causal):
    query, key, value = with_outliers(18, 30, 24, batch=1, key_heads=1)
    key[:, :, 12:] += 3
    so_far = expected = None
    for start, end in pairwise([0, 7, 19, 30]):
        part = (query, key[:, :, start:end], value[:, :, start:end])
        options = {"is_causal": is_causal, "query_offset": 12, "key_offset": start, "out_dtype": torch.float32}
        so_far = attention(*part, **options, so_far=so_far)
        expected = reference.attention(*part, **options, so_far=expected)
    exact, exact_lse = by_formula(query, key, value, is_causal=is_causal, query_offset=12)
    assert error(so_far[0], expected[0].double()) < OF_FLOAT16
    assert error(so_far[0], exact) < 0.03
    check_lse(so_far[1], exact_lse, 0.05)


# NumPy warns about inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_is_seen(bad, which):
    tensors = make(5, 18, 16, dtype=torch.float16, batch=1)
    tensors[which][0, 1, 3, 7] = bad
    out, lse = attention(*tensors)
    assert out[0, 0].isfinite().all()
    affected = out[0, 1, 3] if which == 0 else out[0, 1]
    assert affected.isnan().all()
    assert lse[0, 1, 3].isnan()


def test_tokens_of_zeros_attend_equally_to_all():
    query, key, value = make(5, 18, 16, dtype=torch.float16, batch=1)
    out, _ = attention(torch.zeros_like(query), key, value)
    assert error(out, value.double().mean(2, keepdim=True).expand_as(out)) < OF_FLOAT16
    same = torch.ones_like(key)
    assert error(attention(query, same, value)[0], value.double().mean(2, keepdim=True).expand_as(out)) < OF_FLOAT16


@pytest.mark.parametrize("keys", [0, 1])
def test_few_keys_or_none(keys):
    query, key, value = make(5, keys, 16, dtype=torch.float16, batch=1)
    out, lse = attention(query, key, value)
    expected = value.expand_as(out) if keys else torch.zeros_like(out)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
    assert ((lse > -torch.inf) == bool(keys)).all()


def test_any_strides_are_read_without_a_copy():
    query, key, value = with_outliers(18, 40, 16, batch=1)
    whole = torch.zeros(1, 2, 50, 40, dtype=torch.float16)
    whole[:, :, 4:44, 10:26] = key
    assert torch.equal(attention(query, whole[:, :, 4:44, 10:26], value)[0], attention(query, key, value)[0])
    other_order = key.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attention(query, other_order, value)[0], attention(query, key, value)[0])


def test_it_is_one_operator_of_a_whole_graph():
    query, key, value = make(5, 18, 16, dtype=torch.float16, batch=1)
    arguments = (query, key, value, None, None, None, None, False, 0, 0.25, torch.float16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.para_core.triton_attention_int8.default, arguments, test_utils=checks)


def test_float32_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"query .*torch\.float32; .*float16 .*bfloat16"):
        attention(*make(5, 6))


# -- Compiled.


@pytest.mark.sample(1)
@pytest.mark.parametrize("launch", by_use(round_keys_kernel))
def test_key_rounding_compiles_without_spills(launch):
    for arch in ARCHS:
        compiled = launch.compiled(arch)
        assert compiled.spills == 0
        assert compiled.threads >= 1024
        assert "ld.global.v4.b32" in compiled.ptx


# -- Among the backends.


def test_int8_is_used_without_gradients_only():
    options = AttnOptions(backend="triton-int8", comm_dtype=torch.float8_e4m3fn, rotate_method="allgather")
    assert options.with_gradients == AttnOptions(backend="triton", rotate_method="allgather")
    exact = AttnOptions(backend="triton")
    assert exact.with_gradients is exact


def test_int8_call_falls_back_if_gradients_are_saved():
    tensors = with_outliers(9, 20, 16, batch=1)
    rounded, exact = (_call(tensors, backend, save=False)[0] for backend in ("triton-int8", "triton"))
    assert torch.equal(rounded, attention(*tensors)[0])
    assert not torch.equal(rounded, exact)
    out, saved = _call(tensors, "triton-int8", save=True)
    assert torch.equal(out, exact)
    assert saved is not None and torch.equal(saved.out, exact)


def _call(tensors, backend, *, save):
    options = AttnOptions(backend=backend)
    with fake_group(1), torch.no_grad():
        mesh = sequence_mesh(init_context_parallel_mesh("cpu"))
        layouts = even_layout(tensors[0].shape[2], 1), even_layout(tensors[1].shape[2], 1)
        spec = AttentionSpec(*layouts, mesh, 2, 2, options=options, options_text=to_json(options))
        return usp_forward(AttentionPlan(spec), *tensors, None, save=save)


@pytest.mark.parametrize("keys", [8, 0])
def test_ring_continues_from_merged_results(keys):
    query, key, value = with_outliers(9, 20, 16, batch=1)
    so_far = Merged()
    for start, end in ((0, keys), (keys, 20)):
        part = key[:, :, start:end], value[:, :, start:end]
        continued_attention(so_far, LocalAttentionCall(query, *part), backend="triton-int8", is_last=end == 20)
    exact, exact_lse = by_formula(query, key, value)
    assert so_far.out.dtype == torch.float16
    assert 1e-4 < error(so_far.out, exact) < 0.03
    check_lse(so_far.lse, exact_lse, 0.05)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_launches_2_more_for_each_block(ranks):
    counter = count_attention(ranks, 1, device="meta", backend="triton-int8")
    assert counter.by_operator["para_core::triton_attention_int8"] == 3 * ranks
    exact = count_attention(ranks, 1, device="meta", backend="triton")
    assert counter.launches == exact.launches + 2 * ranks


def test_benchmark_measures_its_claims():
    # Computed by hand: (1, 0) and (0, 1) have the cosine 0, and lse is off by a half.
    out, exact = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    errors = int8_attention.errors((out, torch.zeros(1)), (exact, torch.full((1,), 0.5, dtype=torch.float64)))
    assert errors == {"cosine": 0.0, "relative L1": 2.0, "RMSE": 1.0, "lse, at most": 0.5}


def test_the_doctests_of_the_reference_hold():
    module = import_module("para_core.kernels.attention_int8_reference")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
