"""Products of a rank's rows have the bits of one process, and the check finds functions whose bits depend on rows."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from para_core import Segment
from para_core.same_bits.one_process import OneProcess, resize, take
from para_core.same_bits.row_check import RowCheck
from para_core.same_bits.rows import convolution, linear

# With fewer features a CPU adds up every number of rows alike.
WIDTH = 512


def rank_part(x, one):
    """Return the rank's part of ``x`` ``[B, S, C]`` or ``[B, C]``, whose tokens are those of all segments."""
    size = len(x) // one.batch_size
    x = x[one.batch_index * size :][:size]
    if x.ndim == 2:
        return x
    total = sum(segment.total for segment in one.segments)
    assert total == x.shape[1]
    starts = [sum(segment.total for segment in one.segments[:index]) for index in range(len(one.segments))]
    parts = [
        x[:, start + first : start + first + length]
        for start, segment in zip(starts, one.segments, strict=True)
        for first, length in segment.runs(one.rank, one.ranks)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [Segment("", 2), Segment("", 5), Segment("", 13), Segment("", 4, replicated=True)])
@given(
    image=st.integers(0, 60),
    ranks=st.integers(1, 8),
    rank=st.integers(0, 7),
    batch=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    bias=st.booleans(),
    strided=st.booleans(),
)
def test_few_rows_have_the_bits_of_one_process(dtype, text, image, ranks, rank, batch, bias, strided):
    generator = torch.Generator().manual_seed(image)
    one = OneProcess((text, Segment("", image)), rank % ranks, ranks, *batch)
    weight = torch.randn(48, WIDTH, generator=generator).to(dtype)
    arguments = (weight, torch.randn(48, generator=generator).to(dtype)) if bias else (weight,)
    # Text is computed on its own, and together with the image.
    for one_call in (replace(one, segments=one.segments[:1]), one):
        total = sum(segment.total for segment in one_call.segments)
        x = torch.randn(one.batch_size, total, 2 * WIDTH, generator=generator).to(dtype)
        part = rank_part(x, one_call)
        if strided:
            x, part = x.chunk(2, dim=-1)[1], part.chunk(2, dim=-1)[1]
        else:
            x, part = (y[..., :WIDTH].clone(memory_format=torch.contiguous_format) for y in (x, part))
        out = linear(one, part, *arguments)
        assert torch.equal(out, rank_part(F.linear(x, *arguments), one_call))
        assert out.is_contiguous()


def test_rows_of_a_plain_product_depend_on_their_number():
    # Otherwise the test above would show nothing.
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1])


@pytest.mark.parametrize("function", [F.conv1d, F.conv2d, F.conv3d])
def test_convolutions_see_the_samples_of_one_process(function):
    dims = int(function.__name__[4])
    x = torch.randn(2, 4, *[8] * dims, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(32, 4, *[2] * dims, generator=torch.Generator().manual_seed(1))
    expected = function(x, weight, stride=2)
    for index in range(2):
        one = OneProcess(batch_index=index, batch_size=2)
        assert torch.equal(convolution(function, one, x[index : index + 1], weight, stride=2), expected[[index]])


@given(order=st.permutations(range(3)), cut=st.booleans())
def test_larger_tensor_lies_in_memory_as_the_small_one(order, cut):
    sizes = [3, 5, 8]
    x = torch.zeros([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(3)])
    if cut:
        x = x.narrow(order[-1], 0, sizes[order[-1]] - 1)
    y = resize(x, [2 * size for size in x.shape])
    assert y.shape == tuple(2 * size for size in x.shape)
    assert y.is_contiguous() == x.is_contiguous()
    by_stride = [sorted(range(3), key=lambda dim: -tensor.stride(dim)) for tensor in (x, y)]
    assert by_stride[0] == by_stride[1]


class Model(nn.Module):
    """A model whose second layer adds up its rows, so that its bits depend on their number."""

    def __init__(self):
        super().__init__()
        self.exact = nn.Identity()
        self.mixes_rows = nn.Identity()


def test_check_names_what_depends_on_rows():
    model = Model()
    check = RowCheck(model)
    one = OneProcess((Segment("image", 13),), 1, 2)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))

    def add_up(y):
        return y + y.mean(dim=1, keepdim=True)

    check.compare(F.silu, one, x, F.silu(x), (), {})
    assert check.findings == []
    for _ in range(2):  # The second time it is known.
        check.compare(add_up, one, x, add_up(x), (), {})
    (finding,) = check.findings
    assert finding.one_process == (2, 13, 32)
    assert str(finding) == "add_up of 2 × 6 × 32 in float32: differs from 2 × 13 × 32 in one process"


def test_products_of_few_rows_of_no_sequence_are_noted():
    check = RowCheck(Model())
    one = OneProcess((Segment("image", 130),), 1, 2)
    weight = torch.ones(4, 8)
    # These are 65 of 130 tokens, few rows, and many.
    for rows in (65, 3, 3, 500):
        x = torch.ones(rows, 8)
        check.compare(F.linear, one, x, F.linear(x, weight), (weight,), {})
    assert check.unplaced == ["linear of 3 × 8 in float32"]
    assert check.findings == []


def test_a_reduction_is_compared_unless_it_is_over_tokens():
    check = RowCheck(Model())
    one = OneProcess((Segment("image", 13),), 1, 2)
    x = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(0))
    for dim, expected in ((1, 0), (-1, 1)):

        def change(y, dim=dim):
            # Other sizes give other bits, as for some sums of a CPU.
            return y.mean(dim, keepdim=True) * y.shape[1]

        check.compare(change, one, x, change(x), (), {})
        assert len(check.findings) == expected


def test_part_of_a_result_is_at_the_place_of_its_tokens():
    one = OneProcess((Segment("text", 5), Segment("image", 8, balanced=True)), 1, 2, 1, 2)
    y = torch.arange(2 * 13).view(2, 13, 1)
    x = rank_part(y, one)
    found = one.place_of_tokens(x)
    assert torch.equal(take(y, one, found, samples=True), x)
