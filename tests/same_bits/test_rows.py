"""Products of a rank's rows have the bits of one process, and the check finds functions whose bits depend on rows."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from para_core import Segment
from para_core.layout.sequence import SequenceLayout
from para_core.recorder.recorder import Recorder
from para_core.same_bits import mode, row_check
from para_core.same_bits.at_place import TorchCall
from para_core.same_bits.found import Found
from para_core.same_bits.one_process import UNKNOWN, OneProcess, Place
from para_core.same_bits.products import LinearProduct, find_differences
from para_core.same_bits.row_check import RowCheck
from para_core.same_bits.rows import convolution, linear
from para_core.same_bits.token_tags import TokenTags

# With fewer features a CPU adds up every number of rows alike.
WIDTH = 512


def rank_part(x, one):
    """Return the rank's part of ``x`` ``[B, S, C]``, whose tokens are those of all segments."""
    size = len(x) // one.batch_size
    x = x[one.batch_index * size :][:size]
    runs = SequenceLayout(one.segments, one.ranks).runs(one.rank)
    return torch.cat([x.narrow(1, start, length) for start, length in runs], dim=1)


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
@example(torch.float32, Segment("", 1), 0, 1, 0, (0, 2), False, True)  # A row of a view has another address alone,
@example(torch.float32, Segment("", 1), 0, 1, 0, (1, 2), False, True)  # than after the first sample.
@settings(max_examples=4 * settings().max_examples)
def test_few_rows_have_the_bits_of_one_process(dtype, text, image, ranks, rank, batch, bias, strided):
    generator = torch.Generator().manual_seed(image)
    one = OneProcess((text, Segment("", image)), rank % ranks, ranks, *batch)
    weight = torch.randn(48, WIDTH, generator=generator).to(dtype)
    arguments = (weight, torch.randn(48, generator=generator).to(dtype)) if bias else (weight,)
    for one_call in (replace(one, segments=one.segments[:1]), one):
        total = sum(segment.total for segment in one_call.segments)
        x = torch.randn(one.batch_size, total, 2 * WIDTH, generator=generator).to(dtype)
        part = rank_part(x, one_call)
        if strided:
            x, part = x.chunk(2, dim=-1)[1], part.chunk(2, dim=-1)[1]
        else:
            x, part = (y[..., :WIDTH].clone(memory_format=torch.contiguous_format) for y in (x, part))
        runs = SequenceLayout(one_call.segments, one.ranks).runs(one.rank)
        out = linear(one, (1, Place(total, tuple(runs))), part, *arguments)
        assert torch.equal(out, rank_part(F.linear(x, *arguments), one_call))
        assert out.is_contiguous()


def test_rows_of_a_matrix_are_samples_or_tokens():
    # The second of two ranks has the samples 4 to 7 of 8, and 7 of the tokens 8 to 14 of 15.
    one = OneProcess((Segment("", 15),), 1, 2, 1, 2, samples=4)

    def place_of(rows):
        return one.place_in_one_process(torch.empty(rows, 9), UNKNOWN)

    assert place_of(4) is place_of(27) is None
    assert place_of(7) == (0, Place(15, ((8, 7),)))
    starts = [sample * 15 + 8 for sample in range(4, 8)]
    assert place_of(28) == (0, Place(8 * 15, tuple((start, 7) for start in starts)))


def test_sequences_of_equal_sizes_have_places_of_their_own():
    one = OneProcess((Segment("text", 5, replicated=True), Segment("a", 9), Segment("b", 10)), 1, 2)
    x, joint = torch.empty(1, 5, 8), torch.empty(1, 10, 8)
    assert one.place_in_one_process(x, ("text",)) == (1, Place(5, ((0, 5),)))
    assert one.place_in_one_process(x, ("b",)) == (1, Place(10, ((5, 5),)))
    assert one.place_in_one_process(joint, (5, "b")) == (1, Place(15, ((0, 5), (10, 5))))
    assert one.place_in_one_process(x, None) is None


def test_convolutions_see_the_samples_of_one_process():
    for dims, function in enumerate((F.conv1d, F.conv2d, F.conv3d), start=1):
        x = torch.randn(2, 4, *[8] * dims, generator=torch.Generator().manual_seed(0))
        weight = torch.randn(32, 4, *[2] * dims, generator=torch.Generator().manual_seed(1))
        expected = function(x, weight, stride=2)
        for index in range(2):
            one = OneProcess(batch_index=index, batch_size=2)
            assert torch.equal(convolution(function, one, x[index : index + 1], weight, stride=2), expected[[index]])


