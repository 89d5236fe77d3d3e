"""Packing and unpacking in 8 bits: with the bits of PyTorch, compiled for every GPU, and used as operators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core.attention.pack_ops import as_numbers, pack_on_gpu, unpack_on_gpu
from para_core.kernels import pack, pack_reference
from para_core.kernels.pack_reference import SCALE_BYTES, CopyRegion
from para_core.recorder.run_counter import RunCounter
from tests.kernels.launches import by_use, on_each_arch
from tests.kernels.test_pack import for_ranks
from tests.pairwise import long_beyond_pairs

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
FORMATS = pytest.mark.parametrize("eight", [torch.int8, FLOAT8], ids=str)


def row_bytes(head_dim):
    return head_dim + SCALE_BYTES


def spread(shape, dtype, seed=0):
    """Return numbers of very different magnitudes, ``[B, S, H, D]`` in memory. Some become subnormal, and some 0."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return x.clamp(-6e4, 6e4).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def whole(x):
    """Return one region that covers ``x``, and the bytes of the buffer."""
    row = x.shape[1] * row_bytes(x.shape[3])
    return [CopyRegion(0, 0, x.shape[2], 0, x.shape[1], 0, row)], x.shape[0] * x.shape[2] * row


def rows_of(x, buffer):
    """Return the packed numbers ``[B, H, S, D]`` as bits, and the scales ``[B, H, S]`` of all of ``x``."""
    batch, heads, tokens, width = x.shape
    rows = buffer.view(tokens, batch, heads, width + 4).permute(1, 2, 0, 3)
    return rows[..., :width].contiguous(), rows[..., width:].contiguous().view(torch.float32)[..., 0]


def packed(tensors, regions, numel, eight=FLOAT8, *, by=pack_reference.pack):
    return by(tensors, regions, torch.full((numel,), 7, dtype=torch.uint8), eight)


def unpacked(buffer, regions, shapes, dtype, eight=FLOAT8, *, by=pack_reference.unpack):
    return by(buffer, regions, [torch.zeros(shape, dtype=dtype) for shape in shapes], eight)


def alike(actual, expected):
    """Raise if the tensors differ by more than the truncation to bfloat16 of Triton's interpreter."""
    bound = torch.finfo(actual.dtype).eps if actual.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(actual, expected, rtol=bound, atol=0, equal_nan=True)


# -- Correct results.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("eight", "largest"), [(torch.int8, 127), (FLOAT8, 448)], ids=str)
def test_largest_element_becomes_largest_number(eight, largest, dtype):
    x = spread((2, 3, 5, 16), dtype)
    x[1, 2, 3] = 0
    regions, numel = whole(x)
    buffer = packed([x], regions, numel, eight)
    bits, scales = rows_of(x, buffer)
    expected = x.float().abs().amax(-1) / largest
    expected[1, 2, 3] = 1
    assert torch.equal(scales, expected)
    numbers = x.float() / expected[..., None]
    numbers = (numbers + 0.5).floor() if eight == torch.int8 else numbers
    assert torch.equal(bits, numbers.to(eight).view(torch.uint8))
    (restored,) = unpacked(buffer, regions, [x.shape], dtype, eight)
    assert torch.equal(restored, (bits.view(eight).float() * expected[..., None]).to(dtype))


@FORMATS
@given(
    shape=st.tuples(*[st.integers(0, 5)] * 3, st.integers(1, 9)),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_round_trip_is_within_rounding(eight, shape, exponent, dtype):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2.0**exponent).to(dtype)
    regions, numel = whole(x)
    buffer = torch.ops.para_core.pack([x], as_numbers(regions), numel, eight)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (numel,))
    (read,) = torch.ops.para_core.unpack(buffer, as_numbers(regions), list(shape), eight, dtype)
    assert (read.shape, read.dtype, read.transpose(1, 2).is_contiguous()) == (x.shape, dtype, True)
    if x.numel():
        largest, restored, exact = x.abs().amax(3, keepdim=True).float(), read.float(), x.float()
        # The error bound of a float is an eighth of its power of two, and at least its smallest number. That of an
        # integer is a half.
        bound = largest / 254 if eight == torch.int8 else exact.abs() / 16 + largest * 2.0**-10
        assert ((restored - exact).abs() <= 1.01 * bound + exact.abs() * torch.finfo(torch.bfloat16).eps).all()


# -- Interpreted.

SPLITS = [((3, 2), (2, 3)), ((4, 4, 0), (2, 0, 3)), ((70,), (1,)), ((1, 1, 1, 1), (1, 1, 1, 1))]


