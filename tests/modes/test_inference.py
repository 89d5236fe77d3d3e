"""The sequence that the mode infers from a length, compared with all candidates written out one by one."""

import re
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core import Segment, SequenceLayout
from para_core.modes.inference import sequence_of_length, sequence_of_symbolic_length

# Lengths are small, so that sums of different segments coincide.
SEGMENTS = st.lists(
    st.builds(Segment, name=st.just("x"), total=st.integers(0, 12), replicated=st.booleans()), min_size=1, max_size=8
).map(tuple)
INFER = [sequence_of_length, sequence_of_symbolic_length]


def sizes_of(segments, ranks):
    parts = [
        [segment.total] * ranks
        if segment.replicated
        else [len(part) for part in torch.tensor_split(torch.arange(segment.total), ranks)]
        for segment in segments
    ]
    return [sum(column) for column in zip(*parts, strict=True)]


def all_choices(segments):
    return [choice for length in range(1, len(segments) + 1) for choice in combinations(range(len(segments)), length)]


def verdict_by_hand(held, segments, rank, ranks, ordered):
    """Return the correct layouts and the patterns of the correct errors, by comparing all choices."""
    sizes = {choice: sizes_of([segments[i] for i in choice], ranks) for choice in all_choices(segments)}
    fitting = [choice for choice in sizes if sizes[choice][rank] == held]
    if not fitting:
        return [], {r"cp\.shard"}
    for candidate in fitting:
        totals = {choice: sum(segments[i].total for i in choice) for choice in sizes}
        pairs = [
            [a == b for a, b in zip(sizes[candidate], sizes[other], strict=True)] + [totals[candidate] == totals[other]]
            for other in sizes
        ]
        if any(any(pair[:-1]) and not all(pair) for pair in pairs):
            return [], {r"cp\.using\(cp\.sequence\(", "is_causal"}
    if ordered and (len(fitting) > 1 or len(fitting[0]) > 1):
        return [], {"is_causal"}
    layouts = [SequenceLayout(tuple(segments[i] for i in choice), ranks) for choice in fitting]
    mixed = any(len(layout.segments) > 1 and layout.replicated for layout in layouts)
    return layouts, {"replicated=True"} if mixed else set()


@pytest.mark.parametrize("infer", INFER)
@given(data=st.data(), segments=SEGMENTS, ranks=st.integers(1, 5), ordered=st.booleans())
def test_verdict_equals_exhaustive_comparison(infer, data, segments, ranks, ordered):
    rank = data.draw(st.integers(0, ranks - 1))
    choice = data.draw(st.sampled_from(all_choices(segments)))
    held = sizes_of([segments[i] for i in choice], ranks)[rank] + data.draw(st.sampled_from([0, 0, 0, 1]))
    layouts, errors = verdict_by_hand(held, segments, rank, ranks, ordered)
    try:
        layout = infer(held, segments, rank, ranks, kind="query", ordered=ordered)
    except ValueError as error:
        assert any(re.search(pattern, str(error)) for pattern in errors), (str(error), errors)
    else:
        assert layout in layouts
        assert not (len(layout.segments) > 1 and layout.replicated)


@pytest.mark.parametrize("infer", INFER)
@given(data=st.data(), segments=SEGMENTS, ranks=st.integers(2, 5), ordered=st.booleans())
def test_all_ranks_find_the_same_or_all_raise(infer, data, segments, ranks, ordered):
    held = sizes_of([segments[i] for i in data.draw(st.sampled_from(all_choices(segments)))], ranks)
    verdicts = []
    for rank in range(ranks):
        try:
            verdicts.append(infer(held[rank], segments, rank, ranks, kind="query", ordered=ordered).segments)
        except ValueError:
            verdicts.append(None)
    assert len(set(verdicts)) == 1


@pytest.mark.parametrize("chosen", [{7}, set(range(40)) - {13}, set(range(40))], ids=["one", "all but one", "all"])
def test_forty_sequences_are_distinguished_by_length(chosen):
    # Two segments together are longer than any single one, and each rank's part of a segment differs from its parts of
    # the others.
    segments = tuple(Segment("x", 2001 + 32 * i) for i in range(40))
    expected = tuple(segments[i] for i in sorted(chosen))
    for rank, held in enumerate(SequenceLayout(expected, 2).sizes()):
        assert sequence_of_length(held, segments, rank, 2, kind="query", ordered=False).segments == expected


def test_forty_sequences_of_even_length_need_no_comparison():
    segments = tuple(Segment("x", 8 * i) for i in range(1, 41))
    layout = sequence_of_length(100, segments, 3, 8, kind="query", ordered=False)
    assert layout.total == 800
    with pytest.raises(ValueError, match=r"query of 800 .*is_causal.*cp\.using"):
        sequence_of_length(100, segments, 3, 8, kind="query", ordered=True)


def test_forty_conflicting_sequences_raise_on_every_rank():
    segments = tuple(Segment("x", 8 * i + i % 3) for i in range(1, 41))
    for rank, held in enumerate(SequenceLayout(segments[:20], 8).sizes()):
        with pytest.raises(ValueError, match=rf"query (has|of) {held} .*cp\.using"):
            sequence_of_length(held, segments, rank, 8, kind="query", ordered=False)


def test_many_equal_candidates_raise():
    # The last segment is uneven, so ranks differ. It is in no choice that sums to 3 on the first rank and 2 on the
    # second.
    segments = (*(Segment("x", 2 * i) for i in range(1, 40)), Segment("x", 50_001))
    with pytest.raises(ValueError, match=r"query of 300 .*4096 .*cp\.using"):
        sequence_of_length(150, segments, 0, 2, kind="query", ordered=False)


def test_more_than_eight_sequences_raise_in_graph():
    segments = tuple(Segment("x", 100 * i) for i in range(1, 10))
    with pytest.raises(ValueError, match=r"^9 sequences .*key .*cp\.using"):
        sequence_of_symbolic_length(50, segments, 0, 2, kind="key", ordered=False)


def test_error_lists_sequences_but_not_all_concatenations():
    segments = tuple(Segment("x", 10 * i) for i in range(1, 41))
    with pytest.raises(ValueError, match=r"key has 3 .*200 of 400.*cp\.using") as error:
        sequence_of_length(3, segments, 0, 2, kind="key", ordered=False)
    assert len(str(error.value)) < 1000