def new_check(**fields):
    return RowCheck(Found(), TokenTags(OneProcess), **fields)


def compare(check, one, function, x, *args, tokens=True, **kwargs):
    place = one.place_in_one_process(x, UNKNOWN if tokens else None)
    return check.compare(TorchCall(function, x, args, kwargs), one, place, function(x, *args, **kwargs))


def test_check_names_what_depends_on_rows():
    check, one = new_check(), OneProcess((Segment("image", 13),), 1, 2)
    x = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(0))

    def add_up(y):
        return y + y.mean(dim=1, keepdim=True)

    def mean_over(dim):
        # Other sizes give other values. Over tokens they are not compared.
        return lambda y: y.mean(dim, keepdim=True) * y.shape[1]

    for function in (F.silu, mean_over(1), add_up, add_up, mean_over(-1)):  # The second time it is known.
        compare(check, one, function, x)
    assert check.findings[0] == "add_up of 2 × 6 × 96 in float32: differs from 2 × 13 × 96 in one process"
    assert len(check.findings) == 2 and check.findings[1].startswith("<lambda> of ") and not check.found.at_place


def test_what_differs_by_rounding_is_computed_at_its_place():
    check, one = new_check(), OneProcess((Segment("image", 13),), 1, 2)

    def round_by_size(y):
        return y * (1 + y.shape[1] * 1e-6)

    x = torch.randn(1, 6, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = compare(check, one, round_by_size, x)
    assert torch.equal(out, x * (1 + 13e-6)) and not torch.equal(out, round_by_size(x))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1 + 13e-6))
    assert check.findings == [] and check.found.at_place == {TorchCall(round_by_size, x, (), {}).kind}


def test_a_function_in_place_is_compared_and_writes(monkeypatch):
    monkeypatch.setattr(mode, "one_process_of", lambda *_: OneProcess((Segment("image", 13),), 1, 2))
    for write in (lambda y: F.silu(y, inplace=True), lambda y: F.silu(y, True), lambda y: torch.sin(y, out=y)):
        check, x = new_check(), torch.randn(2, 6, 96)
        check.tags.add(x, ("image",))
        expected = write(x.clone())
        with mode.SameBits(None, 1, check.found, check):
            assert write(x) is x
        assert torch.equal(x, expected) and check.findings == []


def test_what_has_no_samples_is_computed_as_it_is(monkeypatch):
    monkeypatch.setattr(mode, "one_process_of", lambda *_: OneProcess(batch_index=1, batch_size=2))
    check, line, image = new_check(), torch.ones(8), torch.ones(4, 3, 3)
    with mode.SameBits(None, 2, check.found, check):
        torch.tensor(0.0).tanh(), F.layer_norm(line, (8,)), F.linear(line, line[None]), F.conv2d(image, image[None])
        torch.ones(2, 4).mean()
    assert check.findings == ["mean of 2 × 4 in float32: one number of all samples"]


def test_tokens_are_followed_to_what_is_computed_from_them():
    one = OneProcess((Segment("a", 9), Segment("b", 10)), 1, 2)
    tags, a, b, text = TokenTags(lambda: one), torch.ones(1, 4, 16), torch.ones(1, 5, 16), torch.ones(1, 4, 16)
    tags.add(a, ("a",))
    tags.add(b, ("b",))
    with Recorder(tags.follow):
        joint = torch.cat([text, a * 2, b], dim=1)
        out = F.scaled_dot_product_attention(*[joint.unflatten(2, (2, 8)).transpose(1, 2)] * 3)
        out = out.transpose(1, 2).flatten(2)
        features, _ = out.chunk(2, dim=2)
        parts = [*features.split([4, 4, 5], dim=1), features[:, 4:], features[:, 1:5]]
        parts.append(torch.cat([a, b], dim=1)[..., :9][:, :4])  # as many features as tokens
        added, pooled, modulation = a + parts[1].repeat(1, 1, 2), out.mean(1), text.mean(1)
        learned = F.scaled_dot_product_attention(text, a, a)
    assert tags.sequences_of(joint) == tags.sequences_of(out) == tags.sequences_of(features) == (4, "a", "b")
    assert [*map(tags.sequences_of, parts)] == [None, ("a",), ("b",), ("a", "b"), UNKNOWN, ("a",)]
    assert [*map(tags.sequences_of, (added, pooled, modulation, learned))] == [("a",), UNKNOWN, None, UNKNOWN]


