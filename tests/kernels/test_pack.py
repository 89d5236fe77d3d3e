"""The exchange kernels: interpreted and compared with plain indexing, compiled for every GPU, and used as operators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core.attention.pack_ops import as_numbers, pack_on_gpu, unpack_on_gpu
from para_core.kernels import pack
from para_core.kernels.pack_reference import CopyRegion
from tests.kernels.compiled import compile_kernel
from tests.kernels.launches import by_use, on_each_arch
from tests.pairwise import long_beyond_pairs

pytestmark = pytest.mark.slow

# -- The correct result, by loops over elements.


def packed_one_by_one(tensors, regions, numel):
    buffer = torch.full((numel,), -1, dtype=tensors[0].dtype)
    for region in regions:
        x = tensors[region.tensor]
        index = 0
        for token in range(region.token, region.token + region.tokens):
            for sample in x:
                row = sample[region.head : region.head + region.heads, token].flatten()
                start = region.offset + index * region.step
                buffer[start : start + row.numel()] = row
                index += 1
    return buffer


def for_ranks(tensors, tokens, heads, *, one_table):
    """Return the regions of an exchange in which each rank gets some tokens or some heads of each tensor, and the
    number of elements of the buffer.
    """
    regions, offset = [], 0
    token = head = 0
    for num_tokens, num_heads in zip(tokens, heads, strict=True):
        rows = [num_heads * x.shape[3] for x in tensors]
        for index, row in enumerate(rows):
            run = (token, num_tokens, head, num_heads)
            regions.append(
                CopyRegion(
                    index, *run, offset + sum(rows[:index]) if one_table else offset, sum(rows) if one_table else row
                )
            )
            if not one_table:
                offset += num_tokens * tensors[index].shape[0] * row
        offset += num_tokens * tensors[0].shape[0] * sum(rows) if one_table else 0
        token, head = token + num_tokens, head + num_heads
    return regions, offset


def counted(batch, heads, tokens, width, dtype=torch.int32, start=0):
    numbers = torch.arange(start, start + batch * heads * tokens * width, dtype=torch.int32)
    return numbers.view(batch, tokens, heads, width).transpose(1, 2).to(dtype)


def pack_into(tensors, regions, numel):
    return pack.pack(tensors, regions, torch.full((numel,), -1, dtype=tensors[0].dtype))


def round_trip(tensors, regions, numel):
    """Pack and unpack with the GPU form of the operators. Elements that no region covers are undefined."""
    shapes = [size for x in tensors for size in x.shape]
    return unpack_on_gpu(pack_on_gpu(tensors, as_numbers(regions), numel), as_numbers(regions), shapes)


# -- Interpreted.

SPLITS = [((3, 2), (2, 3)), ((4, 4, 0), (2, 0, 3)), ((5,), (4,)), ((1, 1, 1, 1), (1, 1, 1, 1))]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("widths", "split", "one_table"),
    long_beyond_pairs([(16, 16, 16), (5, 5), (12,), (8, 4, 24)], SPLITS, [False, True]),
)
def test_every_element_gets_to_its_place_in_the_buffer(interpreter, widths, split, one_table):
    tokens, heads = split
    shape = 2, sum(heads), sum(tokens)
    tensors = [counted(*shape, width, start=10_000 * index) for index, width in enumerate(widths)]
    regions, numel = for_ranks(tensors, tokens, heads, one_table=one_table)
    assert torch.equal(interpreter(pack_into, tensors, regions, numel), packed_one_by_one(tensors, regions, numel))


@pytest.mark.parametrize(("tokens", "heads"), [((3, 2), (4, 4)), ((8, 8), (2, 3))])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8]
)
def test_unpacking_restores_every_dtype(interpreter, dtype, tokens, heads):
    tensors = [torch.randn(2, 8, 16, width).to(dtype) for width in (16, 24)]
    regions, numel = for_ranks(tensors, tokens, heads, one_table=True)
    restored = interpreter(round_trip, tensors, regions, numel)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensors[0].element_size()]
    for region in regions:
        x, y = (
            x[:, region.head : region.head + region.heads, region.token : region.token + region.tokens]
            .contiguous()
            .view(bits)
            for x in (tensors[region.tensor], restored[region.tensor])
        )
        assert torch.equal(x, y)
    assert all(x.dtype == dtype and x.transpose(1, 2).is_contiguous() for x in restored)


@given(data=st.data())
def test_any_strides_are_read_and_written(interpreter, data):
    shape = data.draw(st.tuples(*[st.integers(1, top) for top in (2, 4, 5, 6)]))
    order, step = data.draw(st.permutations(range(4))), data.draw(st.integers(1, 2))
    x = counted(*shape)
    memory = torch.empty([shape[dim] * step for dim in order], dtype=x.dtype).permute(
        [order.index(dim) for dim in range(4)]
    )
    given_x = memory[::step, ::step, ::step, ::step].copy_(x)
    head, token = data.draw(st.integers(0, shape[1] - 1)), data.draw(st.integers(0, shape[2] - 1))
    row = (shape[1] - head) * shape[3]
    regions = [
        CopyRegion(
            0,
            token,
            shape[2] - token,
            head,
            shape[1] - head,
            data.draw(st.integers(0, 3)),
            row + data.draw(st.integers(0, 2)),
        )
    ]
    numel = regions[0].offset + shape[0] * regions[0].tokens * regions[0].step
    buffer = packed_one_by_one([x], regions, numel)
    assert torch.equal(interpreter(pack_into, [given_x], regions, numel), buffer)
    (restored,) = interpreter(pack.unpack, buffer, regions, [given_x.clone().zero_()])
    assert torch.equal(restored[:, head:, token:], x[:, head:, token:])
    assert int(restored.count_nonzero()) == int(x[:, head:, token:].count_nonzero())


def test_empty_tensors_are_not_copied(interpreter):
    for shape in [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)]:
        x = torch.empty(shape)
        regions, numel = for_ranks([x], (shape[2],), (shape[1],), one_table=True)
        assert interpreter(pack_into, [x], regions, numel).shape == (0,)


@pytest.mark.parametrize(
    ("widths", "eight_bits", "aligned"),
    [([32, 16], None, 16), ([32, 12], None, 1), ([16, 12], torch.int8, 4), ([16, 3], torch.int8, 1)],
)
def test_packed_rows_are_aligned_to_narrowest_dtype(widths, eight_bits, aligned):
    assert pack.block_of(widths, 2, eight_bits)["ALIGNED"] == aligned


def test_too_many_tensors_for_a_launch_are_refused():
    with pytest.raises(ValueError, match=r"4 tensors; .*3"):
        pack.pack([torch.empty(1, 1, 1, 1)] * 4, [], torch.empty(4))


# -- Compiled.


@pytest.mark.sample(3)
@on_each_arch
@pytest.mark.parametrize("launch", by_use(pack.pack_kernel))
def test_every_launch_compiles_without_spills(launch, arch):
    compiled = launch.compiled(arch)
    assert compiled.spills == 0
    assert compiled.threads >= 1024
    assert "ld.global.v4.b32" in compiled.ptx
    assert "st.global.v4.b32" in compiled.ptx


COUNTS = {"num_blocks": 16, "most_heads": 1, "batch": 1, "x_width": 16, "y_width": 1, "z_width": 3}


@pytest.mark.parametrize("launch", [param for param in by_use(pack.pack_kernel) if "2 bytes, D = 96" in param.id])
def test_other_counts_and_widths_share_a_binary(launch):
    unspecialized = {param.name for param in pack.pack_kernel.params if param.do_not_specialize}
    assert unspecialized == set(COUNTS)
    others = {**launch.arguments, **dict.fromkeys(COUNTS, 7)}
    binaries = [
        compile_kernel(launch.kernel, {**launch.arguments, **numbers}, arch=80, num_warps=launch.num_warps).ptx
        for numbers in (COUNTS, others)
    ]
    assert binaries[0] == binaries[1]


# -- As operators.


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_cuda_has_a_form_of_its_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"para_core::{name}", "CUDA")


def test_the_operators_are_one_full_graph():
    tensors = [counted(2, 4, 6, 8), counted(2, 4, 6, 8, start=1000)]
    regions, numel = for_ranks(tensors, (3, 3), (2, 2), one_table=True)
    numbers, shapes = as_numbers(regions), [size for x in tensors for size in x.shape]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def there_and_back(x, y):
        buffer = torch.ops.para_core.pack([x, y], numbers, numel)
        return buffer, *torch.ops.para_core.unpack(buffer, numbers, shapes)

    buffer, *restored = there_and_back(*tensors)
    assert torch.equal(buffer, packed_one_by_one(tensors, regions, numel))
    for x, y in zip(tensors, restored, strict=True):
        assert torch.equal(x[:, :2, :3], y[:, :2, :3])
        assert torch.equal(x[:, 2:, 3:], y[:, 2:, 3:])
    with FakeTensorMode():
        buffer, *restored = there_and_back(
            *[torch.empty(2, 4, 6, 8, dtype=torch.bfloat16, device="cuda") for _ in tensors]
        )
    assert (buffer.device.type, buffer.dtype, buffer.shape) == ("cuda", torch.bfloat16, (numel,))
    assert [(x.device.type, x.shape, x.stride()) for x in restored] == [("cuda", (2, 4, 6, 8), (192, 8, 32, 1))] * 2
