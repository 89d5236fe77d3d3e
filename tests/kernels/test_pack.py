"""Packing and unpacking, as it is and in 8 bits: kernels and reference are compared with loops over rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core.attention.pack_ops import as_numbers, pack_on_gpu, unpack_on_gpu
from para_core.kernels import pack, pack_reference
from para_core.kernels.pack_reference import LARGEST, SCALE_BYTES, CopyRegion
from tests.kernels.layouts import laid_out

FLOAT8 = torch.float8_e4m3fn
BOTH = pytest.mark.parametrize("by", [pack, pack_reference], ids=["kernel", "reference"])


def spread(shape, dtype, seed=0):
    """Return numbers of very different magnitudes, ``[B, S, H, D]`` in memory. Some become subnormal, and some 0."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return x.clamp(-6e4, 6e4).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def for_ranks(tensors, tokens, heads, eight=None, *, one_table=True, gap=0):
    """Return the regions by which each rank gets some tokens and heads of each tensor, and the size of the buffer."""
    regions, offset = [], gap  # These elements also lie between rows of the buffer.
    token = head = 0
    for num_tokens, num_heads in zip(tokens, heads, strict=True):
        rows = [num_heads * (x.shape[3] + (SCALE_BYTES if eight else 0)) for x in tensors]
        for index, row in enumerate(rows):
            start, step = (offset + sum(rows[:index]), sum(rows) + gap) if one_table else (offset, row + gap)
            regions.append(CopyRegion(index, token, num_tokens, head, num_heads, start, step))
            if not one_table or index == len(rows) - 1:
                offset += num_tokens * tensors[index].shape[0] * step
        token, head = token + num_tokens, head + num_heads
    return regions, offset


def new_buffer(tensors, numel, eight):
    return torch.full((numel,), 7, dtype=torch.uint8 if eight else tensors[0].dtype)


def rounded(rows, eight):
    """Return the bytes of ``rows`` ``[..., D]``, numbers and scale, and the numbers that they stand for."""
    scale = F.pad(rows.float().abs(), (0, 1)).amax(-1, keepdim=True) / LARGEST[eight]
    scale = torch.where(scale == 0, 1.0, scale)
    numbers = rows.float() / scale
    numbers = ((numbers + 0.5).floor() if eight == torch.int8 else numbers).to(eight)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], -1), (numbers.float() * scale).to(rows.dtype)


def one_by_one(tensors, regions, numel, eight):
    """Return the buffer, and the tensors that are read from it, with zeros where no region is."""
    buffer, restored = new_buffer(tensors, numel, eight), [torch.zeros_like(x) for x in tensors]
    for region in regions:
        heads = slice(region.head, region.head + region.heads)
        index = 0
        for token in range(region.token, region.token + region.tokens):
            for sample, into in zip(tensors[region.tensor], restored[region.tensor], strict=True):
                row = read = sample[heads, token]
                if eight and region.heads:
                    row, read = rounded(row, eight)
                start = region.offset + index * region.step
                buffer[start : start + row.numel()] = row.flatten()
                into[heads, token] = read
                index += 1
    return buffer, restored


