"""Answers of the ranks of a replica, with stand-ins for Ray's references."""

import asyncio
import time

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from para_core.fleet import group
from para_core.fleet.failures import RequestFailed
from para_core.fleet.rank_actor import Answer
from para_core.launcher.errors import Cancelled, RankDied

GRACE = 0.2


async def answer_after(seconds, answer):
    await asyncio.sleep(seconds)
    if isinstance(answer, Exception):
        raise answer
    return [answer]


def wait_for(*answers):
    """Return the answers, given as ``(seconds, answer)``, in rank order."""

    async def run():
        return await group._wait_for_answers([answer_after(*pair) for pair in answers])

    return [answer for (answer,) in asyncio.run(run())]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(group, "_GRACE_SECONDS", GRACE)


DONE, FAILED, CANCELLED = Answer(None), Answer(RequestFailed("no room")), Answer(Cancelled("after step 3."))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [(0.0, 3 * GRACE), (3 * GRACE, 0.0), (0.0, 2 * GRACE, 4 * GRACE)])
def test_slow_rank_is_waited_for(seconds):
    assert wait_for(*[(each, DONE) for each in seconds]) == [DONE] * len(seconds)


@pytest.mark.parametrize("other", [FAILED, CANCELLED])
@pytest.mark.parametrize("order", [1, -1])
def test_silent_rank_after_failure_is_dead(other, order):
    start = time.perf_counter()
    with pytest.raises(RankDied) as error:
        wait_for(*[(0.0, other), (30.0, DONE)][::order])
    assert str(other.outcome) in str(error.value)
    assert time.perf_counter() - start < 10.0


def test_late_failure_starts_grace_period():
    with pytest.raises(RankDied, match="no room"):
        wait_for((30.0, DONE), (0.0, DONE), (2 * GRACE, FAILED))


def test_late_death_is_named():
    with pytest.raises(RankDied, match=r"rank 1.*killed"):
        wait_for((30.0, DONE), (2 * GRACE, RuntimeError("killed")), (0.0, DONE))


def test_failures_within_grace_period_are_answers():
    assert wait_for((GRACE / 2, FAILED), (0.0, FAILED)) == [FAILED, FAILED]