def boxes_for_ranks(tensors, tokens, heads, *, one_table):
    """Return the regions of :func:`for_ranks` for rows in 8 bits."""
    wide = [x.new_empty(*x.shape[:3], row_bytes(x.shape[3])) for x in tensors]
    return for_ranks(wide, tokens, heads, one_table=one_table)


@pytest.mark.parametrize(
    ("eight", "one_table", "split", "rows"),
    long_beyond_pairs(
        [torch.int8, FLOAT8],
        [False, True],
        SPLITS,
        [((16, 16, 16), torch.float32), ((3,), torch.float16), ((8, 33), torch.bfloat16)],
    ),
)
def test_both_ways_give_the_bits_of_pytorch(interpreter, rows, split, one_table, eight):
    (tokens, heads), (widths, dtype) = split, rows
    shapes = [(2, sum(heads), sum(tokens), width) for width in widths]
    tensors = [spread(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    regions, numel = boxes_for_ranks(tensors, tokens, heads, one_table=one_table)
    tensors[0][1, 0, 0] = 0
    expected = packed(tensors, regions, numel, eight)
    assert torch.equal(interpreter(packed, tensors, regions, numel, eight, by=pack.pack), expected)
    restored = interpreter(unpacked, expected, regions, shapes, dtype, eight, by=pack.unpack)
    for x, y in zip(restored, unpacked(expected, regions, shapes, dtype, eight), strict=True):
        alike(x, y)


@given(data=st.data())
def test_any_strides_are_packed_and_gaps_kept(interpreter, data):
    shape = data.draw(st.tuples(*[st.integers(1, top) for top in (2, 4, 5, 6)]))
    order, step = data.draw(st.permutations(range(4))), data.draw(st.integers(1, 2))
    memory = torch.empty([shape[dim] * step for dim in order]).permute([order.index(dim) for dim in range(4)])
    x = memory[::step, ::step, ::step, ::step].copy_(spread(shape, torch.float32))
    head, token = data.draw(st.integers(0, shape[1] - 1)), data.draw(st.integers(0, shape[2] - 1))
    tokens, heads = shape[2] - token, shape[1] - head
    row = heads * row_bytes(shape[3]) + data.draw(st.integers(0, 2))
    regions = [CopyRegion(0, token, tokens, head, heads, data.draw(st.integers(0, 3)), row)]
    numel = regions[0].offset + shape[0] * tokens * row
    buffer = packed([x], regions, numel)
    assert torch.equal(interpreter(packed, [x], regions, numel, by=pack.pack), buffer)
    (restored,) = interpreter(pack.unpack, buffer, regions, [x.clone().zero_()], FLOAT8)
    (expected,) = pack_reference.unpack(buffer, regions, [x.clone().zero_()], FLOAT8)
    assert torch.equal(restored, expected)


def test_every_8_bit_number_equals_pytorch(interpreter):
    every = torch.arange(256, dtype=torch.uint8)
    buffer = torch.cat([every, torch.tensor([1.0]).view(torch.uint8)])
    expected = every.view(torch.float8_e4m3fn).float().view(1, 1, 1, 256)
    regions, numel = whole(expected)
    (restored,) = interpreter(unpacked, buffer, regions, [expected.shape], torch.float32, by=pack.unpack)
    torch.testing.assert_close(restored, expected, rtol=0, atol=0, equal_nan=True)
    # 448 is the largest number, so the scale is 1.
    finite = expected.nan_to_num(0.0)
    bits, _ = rows_of(finite, interpreter(packed, [finite], regions, numel, by=pack.pack))
    assert torch.equal(bits.view(torch.float8_e4m3fn).float(), finite)


def test_integer_halves_round_upwards(interpreter):
    x = torch.tensor([127.0, -127.0, 2.5, 3.5, -2.5, 0.49, -0.5, -0.51]).view(1, 1, 1, 8)
    regions, numel = whole(x)
    bits, _ = rows_of(x, interpreter(packed, [x], regions, numel, torch.int8, by=pack.pack))
    assert bits.view(torch.int8).flatten().tolist() == [127, -127, 3, 4, -2, 0, 0, -1]


def test_float8_halves_round_to_even(interpreter):
    least = 2.0**-9
    x = torch.tensor([448.0, 17.0, 19.0, -17.0, least / 2, 1.5 * least, -2.5 * least, 0.4 * least]).view(1, 1, 1, 8)
    bits, _ = rows_of(x, interpreter(packed, [x], *whole(x), by=pack.pack))
    rounded = bits.view(torch.float8_e4m3fn).float().flatten()
    assert rounded.tolist() == [448.0, 16.0, 20.0, -16.0, 0.0, 2 * least, -2 * least, 0.0]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("position", "eight"), [(0, FLOAT8), (7, torch.int8)], ids=str)
def test_nonfinite_value_makes_its_token_nan(interpreter, bad, position, eight):
    x = spread((1, 2, 5, 16), torch.float16)
    x[0, 1, 2, position] = bad
    regions, numel = whole(x)
    given_x = [x], regions, numel, eight
    for buffer in packed(*given_x), interpreter(packed, *given_x, by=pack.pack):
        read = regions, [x.shape], torch.float16, eight
        for (restored,) in unpacked(buffer, *read), interpreter(unpacked, buffer, *read, by=pack.unpack):
            assert restored[0, 1, 2].isnan().all()
            assert int(restored.isnan().sum()) == 16


def gpu_forms(x, numbers, numel, eight):
    buffer = pack_on_gpu([x], numbers, numel, eight)
    return buffer, *unpack_on_gpu(buffer, numbers, list(x.shape), eight, x.dtype)


@FORMATS
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_cuda_form_computes_every_dtype(interpreter, dtype, eight):
    x = spread((1, 2, 5, 16), dtype)
    regions, numel = whole(x)
    buffer, restored = interpreter(gpu_forms, x, as_numbers(regions), numel, eight)
    expected = packed([x], regions, numel, eight)
    assert torch.equal(buffer, expected)
    alike(restored, unpacked(expected, regions, [x.shape], dtype, eight)[0])


def test_empty_tensors_are_not_rounded(interpreter):
    for shape in [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)]:
        x = torch.empty(shape)
        assert interpreter(packed, [x], *whole(x), by=pack.pack).shape == (0,)


