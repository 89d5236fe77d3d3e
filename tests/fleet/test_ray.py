"""Ray with stand-ins: the cluster to which a fleet connects, and the answers of the ranks of a replica."""

import asyncio
import gc
import logging
import signal
import time
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray

from para_core.fleet import group, ray_cluster
from para_core.fleet.build import find_model
from para_core.fleet.failures import RequestFailed
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.rank_actor import Answer
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import make_request
from para_core.launcher.errors import Cancelled, RankDied
from para_core.launcher.hosts import connect_to_ray

JOIN, NEW, LOCAL = "joined", "None with True CPUs", "local with True CPUs"


@pytest.fixture
def start(monkeypatch):
    """Return a function of what Ray finds on this machine that returns the list of what is started."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start(noted=False, alive=False, first_errors=()):
        started, errors = [], [*first_errors]

        def init(address=None, num_cpus=None, **_):
            # With None, Ray takes the cluster that ray start or RAY_ADDRESS noted, or a new one.
            assert address in (None, "local")
            if errors:
                raise errors.pop()
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
        ({"first_errors": [Exception("The current node timed out during startup.")]}, NEW),
    ],
)
def test_cluster_is_joined_or_started(start, found, expected):
    started = start(**found)
    assert ray_cluster.connect(7, debug=False)
    assert started == [expected]


def test_named_address_without_cluster_and_failing_start_raise(start, monkeypatch):
    start(first_errors=[Exception("no space left"), ValueError("no memory left")])
    for reason in ("no memory left", "no space left"):
        with pytest.raises(RuntimeError, match=rf"Ray does not start.*: {reason}"):
            ray_cluster.connect(7, debug=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    start(noted=True)
    with pytest.raises(RuntimeError, match=r"RAY_ADDRESS .*'127\.0\.0\.1:1', but"):
        ray_cluster.connect(7, debug=False)


@pytest.mark.parametrize("join", [lambda: ray_cluster.connect(7, debug=False), connect_to_ray])
def test_invalid_address_is_named_and_the_handler_of_sigterm_stays(start, monkeypatch, join):
    start()
    monkeypatch.setenv("RAY_ADDRESS", "head")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    init = mock.Mock(side_effect=lambda **_: signal.signal(signal.SIGTERM, print))
    monkeypatch.setattr(ray, "init", init)
    join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    # Python cannot install a handler again that a library has installed below it.
    with mock.patch.object(signal, "getsignal", side_effect=[None, print]):
        join()
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL
    init.side_effect = ValueError("Invalid address format: head")
    with pytest.raises(RuntimeError, match="RAY_ADDRESS is 'head', and"):
        join()


def test_replica_without_room_names_spread(monkeypatch):
    alive = [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in (2.0, 3.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, {"Alive": False, "Resources": {"CPU": 64.0}}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0})
    ray_cluster.require_cluster(ReplicaOptions(2), 2)
    ray_cluster.require_cluster(ReplicaOptions(3, spread=True), 2)
    with pytest.raises(ValueError, match=r"2 replicas of 3 ranks .* 2, 3, 1 CPUs: .*--spread"):
        ray_cluster.require_cluster(ReplicaOptions(3), 2)
    with pytest.raises(ValueError, match=r"4 replicas of 2 ranks .*8 CPUs, .*6"):
        ray_cluster.require_cluster(ReplicaOptions(2, spread=True), 4)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 8.0}}] * 2)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 16.0})
    with pytest.raises(ValueError, match=r"4, 4 CPUs and 8, 8 GPUs"):
        ray_cluster.require_cluster(ReplicaOptions(8), 1)
    # All CPUs but one are on a node without a GPU.
    cpus, gpus = {"CPU": 7.0}, {"CPU": 1.0, "GPU": 16.0}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in (cpus, gpus)])
    ray_cluster.require_cluster(ReplicaOptions(1, spread=True), 1)
    with pytest.raises(ValueError, match=r"7, 1 CPUs and 0, 16 GPUs, enough for 1 ranks"):
        ray_cluster.require_cluster(ReplicaOptions(2, spread=True), 1)


GRACE = 0.2
DONE, FAILED, KILLED = Answer(None), Answer(RequestFailed("no room")), RuntimeError("killed")


def wait_for(*answers):
    """Return the answers, given as ``(seconds, answer)``, in rank order."""

    async def answer_after(seconds, answer):
        await asyncio.sleep(seconds)
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    waiting = group._wait_for_answers([answer_after(*pair) for pair in answers])
    return [answer for (answer,) in asyncio.run(waiting)]


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


class Actor:
    """An actor whose methods return ``answers``, by name. The others, and all after its end, fail when it ends."""

    def __init__(self, **answers):
        self.answers, self.calls, self.died = answers, [], asyncio.Event()

    def __getattr__(self, name):
        async def answer(*args):
            self.calls.append((name, *args))
            if name in self.answers and not self.died.is_set():
                return self.answers[name]
            await self.died.wait()
            raise ray.exceptions.ActorDiedError

        method = SimpleNamespace(remote=lambda *args: asyncio.ensure_future(answer(*args)))
        method.options = lambda **_: method
        return method


LOADING = {"watch_signals": (1, "/nowhere"), "remove_notes": None, "__ray_call__": "here", "open_store": 1}
RUNNING = {**LOADING, "loading_log": (0, []), "join": None, "progress": (0, []), "cancel": None}
REQUEST = ("a", make_request({"prompt": "a"}, find_model(None), seed=0))


@pytest.fixture
def ask(monkeypatch, caplog):
    """Return a function that runs ``question(replica, actors)``, and returns the errors that were logged meanwhile."""
    monkeypatch.setattr(ray, "kill", lambda actor: actor.died.set())
    for name in ("_POLL_SECONDS", "_PING_SECONDS"):
        monkeypatch.setattr(group, name, 0.01)
    for name in ("resources_of_rank", "PlacementGroupSchedulingStrategy", "remove_placement_group"):
        monkeypatch.setattr(group, name, mock.MagicMock())
    monkeypatch.setattr(group, "placement_group", lambda *_, **__: mock.Mock(ready=mock.AsyncMock()))

    def ask(question, answers):
        async def run():
            replica = group.RayReplica(Recipe(""), ReplicaOptions(2))
            actors = [Actor(**answers), Actor(**answers)]

            def place(recipe, rank, options):
                actors[rank].died = asyncio.Event()
                return actors[rank]

            monkeypatch.setattr(ray, "remote", mock.Mock())
            ray.remote.return_value.return_value.options.return_value.remote = place
            await question(replica, actors)
            await asyncio.sleep(0.05)
            # Asyncio logs an exception that nobody has read when the task is collected.
            gc.collect()

        asyncio.run(run())
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

    return ask


async def cancel_a_start_and_a_batch(replica, actors):
    await replica.start()
    running = asyncio.ensure_future(replica.generate_batch([REQUEST]))
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])
    replica.cancel("a")  # which has ended
    assert [call for call in actors[0].calls if call[0] == "cancel"] == [("cancel", "a", 1)] and replica.running
    del actors[1].answers["join"]
    starting = asyncio.ensure_future(replica.start())
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled() and not replica.running and actors[1].died.is_set()


async def stop_a_start(replica, actors):
    for seconds in (0.0, 0.05):  # while it waits for its placement group, and for the ranks
        starting = asyncio.ensure_future(replica.start())
        await asyncio.sleep(seconds)
        await replica.stop()
        with pytest.raises(RuntimeError, match="stopped while"):
            await starting
        assert (actors[0].calls == [], replica.actors) == (seconds == 0, [])


async def cancel_while_a_batch_is_repeated(replica, actors):
    await replica.start()
    batch = [REQUEST, ("b", REQUEST[1])]
    outcomes = await replica.generate_batch(batch, lambda event: replica.cancel("b"))
    assert [type(outcome) for outcome in outcomes] == [RequestFailed, Cancelled]
    assert not await replica.alive()  # No rank answers a ping.


async def die_together(replica, actors):
    await replica.start()
    running = asyncio.ensure_future(replica.generate_batch([REQUEST]))
    await asyncio.sleep(0.05)
    for actor in actors:
        actor.died.set()
    with pytest.raises(RankDied, match="rank 0 died"):
        await running


async def die_while_loading(replica, actors):
    starting = asyncio.ensure_future(replica.start())
    await asyncio.sleep(0.05)
    actors[0].died.set()
    with pytest.raises(RuntimeError, match="rank 0 died"):
        await starting


@pytest.mark.parametrize(
    ("question", "answers", "errors"),
    [
        (cancel_a_start_and_a_batch, RUNNING, []),
        (
            cancel_while_a_batch_is_repeated,
            {**RUNNING, "generate_batch": [FAILED, FAILED]},
            ["no answer for 0.01 s"] * 2,
        ),
        (stop_a_start, LOADING, []),
        (die_together, RUNNING, ["rank 0 died"]),
        (die_while_loading, LOADING, ["rank 0 died", "cannot start: rank 0 died"]),
    ],
)
def test_the_end_of_ranks_is_told_once_and_by_its_reason(ask, question, answers, errors):
    logged = ask(question, answers)
    assert len(logged) == len(errors), logged
    assert all(error in message for error, message in zip(errors, logged, strict=True)), logged