def test_equal_sizes_are_told_apart_by_the_weight():
    check, one = new_check(), OneProcess((Segment("a", 11), Segment("b", 12)), 1, 2)
    weights, x = [torch.ones(4, 8) for _ in range(3)], torch.ones(1, 6, 8)
    calls = [TorchCall(F.linear, x, (weight,), {}) for weight in weights]
    for call, sequences in zip(calls, (None, ("b",)), strict=False):
        check.found.note(call, sequences)
        check.compare(call, one, one.place_in_one_process(x, sequences), call.on(x))
    assert [*map(check.found.sequences_of, calls)] == [None, ("b",), UNKNOWN] and check.findings == []
    # A later call cannot tell which sequence one weight gets.
    check.found.note(calls[0], ("b",))
    check.compare(calls[0], one, one.place_in_one_process(x, ("b",)), calls[0].on(x))
    assert check.findings == ["linear of 1 × 6 × 8 in float32: rows of several sequences"]


def test_other_dims_and_strides_are_other_functions(monkeypatch):
    check, one = new_check(), OneProcess((Segment("image", 13),), 1, 2)
    compared = []
    monkeypatch.setattr(row_check, "have_equal_bytes", lambda *_: compared.append(1) or True)
    x = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(0))
    for dim in (1, -1, -1):  # A mean over tokens is not compared.
        compare(check, one, Tensor.mean, x, dim, keepdim=True)
    for eps in (1e-5, 1e-2):
        compare(check, one, F.layer_norm, x, (96,), eps=eps)
    assert len(compared) == 3


def test_products_of_few_rows_are_tried():
    check, one = new_check(running=lambda: "proj"), OneProcess((Segment("image", 130),), 1, 2)
    weight = torch.ones(4, 8)
    # These are 65 of 130 tokens, few rows, and many.
    for rows in (65, 3, 3, 500):
        compare(check, one, F.linear, torch.ones(rows, 8), weight)
    tokens, product, again, many = check.products
    assert product == again
    assert (product.name, product.sizes) == ("proj, linear", "3 × 8 in float32")
    # Any number up to the one from which bits do not depend on it.
    assert product.equal_for == {*range(3, 17)}
    assert tokens.digest is None and many.digest is None
    assert check.findings == []


def products_of(rows, width, total):
    """Return the products that two ranks note, which share ``total`` random rows, the first one ``rows`` of them."""
    x = torch.randn(total, width, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(48, width, generator=torch.Generator().manual_seed(1))
    of_ranks = []
    for rank, part in enumerate((x[:rows], x[rows:])):
        check = new_check()
        compare(check, OneProcess((), rank, 2), F.linear, part, weight)
        of_ranks.append(check.products)
    equal = torch.equal(torch.cat([F.linear(part, weight) for part in (x[:rows], x[rows:])]), F.linear(x, weight))
    return of_ranks, equal


@given(st.integers(1, 12), st.sampled_from([16, 32, 512]))
def test_rows_of_no_sequence_have_the_bits_of_one_process_or_are_named(rows, width):
    of_ranks, equal = products_of(rows, width, 2 * rows + 1)
    assert equal or find_differences(of_ranks)
    # Ranks with the same rows have all.
    assert find_differences([of_ranks[0], of_ranks[0]]) == []
    assert find_differences([of_ranks[0], []]) == ["linear: ranks call it 1 and 0 times"]


def test_many_rows_of_no_sequence_are_not_named():
    of_ranks, equal = products_of(40, 512, 80)
    assert equal and find_differences(of_ranks) == []
    # Few rows in 16 bits, whose bits do not depend on their number with so few features.
    product = LinearProduct("linear", "", 0, 40, digest="a", equal_for=frozenset({40, 79, 80, 81}), enough=512)

    def differences(*of_ranks):
        return find_differences([[replace(product, **fields)] for fields in of_ranks])

    assert differences({}, {"digest": "b"}) == []
    assert len(differences({}, {"digest": "c", "size": 42})) == 2
    # Two of three ranks have equal rows, such as those of one time step: these are other tokens.
    assert differences(*[{"digest": digest, "equal_for": frozenset({120})} for digest in "aab"]) == []
    # A rank without rows has no bits to differ.
    assert differences({}, {"digest": "d", "size": 0, "equal_for": frozenset()}) == []
    # Ranks that took their rows for those of one sequence have its tokens, some of which each may have.
    assert differences(*[{"digest": digest, "total": 60, "equal_for": frozenset({60})} for digest in "ab"]) == []
    # A router gives each rank another number of tokens, and others at the next step.
    routed = differences(*[{"digest": None, "size": size, "is_routed": True} for size in (20, 60)])
    assert "rows that the model chooses, 80 in one process" in routed[0]