def test_too_many_tensors_for_a_launch_are_refused():
    with pytest.raises(ValueError, match=r"4 tensors; .*3"):
        pack.pack([torch.empty(1, 1, 1, 1)] * 4, [], torch.empty(4, dtype=torch.uint8), FLOAT8)


# -- Compiled.


@pytest.mark.sample(2)
@on_each_arch
@pytest.mark.parametrize("launch", by_use(pack.pack_kernel, rounded=True))
def test_every_launch_compiles_without_spills(launch, arch):
    compiled = launch.compiled(arch)
    assert compiled.spills == 0
    assert compiled.threads >= 1024
    assert "e4m3" not in compiled.ptx
    # These are 16 bytes of numbers at once, and 4 bytes of the packed row, which has a scale after it.
    assert ("ld.global.v4.b32" if "unpack" not in launch.name else "st.global.v4.b32") in compiled.ptx
    assert ("st.global.b32" if "unpack" not in launch.name else "ld.global.b32") in compiled.ptx


# -- As operators.


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_cuda_has_a_form_of_its_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"para_core::{name}", "CUDA")


@FORMATS
def test_packing_is_one_launch_in_a_whole_graph(eight):
    tensors = [spread((2, 4, 6, 8), torch.bfloat16, seed) for seed in range(2)]
    regions, numel = boxes_for_ranks(tensors, (3, 3), (2, 2), one_table=True)
    numbers, shapes = as_numbers(regions), [size for x in tensors for size in x.shape]

    def there_and_back(x, y):
        buffer = torch.ops.para_core.pack([x, y], numbers, numel, eight)
        return buffer, *torch.ops.para_core.unpack(buffer, numbers, shapes, eight, x.dtype)

    on_meta = [x.to("meta") for x in tensors]
    with RunCounter() as counter:
        there_and_back(*on_meta)
    assert dict(counter.by_operator) == {"para_core::pack": 1, "para_core::unpack": 1}

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    buffer, *restored = compiled(*tensors)
    assert torch.equal(buffer, packed(tensors, regions, numel, eight))
    expected = unpacked(buffer, regions, [x.shape for x in tensors], torch.bfloat16, eight)
    for x, y in zip(restored, expected, strict=True):
        assert torch.equal(x[:, :2, :3], y[:, :2, :3])
        assert torch.equal(x[:, 2:, 3:], y[:, 2:, 3:])
    with FakeTensorMode():
        buffer, *restored = compiled(*[torch.empty(2, 4, 6, 8, dtype=torch.bfloat16, device="cuda") for _ in tensors])
    assert (buffer.device.type, buffer.dtype, buffer.shape) == ("cuda", torch.uint8, (numel,))
    assert [(x.device.type, x.dtype, x.shape, x.stride()) for x in restored] == [
        ("cuda", torch.bfloat16, (2, 4, 6, 8), (192, 8, 32, 1))
    ] * 2
