"""The tokens of each rank, compared with torch.tensor_split and with tokens written out one by one."""

import doctest
from importlib import import_module
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core import Segment, SequenceLayout
from para_core.layout.sequence import even_layout

RANKS = st.integers(1, 9)
SEGMENTS = st.lists(
    st.builds(Segment, name=st.sampled_from(["text", "image"]), total=st.integers(0, 40), replicated=st.booleans()),
    min_size=1,
    max_size=4,
).map(tuple)


def positions(layout: SequenceLayout, rank: int) -> list[int]:
    """Return the positions in the whole sequence that ``rank`` holds, in local order."""
    held, before = [], 0
    for segment in layout.segments:
        tokens = torch.arange(before, before + segment.total)
        held += (tokens if segment.replicated else torch.tensor_split(tokens, layout.ranks)[rank]).tolist()
        before += segment.total
    return held


@pytest.mark.parametrize("name", ["sequence", "held", "runs", "fetch", "windows"])
def test_the_docstrings_are_right(name):
    results = doctest.testmod(import_module(f"para_core.layout.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


@given(total=st.integers(0, 200), ranks=RANKS)
def test_a_sharded_segment_is_cut_as_tensor_split_cuts(total, ranks):
    segment = Segment("image", total)
    parts = torch.tensor_split(torch.arange(total), ranks)
    assert segment.sizes(ranks) == tuple(len(part) for part in parts)
    for rank, part in enumerate(parts):
        ((start, length),) = segment.runs(rank, ranks)
        assert list(range(start, start + length)) == part.tolist()


@given(total=st.integers(0, 200), ranks=RANKS)
def test_balanced_segment_pairs_early_and_late_parts(total, ranks):
    segment = Segment("video", total, balanced=True)
    parts = torch.tensor_split(torch.arange(total), 2 * ranks)
    for rank in range(ranks):
        held = [start + i for start, length in segment.runs(rank, ranks) for i in range(length)]
        assert held == [*parts[rank].tolist(), *parts[2 * ranks - 1 - rank].tolist()]
        assert segment.size(rank, ranks) == len(held)


def test_a_segment_is_not_replicated_and_balanced():
    with pytest.raises(ValueError, match="replicated and balanced"):
        Segment("text", 3, replicated=True, balanced=True)


@given(segments=SEGMENTS, ranks=RANKS)
def test_local_lengths_equal_the_tokens_of_each_rank(segments, ranks):
    layout = SequenceLayout(segments, ranks)
    assert layout.sizes() == tuple(len(positions(layout, rank)) for rank in range(ranks))


@given(segments=SEGMENTS, ranks=RANKS)
def test_each_sharded_token_is_held_once(segments, ranks):
    layout = SequenceLayout(segments, ranks)
    sharded, replicated = [
        [
            [start + i for start, length in layout.runs(rank, replicated=kind) for i in range(length)]
            for rank in range(ranks)
        ]
        for kind in (False, True)
    ]
    assert all(tokens == replicated[0] for tokens in replicated)
    assert sorted([*chain(*sharded), *replicated[0]]) == list(range(layout.total))
    for rank in range(ranks):
        assert sorted(sharded[rank] + replicated[rank]) == positions(layout, rank)
        assert layout.sharded_size(rank) == len(sharded[rank])


def test_last_ranks_hold_no_tokens_if_few():
    assert even_layout(2, 5).sizes() == (1, 1, 0, 0, 0)
    assert even_layout(0, 3).sizes() == (0, 0, 0)


def test_layouts_are_values():
    assert even_layout(7, 2) == even_layout(7, 2)
    assert hash(even_layout(7, 2)) == hash(even_layout(7, 2))
    assert SequenceLayout((Segment("text", 3, replicated=True),), 2) != SequenceLayout((Segment("text", 3),), 2)


def test_a_layout_without_segments_is_an_error():
    with pytest.raises(ValueError, match="Segment"):
        SequenceLayout((), ranks=2)


@pytest.mark.parametrize("ranks", [0, -3])
def test_a_layout_without_ranks_is_an_error(ranks):
    with pytest.raises(ValueError, match=f"ranks >= 1, got {ranks}"):
        SequenceLayout((Segment("image", 4),), ranks=ranks)
