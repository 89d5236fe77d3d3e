"""The sequence that the mode infers from a length, compared with all candidates written out one by one."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core import Segment, SequenceLayout
from para_core.modes.inference import sequence_of_length, sequence_of_symbolic_length
from tests.layout.test_sequence import positions

# Lengths are small, so that sums of different segments coincide.
SEGMENTS = st.lists(
    st.builds(Segment, name=st.just("x"), total=st.integers(0, 12), replicated=st.booleans()), min_size=1, max_size=8
).map(tuple)


def sizes_of(segments, ranks):
    return [len(positions(SequenceLayout(tuple(segments), ranks), rank)) for rank in range(ranks)]


def all_choices(segments):
    """Return the indices of each sequence alone, and of all of them in order."""
    return sorted({*((index,) for index in range(len(segments))), tuple(range(len(segments)))})


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


@pytest.mark.parametrize("infer", [sequence_of_length, sequence_of_symbolic_length])
@settings(max_examples=max(60, settings().max_examples))
@given(data=st.data(), segments=SEGMENTS, ranks=st.integers(1, 5), ordered=st.booleans())
def test_verdict_equals_exhaustive_comparison_on_every_rank(infer, data, segments, ranks, ordered):
    choice = data.draw(st.sampled_from(all_choices(segments)))
    extra = data.draw(st.sampled_from([0, 0, 0, 1]))
    verdicts = set()
    for rank, size in enumerate(sizes_of([segments[i] for i in choice], ranks)):
        layouts, errors = verdict_by_hand(size + extra, segments, rank, ranks, ordered)
        try:
            layout = infer(size + extra, segments, rank, ranks, kind="query", ordered=ordered)
        except ValueError as error:
            assert any(re.search(pattern, str(error)) for pattern in errors), (str(error), errors)
            verdicts.add(None)
        else:
            assert layout in layouts
            assert not (len(layout.segments) > 1 and layout.replicated)
            verdicts.add(layout.segments)
    assert extra or len(verdicts) == 1, "ranks whose parts are of one sequence find the same, or all raise"
