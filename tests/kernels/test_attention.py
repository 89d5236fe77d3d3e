"""The Triton kernel of attention, under Triton's interpreter, compared with the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from para_core.kernels.attention import attention
from para_core.kernels.attention_configs import Config, KernelCall
from para_core.kernels.attention_launch import empty_outputs, launch
from para_core.kernels.attention_reference import pack_bits
from tests.kernels.attention_cases import OPTIONS, by_formula, check_lse, error, make, ranges
from tests.kernels.interpreted import interpreted

pytestmark = pytest.mark.slow

# This is the error factor of Triton's interpreter, which truncates float32 to bfloat16. A GPU rounds.
BFLOAT16_IS_TRUNCATED = 2.5


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


# The other tests cover these cases one by one.
SELDOM = {
    "scale",
    "bool mask of queries",
    "bias of keys",
    "float64 bias",
    "padded alike",
    "padded, causal",
    "causal, far earlier queries",
    "finfo.min of float64",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind in SELDOM else []) for kind in OPTIONS]
)
def test_out_and_lse_equal_float64(kind):
    tensors = make(18, 21, key_heads=1)
    out, lse = attention(*tensors, **OPTIONS[kind])
    exact_out, exact_lse = by_formula(*tensors, **OPTIONS[kind])
    assert error(out, exact_out) < 1e-6
    if "finfo" in kind:  # The lse of such a row is its number itself, which is as large as float32 allows.
        assert torch.equal(lse > -torch.inf, exact_lse > -torch.inf)
    else:
        check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("shift", [13, 14, 15, 16])
def test_tile_is_masked_from_first_hidden_key(shift, start):
    # The first query sees keys up to ``shift``, which is the end of a tile of 16 or not.
    tensors = make(3, 40, batch=1, heads=1, key_heads=1)
    options = {"is_causal": True, "query_offset": shift, "key_ranges": ranges([(start, 40)])}
    out, lse = attention(*tensors, **options)
    exact_out, exact_lse = by_formula(*tensors, **options)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (24, 24), (36, 20), (16, 40)])
def test_any_head_dim_is_read_in_powers_of_2(head_dim, value_dim):
    tensors = make(5, 18, head_dim, value_dim=value_dim, batch=1, heads=2, key_heads=1)
    out, lse = attention(*tensors, is_causal=True, query_offset=13)
    exact_out, exact_lse = by_formula(*tensors, is_causal=True, query_offset=13)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 160, 192, 250, 256])
def test_the_tuned_head_dims_and_those_between_equal_float64(head_dim):
    tensors = make(5, 18, head_dim, batch=1, heads=2, key_heads=1)
    out, lse = attention(*tensors)
    exact_out, exact_lse = by_formula(*tensors)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize(("value_dim", "continues"), [(32, False), (32, True), (64, True), (20, True), (48, False)])
def test_wide_values_are_two_halves(value_dim, continues):
    config = Config(16, 16, 4, 1, split_values=True)
    tensors = make(18, 21, 32, value_dim=value_dim)
    first, rest = (
        ([x[:, :, :8] for x in tensors[1:]], [x[:, :, 8:] for x in tensors[1:]]) if continues else ([], tensors[1:])
    )
    so_far = attention(tensors[0], *first, out_dtype=torch.float32) if continues else (None, None)
    out, lse = empty_outputs(tensors[0], rest[1], torch.float32)
    launch(config, KernelCall(tensors[0], *rest, None, None, *so_far, False, 0, 32**-0.5), out=out, lse=lse)
    exact_out, exact_lse = by_formula(*tensors)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("key_heads", [2, 3])
def test_neighbouring_query_heads_share_a_key_head(key_heads):
    tensors = make(3, 17, batch=1, heads=6, key_heads=key_heads)
    out, lse = attention(*tensors)
    exact_out, exact_lse = by_formula(*tensors)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (16, 16), (17, 33), (1, 48)])
def test_any_length_equals_float64(num_queries, num_keys):
    tensors = make(num_queries, num_keys, batch=1, heads=1, key_heads=1)
    out, lse = attention(*tensors)
    exact_out, exact_lse = by_formula(*tensors)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys", "heads"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 4, 0)])
def test_nothing_gives_zeros(num_queries, num_keys, heads):
    out, lse = attention(*make(num_queries, num_keys, batch=1, heads=heads, key_heads=heads))
    assert out.shape == (1, heads, num_queries, 16) and not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float16, 1.0), (torch.bfloat16, BFLOAT16_IS_TRUNCATED)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "bias", "negative scale"])
def test_in_16_bits_the_error_is_not_above_sdpas(dtype, slack, kind):
    tensors = make(18, 21, 32, dtype=dtype, batch=1)
    mask, scale = OPTIONS[kind].get("mask"), OPTIONS[kind].get("scale")
    mask = None if mask is None else mask.to(dtype)
    exact_out, exact_lse = by_formula(*tensors, mask=mask, scale=scale)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=scale)
    out, lse = attention(*tensors, mask=mask, scale=scale)
    assert out.dtype == dtype
    # Both round the weights once and the result once. Chance makes a difference of 5 %.
    assert error(out, exact_out) <= 1.05 * slack * error(expected, exact_out)
    check_lse(lse, exact_lse, 1e-5)


def in_parts(tensors: list[Tensor], cuts: list[int], **options) -> tuple[Tensor, Tensor]:
    """Call the kernel for each part of the keys. Each call continues the previous one, and the last returns query's
    dtype.
    """
    query, key, value = tensors
    so_far = None
    edges = [0, *cuts, key.shape[2]]
    for start, end in pairwise(edges):
        last = end == key.shape[2]
        so_far = attention(
            query,
            key[:, :, start:end],
            value[:, :, start:end],
            **options,
            key_offset=start,
            so_far=so_far,
            out_dtype=query.dtype if last else torch.float32,
        )
    return so_far


@pytest.mark.parametrize("is_causal", [False, True])
def test_continued_ring_equals_all_keys_at_once(is_causal):
    tensors = make(18, 21, 24, batch=1, key_heads=1)
    out, lse = in_parts(tensors, [7, 15], is_causal=is_causal)
    exact_out, exact_lse = by_formula(*tensors, is_causal=is_causal)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


def test_continuing_rounds_once_as_one_call_does():
    tensors = make(18, 21, 16, dtype=torch.float16, batch=1)
    exact, _ = by_formula(*tensors)
    out, _ = in_parts(tensors, [7, 15])
    assert out.dtype == torch.float16
    # Each part has its own maximum, so its weights round in another way: 20 %. Parts in float16 would add 40 %.
    assert error(out, exact) <= 1.2 * error(attention(*tensors)[0], exact)


def test_continuing_starts_empty_rows_and_keeps_others():
    query, key, value = make(18, 21, batch=1)
    # The first queries see the last part.
    later = attention(query, key[:, :, 16:], value[:, :, 16:], is_causal=True, key_offset=16, out_dtype=torch.float32)
    out, lse = attention(query, key[:, :, :16], value[:, :, :16], is_causal=True, so_far=later)
    exact_out, exact_lse = by_formula(query, key, value, is_causal=True)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)
    same, same_lse = attention(query, key, value, is_causal=True, key_offset=100, so_far=later)
    torch.testing.assert_close(same, later[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(same_lse, later[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("key_offset", [3, 100])
def test_content_of_empty_row_has_no_weight(key_offset):
    query, key, value = make(5, 6, batch=1)
    so_far = torch.ones(1, 2, 5, 16), torch.full((1, 2, 5), -torch.inf)
    out, lse = attention(query, key, value, is_causal=True, key_offset=key_offset, so_far=so_far)
    exact_out, exact_lse = by_formula(query, key, value, is_causal=True, key_offset=key_offset)
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-6)
    check_lse(lse, exact_lse, 1e-5)


@settings(max_examples=6)
@given(
    orders=st.tuples(*[st.permutations([0, 1, 2])] * 3),
    starts=st.tuples(*[st.integers(0, 3)] * 3),
    mask_order=st.permutations([0, 1, 2, 3]),
    is_bool=st.booleans(),
    broadcast=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_strides_are_read_without_a_copy(orders, starts, mask_order, is_bool, broadcast):
    shapes = [(2, 2, 5, 16), (2, 1, 19, 16), (2, 1, 19, 16)]
    tensors = [_lying(shape, (*order, 3), start) for shape, order, start in zip(shapes, orders, starts, strict=True)]
    sizes = [1 if is_broadcast else size for size, is_broadcast in zip((2, 2, 5, 19), broadcast, strict=True)]
    mask = _lying(tuple(sizes), tuple(mask_order), 1)
    mask = mask > 0 if is_bool else mask
    out, lse = attention(*tensors, mask=mask)
    exact_out, exact_lse = by_formula(*tensors, mask=mask)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


def _lying(shape: tuple[int, ...], order: tuple[int, ...], start: int) -> Tensor:
    """Return a tensor whose dims have this order in memory. Each dim is a part of a longer one."""
    longer = torch.randn([shape[dim] + start + 1 for dim in order], generator=torch.Generator().manual_seed(start))
    x = longer.permute([order.index(dim) for dim in range(4)])
    # Take all of the last dim if it has stride 1, because rows may begin anywhere.
    return x[tuple([slice(start, start + size) for size in shape])]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("bool mask", {}),
        ("bool mask of keys", {}),
        ("bool mask", {"is_causal": True, "query_offset": 40}),
        ("bool mask", {"key_ranges": ranges([(3, 17), (33, 80)], [(0, 31), (50, 71)])}),
        ("bool mask of keys", {"key_ranges": ranges([(31, 64)])}),
    ],
)
def test_a_mask_of_bits_is_that_of_bytes(kind, more):
    query, key, value = make(18, 80, key_heads=1)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 1, 1 if "keys" in kind else 18, 80, generator=generator) > 0.5
    words = pack_bits(mask)
    out, lse = attention(query, key, value, mask=words, **more)
    exact_out, exact_lse = by_formula(query, key, value, mask=mask, **more)
    assert error(out, exact_out) < 1e-6
    check_lse(lse, exact_lse, 1e-5)
    # The words have rows of their own in a longer tensor.
    longer = torch.full((2, 1, words.shape[2] + 1, 9), -1, dtype=torch.int32)
    longer[:, :, 1:, ::3] = words
    assert torch.equal(attention(query, key, value, mask=longer[:, :, 1:, ::3], **more)[0], out)


def test_strided_last_dim_is_copied():
    tensors = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in make(5, 18, batch=1)]
    assert error(attention(*tensors)[0], by_formula(*tensors)[0]) < 1e-6


def test_it_is_one_operator_of_a_whole_graph():
    query, key, value = make(5, 18, batch=1)
    so_far = attention(query, key, value, out_dtype=torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def step(query, key, value, out, lse):
        return attention(query, key, value, is_causal=True, query_offset=13, so_far=(out, lse))

    expected = step(query, key, value, *so_far)
    outputs = torch.compile(step, backend=backend, fullgraph=True)(query, key, value, *so_far)
    assert len(graphs) == 1
    assert [name for name in graphs[0] if "getitem" not in name] == ["para_core.triton_attention.default"]
    torch.testing.assert_close(outputs, expected)
    arguments = (query, key, value, None, None, *so_far, False, 0, 0.25, torch.float16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.para_core.triton_attention.default, arguments, test_utils=checks)


def test_what_it_does_not_take_is_said():
    query, key, value = make(5, 6, 264)
    with pytest.raises(ValueError, match=r"head dims .*264 .*264; .*256"):
        attention(query, key, value)
    query, key, value = make(5, 6, 16, key_heads=3)
    with pytest.raises(ValueError, match=r"\[2, 2, 5, 16\], \[2, 3, 6, 16\]"):
        attention(query, key, value)
    with pytest.raises(TypeError, match="float64"):
        attention(query.double(), key.double(), value.double())
    with pytest.raises(ValueError, match=r"mask is \[5, 5\]"):
        attention(query, query, query, mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match=r"5 keys; .*1 "):
        attention(query, query, query, mask=torch.ones(1, 1, 5, 5, dtype=torch.int32))
