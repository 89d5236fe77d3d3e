"""Ranks as the commands drive them: what they push, cancelling, and failures on all and on some ranks."""

import os
import signal
import time
from functools import partial

import pytest
import torch

from para_core.fleet.engine import LaunchedRanks, OwnRank, open_ranks
from para_core.launcher.errors import Cancelled, RankDied
from para_core.launcher.handle import Ticket

pytestmark = pytest.mark.slow


class Counter:
    """An object whose methods run on each rank."""

    def __init__(self, start=0):
        self.start = start

    def count(self, steps, link):
        """Push the numbers of steps until the first rank sees that the call is cancelled."""
        for step in range(1, steps + 1):
            link.push(self.start + step)
            time.sleep(0.01)
            if link.cancelled():
                return step
        return None

    def process(self):
        return os.getpid()

    def fail(self, error, ranks):
        rank = int(os.environ.get("RANK", "0"))
        if rank in ranks:
            raise error(f"on rank {rank}") if error is torch.OutOfMemoryError else error("alike")
        return rank

    def end(self, rank):
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


@pytest.fixture(scope="module")
def ranks():
    """Return two ranks."""
    launched = LaunchedRanks(partial(Counter, start=5), 2, timeout=60)
    launched.start()
    yield launched
    launched.close()


@pytest.fixture
def own():
    rank = OwnRank(partial(Counter, start=5))
    rank.start()
    return rank


def test_what_the_first_rank_pushes_arrives_in_order(ranks, own):
    for each in (ranks, own):
        each.start()
        pushed = []
        assert each.call("count", 4, listener=pushed.append) is None
        assert pushed == [6, 7, 8, 9]


def test_cancelled_call_learns_it(ranks, own):
    for each in (ranks, own):
        each.start()
        ticket, pushed = Ticket(), []

        def listen(step, ticket=ticket, pushed=pushed):
            pushed.append(step)
            if step == 8:
                ticket.cancel()

        try:
            assert each.call("count", 300, listener=listen, ticket=ticket) < 300
        except Cancelled:
            assert each is ranks  # The method returned, so the call ended after its last step.
        assert 8 <= max(pushed) < 300 + 5


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_what_all_ranks_raise_leaves_them(ranks, own, error):
    for each in (ranks, own):
        each.start()
        before = each.call("process")
        with pytest.raises(error):
            each.call("fail", error, (0, 1))
        assert each.call("process") == before


def test_what_one_rank_raises_ends_all(ranks):
    ranks.start()
    before = ranks.process_ids
    with pytest.raises(RankDied, match="alike"):
        ranks.call("fail", ValueError, (1,))
    ranks.start()
    assert not {*before} & {*ranks.process_ids}
    assert ranks.death() is None


def test_rank_that_ends_is_named(ranks):
    ranks.start()
    with pytest.raises(RankDied, match="rank 1 was ended by SIGTERM"):
        ranks.call("end", 1)


def test_what_the_listener_raises_ends_the_ranks_at_once(ranks):
    ranks.start()

    def interrupt(step):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ranks.call("count", 6000, listener=interrupt)
    assert time.monotonic() - start < 30
    ranks.start()
    assert ranks.call("fail", ValueError, ()) == 0


def test_one_rank_and_torchrun_start_no_process(monkeypatch):
    load = partial(Counter)
    assert isinstance(open_ranks(load, 1, timeout=60), OwnRank)
    assert isinstance(open_ranks(load, 2, timeout=60), LaunchedRanks)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert isinstance(open_ranks(load, 2, timeout=60), OwnRank)
