"""Attention, exact and in 8 bits: kernels and references are compared with the formula in float64."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from benchmarks.harness import fake_group
from para_core import init_context_parallel_mesh
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.spec import AttentionSpec
from para_core.attention.usp import usp_forward
from para_core.distributed.mesh import sequence_mesh
from para_core.kernels import attention_int8
from para_core.kernels import attention_int8_reference as int8_reference
from para_core.kernels import attention_reference as reference
from para_core.kernels.attention import attention
from para_core.kernels.attention_configs import Config, KernelCall
from para_core.kernels.attention_launch import _with_contiguous_rows, empty_outputs, launch_kernel
from para_core.kernels.attention_reference import pack_bits, ranges_of_lengths
from para_core.layout.sequence import even_layout
from tests.kernels.attention_cases import OPTIONS, by_formula, check_lse, error, make, ranges
from tests.kernels.layouts import laid_out
from tests.launches import count_attention

pytestmark = pytest.mark.slow

# This is the error factor of Triton's interpreter, which truncates float32 to bfloat16. A GPU rounds.
BFLOAT16_IS_TRUNCATED = 2.5
BOTH = pytest.mark.parametrize("attend", [attention, reference.attention], ids=["kernel", "reference"])


def check(result: tuple[Tensor, Tensor], tensors: list[Tensor], **options) -> None:
    """Raise unless the result is that of the formula in float64."""
    exact_out, exact_lse = by_formula(*tensors, **options)
    assert error(result[0], exact_out) < 1e-6
    check_lse(result[1], exact_lse, 1e-5)


@BOTH
@pytest.mark.parametrize("kind", OPTIONS)
def test_out_and_lse_equal_float64(kind, attend):
    tensors = make(18, 21, key_heads=1, value_dim=24)
    out, lse = attend(*tensors, **OPTIONS[kind])
    if "finfo" not in kind:
        return check((out, lse), tensors, **OPTIONS[kind])
    # The lse of such a row is its number itself, which is as large as float32 allows.
    exact_out, exact_lse = by_formula(*tensors, **OPTIONS[kind])
    assert error(out, exact_out) < 1e-6
    assert torch.equal(lse > -torch.inf, exact_lse > -torch.inf)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dims", "heads", "shift"),
    [
        # Lengths that are one tile of 16, less, or more.
        *[(1, 1, (16, 16), (1, 1), None), (16, 16, (16, 16), (1, 1), None), (17, 33, (16, 16), (1, 1), None)],
        # Head dims are read in powers of 2, in one block or two.
        *[(5, 18, dims, (2, 1), 13) for dims in ((8, 8), (24, 24), (36, 20), (16, 40), (250, 96))],
        # Neighbouring query heads share a key head.
        *[(3, 17, (16, 16), (6, key_heads), None) for key_heads in (2, 3)],
        # The first query sees keys up to the end of a tile, or not.
        *[(3, 40, (16, 16), (1, 1), shift) for shift in (13, 14, 15, 16)],
    ],
)
@pytest.mark.parametrize("start", [None, 1])
def test_any_shape_equals_float64(num_queries, num_keys, dims, heads, shift, start):
    tensors = make(num_queries, num_keys, dims[0], value_dim=dims[1], batch=1, heads=heads[0], key_heads=heads[1])
    options = {} if shift is None else {"is_causal": True, "query_offset": shift}
    options |= {} if start is None else {"key_ranges": ranges([(start, num_keys)])}
    check(attention(*tensors, **options), tensors, **options)


@pytest.mark.parametrize(("value_dim", "continues"), [(32, False), (32, True), (64, True), (20, True), (48, False)])
def test_wide_values_are_two_halves(value_dim, continues):
    config = Config(16, 16, 4, 1, split_values=True)
    query, key, value = tensors = make(18, 21, 32, value_dim=value_dim)
    so_far, first = (None, None), 0
    if continues:
        so_far, first = attention(query, key[:, :, :8], value[:, :, :8], out_dtype=torch.float32), 8
    rest = key[:, :, first:], value[:, :, first:]
    out, lse = empty_outputs(query, value, torch.float32)
    launch_kernel(config, KernelCall(query, *rest, None, None, *so_far, False, 0, 32**-0.5), out=out, lse=lse)
    check((out, lse), tensors)


@pytest.mark.parametrize("attend", [attention, *(x.attention for x in (attention_int8, reference, int8_reference))])
@pytest.mark.parametrize(("num_queries", "num_keys", "heads"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 4, 0)])
def test_nothing_gives_zeros(num_queries, num_keys, heads, attend):
    out, lse = attend(*make(num_queries, num_keys, dtype=torch.float16, batch=1, heads=heads, key_heads=heads))
    assert out.shape == (1, heads, num_queries, 16) and not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float16, 1.0), (torch.bfloat16, BFLOAT16_IS_TRUNCATED)], ids=str)
@pytest.mark.parametrize("kind", ["bias", "negative scale"])
def test_in_16_bits_the_error_is_not_above_sdpas(dtype, slack, kind):
    tensors = make(18, 21, 32, dtype=dtype, batch=1)
    mask, scale = OPTIONS[kind].get("mask"), OPTIONS[kind].get("scale")
    mask = None if mask is None else mask.to(dtype)
    exact_out, exact_lse = by_formula(*tensors, mask=mask, scale=scale)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=scale)
    out, lse = attention(*tensors, mask=mask, scale=scale)
    # SDPA's result lies like this in memory, too.
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    # Both round the weights once and the result once. Chance makes a difference of 5 %.
    assert error(out, exact_out) <= 1.05 * slack * error(expected, exact_out)
    check_lse(lse, exact_lse, 1e-5)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_continued_ring_equals_all_keys_at_once(is_causal, dtype, attend):
    query, key, value = tensors = make(18, 21, 24, dtype=dtype, batch=1, key_heads=1)
    so_far = None
    for start, end in pairwise([0, 7, 15, 21]):
        part = key[:, :, start:end], value[:, :, start:end]
        out_dtype = dtype if end == 21 else torch.float32
        so_far = attend(query, *part, is_causal=is_causal, key_offset=start, so_far=so_far, out_dtype=out_dtype)
    if dtype == torch.float32:
        return check(so_far, tensors, is_causal=is_causal)
    exact, _ = by_formula(*tensors, is_causal=is_causal)
    assert so_far[0].dtype == dtype
    # Each part has its own maximum, so its weights round in another way: 20 %. Parts in float16 would add 40 %.
    assert error(so_far[0], exact) <= 1.2 * error(attend(*tensors, is_causal=is_causal)[0], exact)


def test_continuing_starts_empty_rows_and_keeps_others():
    query, key, value = tensors = make(18, 21, batch=1)
    # The first queries see the last part.
    later = attention(query, key[:, :, 16:], value[:, :, 16:], is_causal=True, key_offset=16, out_dtype=torch.float32)
    check(attention(query, key[:, :, :16], value[:, :, :16], is_causal=True, so_far=later), tensors, is_causal=True)
    same = attention(*tensors, is_causal=True, key_offset=100, so_far=later)
    torch.testing.assert_close(same, later, rtol=1e-6, atol=1e-6)


@settings(max_examples=8)
@given(data=st.data())
def test_any_strides_are_read(data):
    tensors = make(5, 19, key_heads=1)
    given_tensors = [data.draw(laid_out(x)) for x in tensors]
    sizes = [data.draw(st.sampled_from([1, size])) for size in (2, 2, 5, 19)]
    mask = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
    mask = data.draw(laid_out(mask > 0 if data.draw(st.booleans()) else mask))
    so_far = reference.attention(*tensors)
    given_so_far = [data.draw(laid_out(x)) for x in so_far]
    out, lse = attention(*given_tensors, mask=mask, so_far=given_so_far)
    expected_out, expected_lse = reference.attention(*[x.double() for x in tensors], mask=mask, so_far=so_far)
    assert error(out, expected_out) < 1e-6
    check_lse(lse, expected_lse, 1e-5)
    far_apart = torch.empty_strided((1, 1, 2, 16), (0, 0, 2**24, 1), device="meta")
    assert _with_contiguous_rows(far_apart).is_contiguous()


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (1, {"key_ranges": ranges([(31, 64)])}),
        (18, {"is_causal": True, "query_offset": 40}),
        (18, {"key_ranges": ranges([(3, 17), (33, 80)], [(0, 31), (50, 71)])}),
    ],
)
def test_mask_of_bits_is_that_of_bytes(rows, more):
    tensors = make(18, 80, key_heads=1)
    mask = torch.rand(2, 1, rows, 80, generator=torch.Generator().manual_seed(3)) > 0.5
    # The words have rows of their own in a longer tensor.
    longer = torch.full((2, 1, rows + 1, 9), -1, dtype=torch.int32)
    longer[:, :, 1:, ::3] = pack_bits(mask)
    check(attention(*tensors, mask=longer[:, :, 1:, ::3], **more), tensors, mask=mask, **more)


@pytest.mark.parametrize("name", ["triton_attention", "triton_attention_int8"])
def test_it_is_one_operator_of_a_whole_graph(name):
    operator = getattr(torch.ops.para_core, name).default
    tensors = make(5, 18, dtype=torch.float16, batch=1)
    arguments = (*tensors, None, None, *attention(*tensors, out_dtype=torch.float32), True, 13, 0.25, torch.float32)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), operator(*arguments))


FIVE = make(5, 5)
REFUSED = {
    "head dim": (ValueError, r"head dims .*264 .*264; .*256", make(5, 6, 264), None),
    "heads": (ValueError, r"\[2, 2, 5, 16\], \[2, 3, 6, 16\]", make(5, 6, key_heads=3), None),
    "no batch": (ValueError, r"are \[2, 5, 16\], ", [x[0] for x in FIVE], None),
    "batch": (ValueError, r"\[2, 2, 5, 16\], \[1, 2, 6, 16\]", [FIVE[0], *make(5, 6, batch=1)[1:]], None),
    "no key heads": (ValueError, r"\[2, 0, 6, 16\]", [FIVE[0], *make(5, 6, heads=0, key_heads=0)[1:]], None),
    "number of values": (ValueError, r"\[2, 2, 5, 16\] and \[2, 2, 6, 16\]", [*FIVE[:2], make(5, 6)[2]], None),
    "dtype": (TypeError, "float64", [x.double() for x in FIVE], None),
    "dtypes": (TypeError, "float16", [*FIVE[:2], FIVE[2].half()], None),
    "mask": (ValueError, r"mask is \[5, 5\]", FIVE, torch.ones(5, 5)),
    "mask of fewer keys": (ValueError, r"mask is \[1, 1, 5, 3\]", FIVE, torch.ones(1, 1, 5, 3, dtype=torch.bool)),
    "mask of numbers": (TypeError, "mask is .*uint8", FIVE, torch.ones(1, 1, 5, 5, dtype=torch.uint8)),
    "words of more rows": (ValueError, r"mask is \[1, 1, 6, 1\]", FIVE, torch.ones(1, 1, 6, 1, dtype=torch.int32)),
    "words": (ValueError, r"5 keys; .*1 ", FIVE, torch.ones(1, 1, 5, 5, dtype=torch.int32)),
    "int8, float32": (TypeError, r"query .*torch\.float32; .*float16 .*bfloat16", FIVE, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_call_is_refused(name):
    kind, words, tensors, mask = REFUSED[name]
    with pytest.raises(kind, match=words):
        (attention_int8.attention if "int8" in name else attention)(*tensors, mask=mask)


def test_lengths_of_another_number_of_segments_are_an_error():
    with pytest.raises(ValueError, match=r"lengths .*\[2, 2\] .*3 segments"):
        ranges_of_lengths(torch.tensor([[1, 2], [3, 4]]), [5, 5, 5])


# The kernel and its reference round queries and keys equally. The kernel then rounds weights and the result to float16.
OF_FLOAT16 = 1e-3


def with_outliers(num_queries, num_keys, head_dim=16, **options):
    """Return keys like those of diffusion transformers, in which some channels have a large mean over all tokens."""
    query, key, value = make(num_queries, num_keys, head_dim, dtype=torch.float16, **options)
    far = torch.randn(head_dim, generator=torch.Generator().manual_seed(5)) * (torch.arange(head_dim) % 8 == 0) * 20
    return query, key + far.half(), value


def relative_l1(actual, exact):
    return float((actual.double() - exact).abs().sum() / exact.abs().sum())


# Name: (queries, keys, further sizes). Head dims are read in blocks of at least 32.
SHAPES = {
    "shared key head": (18, 21, {"key_heads": 1}),
    "one key": (5, 1, {}),
    "40 keys": (18, 40, {"batch": 1}),
    "head dim 36, values of 20": (5, 18, {"head_dim": 36, "value_dim": 20}),
    "head dim 96, 6 heads": (3, 17, {"head_dim": 96, "heads": 6, "batch": 1}),
}
KINDS = ("causal, later queries", "bool mask", "bias", "padded segments", "nothing but padding", "negative scale")


@pytest.mark.parametrize(
    ("shape", "kind"), [*[(shape, "plain") for shape in SHAPES], *[("shared key head", kind) for kind in KINDS]]
)
def test_kernel_rounds_as_its_reference_does(shape, kind):
    num_queries, num_keys, sizes = SHAPES[shape]
    query, key, value = tensors = with_outliers(num_queries, num_keys, **sizes)
    query[:, :, 0] = 0
    # Keys whose last dim has another stride are copied.
    key = key.mT.contiguous().mT if shape == "40 keys" else key
    out, lse = attention_int8.attention(query, key, value, **OPTIONS[kind])
    expected, expected_lse = int8_reference.attention(*tensors, **OPTIONS[kind], out_dtype=torch.float32)
    assert out.dtype == torch.float16
    assert error(out, expected.double()) < OF_FLOAT16
    check_lse(lse, expected_lse.double(), 1e-4)


@pytest.mark.parametrize("function", [attention_int8.attention, int8_reference.attention], ids=["kernel", "reference"])
@pytest.mark.parametrize("tensors", [make, with_outliers])
def test_error_is_that_of_8_bits(function, tensors):
    query, key, value = (x.half() for x in tensors(50, 70, 64, batch=1))
    out, lse = function(query, key, value)
    exact, exact_lse = by_formula(query, key, value)
    # The error is a 254th of the largest of 64 numbers, about 2.5 times their size: 0.6 % of a score of size 1.
    assert relative_l1(out, exact) < 0.02
    check_lse(lse, exact_lse, 0.02)
    if tensors is with_outliers and function is int8_reference.attention:
        rough, _ = int8_reference.attention(query, key, value, smooth=False)
        assert relative_l1(rough, exact) > 3 * relative_l1(out, exact)


@pytest.mark.parametrize("is_causal", [False, True])
def test_continued_ring_merges_different_means(is_causal):
    query, key, value = with_outliers(18, 30, 24, batch=1, key_heads=1)
    key[:, :, 12:] += 3
    so_far = expected = None
    for start, end in pairwise([0, 7, 7, 19, 30]):
        part = (query, key[:, :, start:end], value[:, :, start:end])
        options = {"is_causal": is_causal, "query_offset": 12, "key_offset": start, "out_dtype": torch.float32}
        so_far = attention_int8.attention(*part, **options, so_far=so_far)
        expected = int8_reference.attention(*part, **options, so_far=expected)
    exact, exact_lse = by_formula(query, key, value, is_causal=is_causal, query_offset=12)
    assert error(so_far[0], expected[0].double()) < OF_FLOAT16
    assert error(so_far[0], exact) < 0.03
    # Smoothing subtracts a number from the scores that differs between queries. lse is that before smoothing.
    check_lse(so_far[1], exact_lse, 0.05)
    assert exact_lse.std() > 5


# NumPy warns about inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_nonfinite_element_is_seen(bad, which):
    arrays = [*make(5, 18, dtype=torch.float16, batch=1), torch.zeros(1, 2, 5, 18)]
    arrays[which][0, 1, 3, 7] = bad
    out, lse = attention_int8.attention(*arrays[:3], mask=arrays[3] if which == 3 else None)
    assert out[0, 0].isfinite().all()
    assert (out[0, 1] if which == 1 else out[0, 1, 3]).isnan().all()
    assert lse[0, 1, 3].isnan()


def test_call_falls_back_if_gradients_are_saved():
    query, key, value = with_outliers(9, 20, batch=1)

    def call(backend, *, save):
        with fake_group(1), torch.no_grad():
            mesh, options = sequence_mesh(init_context_parallel_mesh("cpu")), AttnOptions(backend=backend)
            layouts = even_layout(9, 1), even_layout(20, 1)
            spec = AttentionSpec(*layouts, mesh, 2, 2, options=options, options_text=options.as_text())
            return usp_forward(AttentionPlan(spec), query, key, value, None, save=save)

    exact, _ = call("triton", save=False)
    assert torch.equal(call("triton-int8", save=False)[0], attention_int8.attention(query, key, value)[0])
    out, saved = call("triton-int8", save=True)
    assert torch.equal(out, exact) and torch.equal(saved.out, exact)
    assert not torch.equal(out, attention_int8.attention(query, key, value)[0])


def test_ring_launches_2_more_for_each_block():
    counter = count_attention(4, 1, device="meta", backend="triton-int8")
    assert counter.by_operator["para_core::triton_attention_int8"] == 3 * 4
    exact = count_attention(4, 1, device="meta", backend="triton")
    assert counter.launches == exact.launches + 2 * 4
