"""The tokens of ranks and groups of ranks, compared with torch.tensor_split and with tokens written out."""

from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core import Segment, SequenceLayout
from para_core.distributed.mesh import MeshDim
from para_core.layout import gather
from para_core.layout.fetch import plan_fetch, start_exchange
from para_core.layout.pieces import Layout
from para_core.layout.sequence import even_layout
from para_core.layout.tokens import copy_runs

RANKS = st.integers(1, 9)
SEGMENTS = st.lists(
    st.builds(
        lambda units, kind: Segment("", units * kind[2], *kind),
        st.integers(0, 40),
        st.sampled_from([(False, False, 1), (True, False, 1), (False, True, 1), (False, False, 3), (True, False, 2)]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


def tokens(runs):
    return [position for start, length in runs for position in range(start, start + length)]


def positions(layout, rank):
    """Return the positions in the whole sequence that ``rank`` holds, in local order."""
    held, before = [], 0
    for segment in layout.segments:
        part = torch.arange(before, before + segment.total)
        if segment.balanced:  # An early and a late part.
            parts = torch.tensor_split(part, 2 * layout.ranks)
            part = torch.cat([parts[rank], parts[2 * layout.ranks - 1 - rank]])
        elif not segment.replicated:
            part = torch.tensor_split(part.view(-1, segment.together), layout.ranks)[rank].flatten()
        held += part.tolist()
        before += segment.total
    return held


@given(segments=SEGMENTS, ranks=RANKS)
def test_ranks_hold_the_parts_of_tensor_split(segments, ranks):
    layout = SequenceLayout(segments, ranks)
    assert layout.sizes() == tuple(len(positions(layout, rank)) for rank in range(ranks))
    for rank in range(ranks):
        assert tokens(layout.runs(rank)) == positions(layout, rank)
        sharded, replicated = (tokens(layout.runs(rank, replicated=kind)) for kind in (False, True))
        assert sorted(sharded + replicated) == sorted(positions(layout, rank))
        assert layout.sharded_size(rank) == len(sharded)
        assert replicated == tokens(layout.runs(0, replicated=True))
        assert [segment.size(rank, ranks) for segment in segments] == [s.sizes(ranks)[rank] for s in segments]
    everything = chain(*[tokens(layout.runs(rank, replicated=False)) for rank in range(ranks)], replicated)
    assert sorted(everything) == list(range(layout.total))
    sharded = [torch.tensor(tokens(layout.runs(rank, replicated=False)), dtype=torch.long) for rank in range(ranks)]
    with mock.patch.object(gather, "all_gather", lambda *_: torch.cat(sharded)):
        for rank in range(ranks):
            part, dim = torch.tensor(tokens(layout.runs(rank)), dtype=torch.long), MeshDim("", ranks, rank, "", None)
            whole = gather.gather(part, 0, Layout.of(layout), dim)
            assert whole.tolist() == list(range(layout.total))
    some = range(0, ranks, 2)
    expected = [run for rank in some for run in Layout.of(layout).runs(rank, replicated=False)]
    assert Layout.of(layout).only(*some, replicated=False).runs() == expected


@given(segments=SEGMENTS, groups=st.integers(1, 4), width=st.integers(1, 4))
def test_a_group_holds_the_tokens_of_its_ranks_once(segments, groups, width):
    sequence = SequenceLayout(segments, groups * width)
    layout, by_rank = (Layout.of(sequence).group_ranks(width, ordered=ordered) for ordered in (True, False))
    assert len(layout.pieces) == groups
    for group in range(groups):
        ranks = range(group * width, (group + 1) * width)
        sharded = sorted(chain.from_iterable(tokens(sequence.runs(rank, replicated=False)) for rank in ranks))
        replicated, held = tokens(sequence.runs(0, replicated=True)), tokens(layout.runs(group))
        assert sorted(tokens(layout.runs(group, replicated=False))) == sharded
        assert tokens(layout.runs(group, replicated=True)) == replicated
        assert sorted(held) == sorted(sharded + replicated)
        assert layout.size(group) == layout.sizes()[group] == len(held)
        if not replicated:
            assert by_rank.runs(group) == [run for rank in ranks for run in sequence.runs(rank)]
        for kind in (False, True):
            at = tokens(layout.offsets(group, replicated=kind))
            assert [held[offset] for offset in at] == tokens(layout.runs(group, replicated=kind))


def test_layouts_are_values_of_integers():
    assert len({even_layout(7, 2), SequenceLayout([Segment("sequence", 7)], 2)}) == 1
    assert {type(size) for size in even_layout(np.prod([7, 2]), 2).sizes()} == {int}
    assert SequenceLayout((Segment("text", 3, replicated=True),), 2) != SequenceLayout((Segment("text", 3),), 2)


def fetch_without_runs(x):
    start_exchange(x, 0, plan_fetch(Layout.consecutive((2, 2)), ((), ((0, 2),)), 0), MeshDim("", 2, 0, "", None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segment("text", 3, replicated=True, balanced=True), "replicated and balanced"),
        (lambda: Segment("video", 7, together=2), "together=2"),
        (lambda: Segment("video", torch.tensor(7)), r"total=tensor\(7\); expected an integer"),
        (lambda: Segment("video", 8, together=0), "together=0"),
        (lambda: Segment("video", 8, balanced=True, together=2), "balanced=True"),
        (lambda: SequenceLayout((), ranks=2), "Segment"),
        (lambda: SequenceLayout(Segment("image", 4), ranks=2), "segments is a Segment"),
        (lambda: SequenceLayout(("image",), ranks=2), "segments has 'image'"),
        (lambda: SequenceLayout((Segment("image", 4),), ranks=-3), "ranks >= 1, got -3"),
        (lambda: fetch_without_runs(torch.ones(2, requires_grad=True)), "no run"),
    ],
)
def test_what_is_no_layout_or_fetch_is_an_error(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@given(st.permutations(range(4)), st.integers(-4, 3), st.lists(st.integers(0, 6), min_size=2, max_size=6))
def test_a_copy_of_runs_lies_in_memory_as_the_tensor_does(order, dim, cuts):
    cuts = sorted(cuts)
    runs = [(start, end - start) for start, end in zip(cuts[0::2], cuts[1::2], strict=False)]
    sizes = [2, 3, 4, 5]
    sizes[dim] = 6
    inverse = [order.index(axis) for axis in range(4)]
    x = torch.arange(6 * 120 // [2, 3, 4, 5][dim]).view([sizes[axis] for axis in order]).permute(inverse)
    part = copy_runs(x, dim, runs)
    assert torch.equal(part, x.index_select(dim, torch.tensor(tokens(runs), dtype=torch.int64)))
    assert part.permute(order).is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes


RUNS = st.lists(st.tuples(st.integers(-2, 60), st.integers(0, 20)), max_size=3).map(tuple)


@given(segments=SEGMENTS, ranks=st.integers(1, 4), wanted=st.lists(RUNS, min_size=4, max_size=4))
def test_ranks_fetch_the_runs_that_they_want(segments, ranks, wanted):
    sequence, wanted = SequenceLayout(segments, ranks), tuple(wanted[:ranks])
    layout = Layout.of(sequence)
    held = [tokens(layout.runs(rank)) for rank in range(ranks)]
    replicated = set(tokens(layout.runs(0, replicated=True)))
    plans = [plan_fetch(layout, wanted, rank) for rank in range(ranks)]
    for receiver, plan in enumerate(plans):
        arriving = {sender: [] for sender in range(ranks) if sender != receiver}
        for run, spans in zip(wanted[receiver], plan.runs, strict=True):
            fetched = []
            for span in spans:
                part = [None] * span.length
                if span.sender is not None:
                    part = held[span.sender][span.start : span.start + span.length]
                    assert span.sender == receiver or not replicated & {*part}
                arriving.get(span.sender, []).extend(part)
                fetched += part
            assert fetched == [position if 0 <= position < sequence.total else None for position in tokens([run])]
        for sender, part in arriving.items():
            sent = [held[sender][offset] for offset in tokens(plans[sender].sends[receiver])]
            assert sent == part and plan.receives[sender] == len(part)
    assert all(plan.is_local == (not any(sum(plan.receives) for plan in plans)) for plan in plans)
