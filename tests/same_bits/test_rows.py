"""Products of a rank's rows have the bits of one process, and the check finds functions whose bits depend on rows."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from para_core import Segment
from para_core.same_bits import row_check
from para_core.same_bits.one_process import OneProcess
from para_core.same_bits.row_check import RowCheck
from para_core.same_bits.rows import convolution, linear
from para_core.same_bits.unplaced import UnplacedProduct, find_differences

# With fewer features a CPU adds up every number of rows alike.
WIDTH = 512


def rank_part(x, one):
    """Return the rank's part of ``x`` ``[B, S, C]`` or ``[B, C]``, whose tokens are those of all segments."""
    size = len(x) // one.batch_size
    x = x[one.batch_index * size :][:size]
    if x.ndim == 2:
        return x
    starts = [sum(segment.total for segment in one.segments[:index]) for index in range(len(one.segments))]
    parts = [
        x[:, start + first : start + first + length]
        for start, segment in zip(starts, one.segments, strict=True)
        for first, length in segment.runs(one.rank, one.ranks)
    ]
    return torch.cat(parts, dim=1)


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    text=st.builds(lambda total, *kind: Segment("", total, *kind), st.integers(1, 13), st.booleans()),
    image=st.integers(0, 60),
    ranks=st.integers(1, 8),
    rank=st.integers(0, 7),
    batch=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    bias=st.booleans(),
    strided=st.booleans(),
)
@example(torch.float32, Segment("", 1), 0, 1, 0, (0, 2), False, True)
@settings(max_examples=4 * settings().max_examples)
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


def test_convolutions_see_the_samples_of_one_process():
    for dims, function in enumerate((F.conv1d, F.conv2d, F.conv3d), start=1):
        x = torch.randn(2, 4, *[8] * dims, generator=torch.Generator().manual_seed(0))
        weight = torch.randn(32, 4, *[2] * dims, generator=torch.Generator().manual_seed(1))
        expected = function(x, weight, stride=2)
        for index in range(2):
            one = OneProcess(batch_index=index, batch_size=2)
            assert torch.equal(convolution(function, one, x[index : index + 1], weight, stride=2), expected[[index]])


def test_check_names_what_depends_on_rows():
    check, one = RowCheck(nn.Identity()), OneProcess((Segment("image", 13),), 1, 2)
    x = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(0))

    def add_up(y):
        return y + y.mean(dim=1, keepdim=True)

    def mean_over(dim):
        # Other sizes give other bits, as for some sums of a CPU. Over tokens they are not compared.
        return lambda y: y.mean(dim, keepdim=True) * y.shape[1]

    for function in (F.silu, mean_over(1)):
        check.compare(function, one, x, function(x), (), {})
    assert check.findings == []
    of_features = mean_over(-1)
    for function in (add_up, add_up, of_features):  # The second time it is known.
        check.compare(function, one, x, function(x), (), {})
    first, second = check.findings
    assert first == "add_up of 2 × 6 × 96 in float32: differs from 2 × 13 × 96 in one process"
    assert second.startswith("<lambda> of ")


def test_other_dims_and_strides_are_other_functions(monkeypatch):
    check, one = RowCheck(nn.Identity()), OneProcess((Segment("image", 13),), 1, 2)
    compared = []
    monkeypatch.setattr(row_check, "have_equal_bytes", lambda *_: compared.append(1) or True)
    x = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(0))
    for dim in (1, -1, -1):  # A mean over tokens is not compared.
        check.compare(Tensor.mean, one, x, x.mean(dim, keepdim=True), (dim,), {"keepdim": True})
    for eps in (1e-5, 1e-2):
        check.compare(F.layer_norm, one, x, F.layer_norm(x, (96,), eps=eps), ((96,),), {"eps": eps})
    assert len(compared) == 3


def test_products_of_few_rows_of_no_sequence_are_noted():
    check, one = RowCheck(nn.Identity()), OneProcess((Segment("image", 130),), 1, 2)
    weight = torch.ones(4, 8)
    # These are 65 of 130 tokens, few rows, and many.
    for rows in (65, 3, 3, 500):
        x = torch.ones(rows, 8)
        check.compare(F.linear, one, x, F.linear(x, weight), (weight,), {})
    product, again = check.unplaced
    assert product == again
    assert product.text == "linear of 3 × 8 in float32"
    # Two ranks with 2 to 4 rows each.
    assert product.equal_for == {4, 5, 6, 7, 8}
    assert check.findings == []


def products_of(rows, width, total):
    """Return the products that two ranks note, which share ``total`` random rows, the first one ``rows`` of them."""
    x = torch.randn(total, width, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(48, width, generator=torch.Generator().manual_seed(1))
    of_ranks = []
    for rank, part in enumerate((x[:rows], x[rows:])):
        check = RowCheck(nn.Identity())
        check.compare(F.linear, OneProcess((), rank, 2), part, F.linear(part, weight), (weight,), {})
        of_ranks.append(check.unplaced)
    equal = torch.equal(torch.cat([F.linear(part, weight) for part in (x[:rows], x[rows:])]), F.linear(x, weight))
    return of_ranks, equal


@given(st.integers(1, 12), st.sampled_from([16, 32, 512]))
def test_rows_of_no_sequence_have_the_bits_of_one_process_or_are_named(rows, width):
    of_ranks, equal = products_of(rows, width, 2 * rows + 1)
    assert equal or find_differences(of_ranks)
    # Ranks with the same rows have all.
    assert find_differences([of_ranks[0], of_ranks[0]]) == []
    assert "other ranks have others" in find_differences([of_ranks[0], []])[0]


def test_many_rows_of_no_sequence_are_not_named():
    of_ranks, equal = products_of(40, 512, 80)
    assert equal and of_ranks == [[], []]
    # Few rows in 16 bits, whose bits do not depend on their number with so few features.
    product = UnplacedProduct("linear of 40 × 64 in bfloat16", 0, 40, "a", frozenset({79, 80, 81}), 512)
    others = [replace(product, digest="b"), replace(product, digest="c", size=42)]
    assert find_differences([[product], others[:1]]) == []
    assert len(find_differences([[product], others[1:]])) == 2
    # Two of three ranks have equal rows, such as those of one time step: these are other tokens.
    of_three = [replace(product, digest=digest, equal_for=frozenset({120})) for digest in "aab"]
    assert find_differences([[each] for each in of_three]) == []
    # A rank without rows has no bits to differ.
    assert find_differences([[product], [replace(product, digest="d", size=0, equal_for=frozenset())]]) == []


def test_a_row_of_a_view_has_the_bits_of_one_process():
    # Alone, the second sample has another address in memory than after the first.
    x = torch.randn(2, 17, 128, generator=torch.Generator().manual_seed(0))[:, 0]
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    for index in range(2):
        out = linear(OneProcess(batch_index=index, batch_size=2), x[[index]].as_strided((1, 128), (2176, 1)), weight)
        assert torch.equal(out, F.linear(x, weight)[[index]])