# The ranks of a case have these tokens and heads. 70 tokens are more than a program copies.
SPLITS = [((3, 2), (2, 3)), ((4, 4, 0), (2, 0, 3)), ((70,), (1,)), ((1, 1, 1, 1), (1, 1, 1, 1)), ((0,), (2,))]
ROWS = [((16, 16, 16), torch.float32), ((3, 0), torch.float16), ((8, 33), torch.bfloat16), ((0,), torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("eight", [None, *LARGEST], ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_every_element_gets_to_its_place_and_back(eight, data):
    (tokens, heads), (widths, dtype) = data.draw(st.sampled_from(SPLITS)), data.draw(st.sampled_from(ROWS))
    batch, first = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    # ``first`` tokens and heads are in no region.
    shape = batch, sum(heads) + first, sum(tokens) + first
    tensors = [spread((*shape, width), dtype, seed) for seed, width in enumerate(widths)]
    tensors[0][1:, :1, :2] = 0
    table = {"one_table": data.draw(st.booleans()), "gap": data.draw(st.integers(0, 2))}
    regions, numel = for_ranks(tensors, tokens, heads, eight, **table)
    regions = [region._replace(token=region.token + first, head=region.head + first) for region in regions]
    expected, expected_read = one_by_one(tensors, regions, numel, eight)
    for by in (pack, pack_reference):
        given_tensors = [data.draw(laid_out(x)) for x in tensors]
        buffer = by.pack(given_tensors, regions, new_buffer(tensors, numel, eight), eight)
        assert torch.equal(buffer, expected)
        into = [data.draw(laid_out(torch.zeros_like(x))) for x in tensors]
        for x, y in zip(by.unpack(buffer, regions, into, eight), expected_read, strict=True):
            bound = torch.finfo(x.dtype).eps if x.dtype == torch.bfloat16 else 0.0  # Triton's interpreter truncates.
            torch.testing.assert_close(x, y, rtol=bound, atol=0)


@BOTH
def test_every_float8_number_equals_pytorch(by):
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(FLOAT8).float().view(1, 1, 1, 256)
    regions, _ = for_ranks([expected], (1,), (1,), FLOAT8)
    buffer = torch.cat([every, torch.tensor([1.0]).view(torch.uint8)])
    (restored,) = by.unpack(buffer, regions, [torch.zeros_like(expected)], FLOAT8)
    torch.testing.assert_close(restored, expected, rtol=0, atol=0, equal_nan=True)
    # 448 is the largest number, so the scale is 1.
    finite = expected.nan_to_num(0.0)
    bits = by.pack([finite], regions, torch.zeros(260, dtype=torch.uint8), FLOAT8)[:256]
    assert torch.equal(bits.view(FLOAT8).float(), finite.flatten())


LEAST = 2.0**-9
# int8 rounds halves upwards, and float8 to even.
HALVES = {
    torch.int8: {127: 127, -127: -127, 2.5: 3, 3.5: 4, -2.5: -2, 0.49: 0, -0.5: 0, -0.51: -1},
    FLOAT8: {448: 448, 17: 16, 19: 20, -17: -16, LEAST / 2: 0, 1.5 * LEAST: 2 * LEAST, -2.5 * LEAST: -2 * LEAST},
}


@BOTH
@pytest.mark.parametrize("eight", LARGEST, ids=str)
def test_halves_are_rounded(by, eight):
    x = torch.tensor([*HALVES[eight]], dtype=torch.float32).view(1, 1, 1, -1)
    regions, numel = for_ranks([x], (1,), (1,), eight)
    buffer = by.pack([x], regions, torch.zeros(numel, dtype=torch.uint8), eight)
    assert buffer[:-4].view(eight).float().tolist() == [*HALVES[eight].values()]


@BOTH
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("position", "eight"), [(0, FLOAT8), (7, torch.int8)], ids=str)
def test_nonfinite_value_makes_its_token_nan(by, bad, position, eight):
    x = spread((1, 2, 5, 16), torch.float16)
    x[0, 1, 2, position] = bad
    regions, numel = for_ranks([x], (5,), (2,), eight)
    buffer = by.pack([x], regions, torch.zeros(numel, dtype=torch.uint8), eight)
    (restored,) = by.unpack(buffer, regions, [torch.zeros_like(x)], eight)
    assert restored[0, 1, 2].isnan().all()
    assert int(restored.isnan().sum()) == 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("eight", [None, *LARGEST], ids=str)
def test_form_of_the_gpu_takes_every_dtype(dtype, eight):
    tensors = [spread((2, 3, 5, width), torch.float32).to(dtype) for width in (16, 24)]
    regions, numel = for_ranks(tensors, (5,), (3,), eight if dtype.itemsize > 1 else None)
    arguments = [eight, dtype] if eight and dtype.itemsize > 1 else [None, None]
    buffer = pack_on_gpu(tensors, as_numbers(regions), numel, arguments[0])
    restored = unpack_on_gpu(buffer, as_numbers(regions), [size for x in tensors for size in x.shape], *arguments)
    expected, expected_read = one_by_one(tensors, regions, numel, arguments[0])
    for x, y in zip([buffer, *restored], [expected, *expected_read], strict=True):
        assert x.dtype == y.dtype
        # NaN is not equal to itself.
        torch.testing.assert_close(x.double(), y.double(), rtol=0.01, atol=0, equal_nan=True)
    assert all(x.transpose(1, 2).is_contiguous() for x in restored)


def test_too_many_tensors_and_too_large_elements_are_refused():
    with pytest.raises(ValueError, match=r"4 tensors; .*3"):
        pack.pack([torch.empty(1, 1, 1, 1)] * 4, [], torch.empty(4))
    with pytest.raises(TypeError, match=r"complex128 .*16"):
        pack.pack([x := torch.empty(1, 1, 1, 1, dtype=torch.complex128)], for_ranks([x], (1,), (1,))[0], x.flatten())
