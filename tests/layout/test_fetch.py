"""Tokens that ranks fetch and gather, and their gradients, compared with tokens written out one by one."""

import random

import pytest
import torch

from para_core import Segment, SequenceLayout
from para_core.distributed.mesh import dim_of_group
from para_core.layout.fetch import fetch, plan_fetch, plan_halo, relayout, start_exchange
from para_core.layout.gather import gather, gather_gradient
from para_core.layout.held import Layout

RANKS = 3
FILL = -1.0


def tokens(runs):
    return [position for start, length in runs for position in range(start, start + length)]


def some_layout(draw, *, replicated=True):
    """Return a layout and its number of tokens: consecutive, perhaps with empty ranks, or one of several segments."""
    if draw.random() < 0.5:
        sizes = tuple(draw.choices(range(4), k=RANKS))
        return Layout.consecutive(sizes), sum(sizes)
    kinds = [{}, {"balanced": True}, *([{"replicated": True}] if replicated else [])]
    segments = [Segment("", draw.randint(0, 9), **draw.choice(kinds)) for _ in range(draw.randint(1, 3))]
    sequence = SequenceLayout(tuple(segments), RANKS)
    return Layout.of(sequence), sequence.total


def some_runs(draw, total):
    """Return runs of one rank, some of them empty, or beyond the ends of the sequence."""
    starts = [draw.randint(-2, total + 1) for _ in range(draw.randint(1, 3))]
    return tuple((start, draw.randint(0, total + 2 - start)) for start in starts)


def value(rank, position, is_replicated):
    """Return the value of a token. A rank's replicated tokens are its own, so that it is seen whose arrive."""
    return 100.0 * (rank + 1) * is_replicated + position + 1


def held_by(layout, rank):
    """Return the tokens of ``rank``, ``[2, tokens, 1]``, and whether each is replicated, in its order."""
    replicated = set(tokens(layout.runs(rank, replicated=True)))
    positions = tokens(layout.runs(rank))
    row = torch.tensor([value(rank, position, position in replicated) for position in positions])
    return torch.stack([row, row + 0.5])[..., None].requires_grad_(), replicated


def weights(rank, number):
    """Return what the gradients of ``number`` tokens of ``rank`` are."""
    return torch.arange(1.0, number + 1) * 10**rank


def expected(layout, wanted, rank):
    """Return the tokens that ``rank`` fetches, and the gradient of those that it holds."""
    _, replicated = held_by(layout, rank)
    owned = set(tokens([run for r in range(RANKS) for run in layout.runs(r)]))
    values = [value(rank, p, p in replicated) if p in owned else FILL for p in tokens(wanted[rank])]
    grads = dict.fromkeys(tokens(layout.runs(rank)), 0.0)
    for receiver, runs in enumerate(wanted):
        positions = tokens(runs)
        for position, weight in zip(positions, weights(receiver, len(positions)).tolist(), strict=True):
            if position in grads and (position not in replicated or receiver == rank):
                grads[position] += weight
    return torch.tensor(values), torch.tensor(list(grads.values()))


def check_parts(parts, x, layout, wanted, ranks):
    out = torch.cat(parts, dim=1)
    values, grads = expected(layout, wanted, ranks.index)
    assert torch.equal(out[0, :, 0], values)
    # A rank may fetch nothing but positions that no rank holds.
    ((out[0, :, 0] * weights(ranks.index, out.shape[1])).sum() + 0 * x.sum()).backward()
    assert torch.equal(x.grad[0, :, 0], grads) and not x.grad[1].any()


def fetch_on_ranks(seeds):
    ranks = dim_of_group("rows", torch.distributed.group.WORLD)
    for seed in seeds:
        draw = random.Random(seed)
        layout, total = some_layout(draw)
        wanted = tuple(some_runs(draw, total) for _ in range(RANKS))
        x, _ = held_by(layout, ranks.index)
        parts = start_exchange(x, 1, plan_fetch(layout, wanted, ranks.index), ranks, fill=FILL)()
        assert [part.shape[1] for part in parts] == [length for _, length in wanted[ranks.index]], seed
        check_parts(parts, x, layout, wanted, ranks)
        with torch.no_grad():
            runs = [runs[0] for runs in wanted]
            assert torch.equal(fetch(x, 1, layout, runs, ranks, fill=FILL), parts[0])


def test_ranks_fetch_runs_that_others_hold(rank_pool):
    rank_pool.run(fetch_on_ranks, RANKS, range(60))


def move_on_ranks(seeds):
    """Check a move to another layout, and a gather with its gradient."""
    ranks = dim_of_group("rows", torch.distributed.group.WORLD)
    for seed in seeds:
        draw = random.Random(seed)
        layout, total = some_layout(draw, replicated=False)
        sizes = sorted(draw.choices(range(total + 1), k=RANKS - 1))
        stops = [*sizes, total]
        other = Layout.consecutive(tuple(b - a for a, b in zip([0, *stops], stops, strict=False)))
        x, _ = held_by(layout, ranks.index)
        wanted = tuple(tuple(other.runs(rank)) for rank in range(RANKS))
        check_parts([relayout(x, 1, layout, other, ranks)], x, layout, wanted, ranks)
        layout, total = some_layout(draw)
        x, _ = held_by(layout, ranks.index)
        wanted = (((0, total),),) * RANKS
        values, grads = expected(layout, wanted, ranks.index)
        with torch.no_grad():
            assert torch.equal(gather(x, 1, layout, ranks)[0, :, 0], values)
            grad = weights(ranks.index, total).expand(2, total)[..., None]
            assert torch.equal(gather_gradient(grad, 1, layout, ranks)[1, :, 0], grads)


def test_ranks_move_and_gather_what_they_hold(rank_pool):
    rank_pool.run(move_on_ranks, RANKS, range(60))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 5), (4,), (2, 2, 2, 3)])
def test_a_halo_is_the_end_of_the_rank_before_and_the_start_of_the_rank_after(sizes, wraps):
    layout, total = Layout.consecutive(sizes), sum(sizes)
    wanted = []
    for rank in range(len(sizes)):
        ((start, length),) = layout.runs(rank)
        before = [((start - 2) % total, 2)] if wraps or rank > 0 else []
        after = [((start + length) % total, 2)] if wraps or rank < len(sizes) - 1 else []
        wanted.append((before, after))
    for rank in range(len(sizes)):
        plan = plan_halo(sizes, 2, rank, wraps=wraps)
        runs = tuple((*before, *after) for before, after in wanted)
        expected_plan = plan_fetch(layout, runs, rank)
        assert [span for run in plan.runs for span in run] == [span for run in expected_plan.runs for span in run]
        assert plan._replace(runs=()) == expected_plan._replace(runs=())
