"""Ray with stand-ins: the cluster to which a fleet connects, and the answers of the ranks of a replica."""

import asyncio
import time

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray

from para_core.fleet import group
from para_core.fleet.failures import RequestFailed
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.rank_actor import Answer
from para_core.launcher.errors import Cancelled, RankDied

JOIN, NEW, LOCAL = "joined", "None with True CPUs", "local with True CPUs"


@pytest.fixture
def start(monkeypatch):
    """Return a function of what Ray finds on this machine that returns the list of what is started."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start(noted=False, alive=False, first_error=""):
        started, errors = [], [first_error] if first_error else []

        def init(address=None, num_cpus=None, **_):
            # With None, Ray takes the cluster that ray start or RAY_ADDRESS noted, or a new one.
            assert address in (None, "local")
            if errors:
                raise Exception(errors.pop())
            if address is None and noted and num_cpus is not None:
                raise ValueError("When connecting to an existing cluster, num_cpus must not be provided.")
            if address is None and noted and not alive:
                raise ConnectionError("Could not find any running Ray instance.")
            started.append(JOIN if num_cpus is None else f"{address} with {num_cpus >= 7} CPUs")

        monkeypatch.setattr(ray, "init", init)
        return started

    return start


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, NEW),  # a cluster of another program is not joined
        ({"noted": True, "alive": True}, JOIN),
        ({"noted": True}, LOCAL),
        ({"first_error": "The current node timed out during startup."}, NEW),
    ],
)
def test_cluster_is_joined_or_started(start, found, expected):
    started = start(**found)
    assert group.connect(7, debug=False)
    assert started == [expected]


def test_named_address_without_cluster_and_failing_start_raise(start, monkeypatch):
    start(first_error="no space left")
    with pytest.raises(RuntimeError, match=r"Ray .*: no space left"):
        group.connect(7, debug=False)
    start(noted=True)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RuntimeError, match=r"RAY_ADDRESS .*'127\.0\.0\.1:1'"):
        group.connect(7, debug=False)


def test_replica_without_room_names_spread(monkeypatch):
    alive = [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in (2.0, 3.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, {"Alive": False, "Resources": {"CPU": 64.0}}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0})
    group.require_cluster(ReplicaOptions(2), 2)
    group.require_cluster(ReplicaOptions(3, spread=True), 2)
    with pytest.raises(ValueError, match=r"2 replicas of 3 ranks .* 2, 3, 1 CPUs: .*--spread"):
        group.require_cluster(ReplicaOptions(3), 2)
    with pytest.raises(ValueError, match=r"4 replicas of 2 ranks .*8 CPUs, .*6"):
        group.require_cluster(ReplicaOptions(2, spread=True), 4)


GRACE = 0.2
DONE, FAILED, CANCELLED = Answer(None), Answer(RequestFailed("no room")), Answer(Cancelled("after step 3."))
KILLED = RuntimeError("killed")


def wait_for(*answers):
    """Return the answers, given as ``(seconds, answer)``, in rank order."""

    async def answer_after(seconds, answer):
        await asyncio.sleep(seconds)
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    async def run():
        return await group._wait_for_answers([answer_after(*pair) for pair in answers])

    return [answer for (answer,) in asyncio.run(run())]


@pytest.mark.parametrize(
    ("answers", "died"),
    [
        ([(0.0, DONE), (3 * GRACE, DONE)], ""),
        ([(GRACE / 2, FAILED), (0.0, FAILED)], ""),
        # A rank that is silent after a failure is dead.
        ([(0.0, FAILED), (30.0, DONE)], "no room"),
        ([(30.0, DONE), (0.0, DONE), (2 * GRACE, FAILED)], "no room"),
        ([(30.0, DONE), (2 * GRACE, KILLED), (0.0, DONE)], "rank 1.*killed"),
    ],
)
def test_slow_ranks_are_waited_for_unless_another_one_failed(monkeypatch, answers, died):
    monkeypatch.setattr(group, "_GRACE_SECONDS", GRACE)
    start = time.perf_counter()
    if not died:
        assert wait_for(*answers) == [answer for _, answer in answers]
        return
    with pytest.raises(RankDied, match=died):
        wait_for(*answers)
    assert time.perf_counter() - start < 10.0
