"""The pieces of ranks and of groups of ranks, compared with the tokens of each rank written out one by one."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from para_core import Segment, SequenceLayout
from para_core.layout.held import Layout


def segments(kinds):
    return st.builds(lambda total, kind: Segment("", total, *kind), st.integers(0, 20), st.sampled_from(kinds))


KINDS = [(False, False), (True, False), (False, True)]
SEGMENTS = st.lists(segments(KINDS), min_size=1, max_size=4).map(tuple)


def tokens(runs):
    return [position for start, length in runs for position in range(start, start + length)]


@given(segments=SEGMENTS, groups=st.integers(1, 4), width=st.integers(1, 4))
def test_a_group_holds_the_tokens_of_its_ranks_once(segments, groups, width):
    sequence = SequenceLayout(segments, groups * width)
    layout = Layout.of(sequence).grouped(width)
    assert len(layout.held) == groups
    for group in range(groups):
        ranks = range(group * width, (group + 1) * width)
        sharded = sorted(chain.from_iterable(tokens(sequence.runs(rank, replicated=False)) for rank in ranks))
        replicated = tokens(sequence.runs(0, replicated=True))
        assert sorted(tokens(layout.runs(group, replicated=False))) == sharded
        assert tokens(layout.runs(group, replicated=True)) == replicated
        assert sorted(tokens(layout.runs(group))) == sorted(sharded + replicated)
        assert layout.size(group) == layout.sizes()[group] == len(sharded) + len(replicated)


@given(segments=SEGMENTS, ranks=st.integers(1, 6))
def test_one_rank_holds_the_pieces_of_the_ranks_it_is_made_of(segments, ranks):
    layout = Layout.of(SequenceLayout(segments, ranks))
    some = range(0, ranks, 2)
    expected = [run for rank in some for run in layout.runs(rank, replicated=False)]
    assert layout.only(*some, replicated=False).runs() == expected


@given(segments=SEGMENTS, groups=st.integers(1, 3), width=st.integers(1, 3), replicated=st.booleans())
def test_offsets_say_where_the_pieces_lie(segments, groups, width, replicated):
    layout = Layout.of(SequenceLayout(segments, groups * width)).grouped(width)
    for group in range(groups):
        held = tokens(layout.runs(group))
        at = tokens(layout.offsets(group, replicated=replicated))
        assert [held[offset] for offset in at] == tokens(layout.runs(group, replicated=replicated))
