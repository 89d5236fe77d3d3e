"""Replicas in this process, as processes, and on Ray: their results, progress, cancelling, failures and deaths."""

import asyncio
import logging
import os
import re
import signal
import time

import pytest

from para_core.fleet import group
from para_core.fleet.build import build, find_model
from para_core.fleet.failures import RequestFailed
from para_core.fleet.local_replica import LocalReplica
from para_core.fleet.outputs import Output
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.replicas import cluster_connection, make_replicas
from para_core.fleet.request import Delivery, Request, make_request
from para_core.fleet.work import generate_request
from para_core.launcher.errors import Cancelled, RankDied
from tests.fleet.test_work import pixels

# Ray keeps sockets and threads open until the cluster ends, which raises warnings.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MODEL = find_model(None)
RECIPE = Recipe(MODEL.name, timeout=120)
SMALL = {"size": "64x48", "steps": 3}


def request(prompt="a large red circle", seed=5, partial_images=0, **fields):
    made = make_request({"prompt": prompt, **SMALL, **fields}, MODEL, seed=seed)
    return Request(made.fields, seed, delivery=Delivery(partial_images=partial_images))


async def give_results(replica):
    events = []
    previewed = request(partial_images=2)
    (result,) = await replica.generate_batch([("a", previewed)], events.append)
    steps = [event for event in events if isinstance(event, int)]
    # Steps of replicas on Ray are read from time to time.
    assert steps == sorted(steps) and set(steps) <= {1, 2, 3} and steps[-1] == 3
    assert isinstance(replica, group.RayReplica) or len(steps) == 3
    assert sum(isinstance(event, Output) for event in events) == 2
    with pytest.raises(RequestFailed, match="prompt_2"):
        await replica.generate(Request({"prompt": "a", "height": 48, "width": 64, "prompt_2": 5}, seed=0))
    together = await replica.generate_batch([("a", request()), ("b", request("a blue square", seed=6))])
    assert [outcome.metadata["seeds"] for outcome in together] == [[5], [6]]
    assert await replica.alive() and (await replica.memory()).fixed > 0
    return result, *together, await replica.generate(request("a blue square", seed=6))


async def cancel_after_a_step(replica):
    processes, reached = replica.process_ids, asyncio.Event()

    def progress(event):
        if event >= 2:
            reached.set()

    running = asyncio.ensure_future(replica.generate_batch([("long", request(steps=200))], progress))
    await reached.wait()
    replica.cancel("another")
    replica.cancel("long")
    (outcome,) = await running
    assert isinstance(outcome, Cancelled) and "cancelled after step" in str(outcome)
    # One of a batch is left out of the results, and does not end the others.
    batch = [("a", request(seed=1, steps=40)), ("b", request(seed=2, steps=40))]
    for cancelled, kinds in (("a", ["Cancelled", "Result"]), ("ab", ["Cancelled", "Cancelled"])):
        outcomes = await replica.generate_batch(batch, lambda event, ids=cancelled: [*map(replica.cancel, ids)])
        assert [type(outcome).__name__ for outcome in outcomes] == kinds
    assert replica.process_ids == processes
    assert len(await replica.generate_batch([("next", request())])) == 1


async def die_and_start_again(replica):
    before = replica.process_ids

    def progress(event):
        if event >= 2:
            os.kill(before[1], signal.SIGKILL)

    with pytest.raises(RankDied, match=r"rank 1 .*SIGKILL"):
        await replica.generate_batch([("long", request(steps=200))], progress)
    assert not replica.running and not await replica.alive()
    with pytest.raises(RankDied, match="not running"):
        await replica.generate(request())
    await replica.start()
    assert await replica.alive() and not {*before} & {*replica.process_ids}
    # While no request runs.
    os.kill(replica.process_ids[0], signal.SIGSEGV)
    async with asyncio.timeout(30):
        while await replica.alive():
            await asyncio.sleep(0.05)
    assert isinstance(replica, group.RayReplica) or not replica.running


def test_stopped_start_loads_to_its_end_and_leaves_a_later_one_alone():
    replica, loads = LocalReplica(RECIPE, ReplicaOptions(), own_process=True), []
    replica._ranks._load = lambda: (time.sleep(0.1), loads.append(1))

    async def run():
        return await asyncio.gather(replica.start(), replica.start(), return_exceptions=True)

    stopped, later = asyncio.run(run())
    assert "stopped while it started" in str(stopped)
    assert (later, loads, replica.running) == (None, [1], True)


async def stop_with_a_request(replica):
    running = asyncio.ensure_future(replica.generate(request(steps=200)))
    await asyncio.sleep(0.5)
    await replica.stop()
    with pytest.raises(RankDied, match=r"the replica was stopped\."):
        await running
    assert not replica.running
    for call in (replica.memory, lambda: replica.generate(request())):
        with pytest.raises(RankDied, match="not running"):
            await call()


# Each start of ranks takes seconds, so one replica of each kind answers all questions.
KINDS = [("", 1, [stop_with_a_request]), ("", 2, [die_and_start_again]), ("local", 2, [stop_with_a_request])]
KINDS += [pytest.param("local", 2, [die_and_start_again], marks=pytest.mark.long)]


@pytest.mark.parametrize(("address", "ranks", "ends"), KINDS)
def test_replica_gives_the_results_of_one_process(monkeypatch, caplog, address, ranks, ends):
    monkeypatch.setenv("RAY_ADDRESS", address)
    caplog.set_level(logging.INFO, "para_core")
    options, dies = ReplicaOptions(ranks, prompt_bytes=2**20), die_and_start_again in ends

    async def run():
        (replica,) = make_replicas(RECIPE, options, 1)
        await replica.start()
        assert len(set(replica.process_ids)) == ranks
        assert (os.getpid() in replica.process_ids) == (ranks == 1)
        results = await give_results(replica)
        for question in (cancel_after_a_step, *ends):
            await question(replica)
        await replica.stop()
        return results

    with cluster_connection(options, 1, debug=False):
        alone, first, second, other = asyncio.run(run())
    expected = generate_request(build(RECIPE), request(), RECIPE)
    assert max(abs(pixels(result) - pixels(expected)).max() for result in (alone, first)) <= 1
    assert abs(pixels(second) - pixels(other)).max() <= 1 < abs(pixels(second) - pixels(first)).max()
    messages = [record.getMessage() for record in caplog.records]
    assert any("loaded component 7 of 7" in message for message in messages)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    signals = ["rank 1 .*SIGKILL", "rank 0 .*SIGSEGV"] if dies else []
    assert all(re.search(*pair) for pair in zip(signals, errors, strict=True)), errors
    assert sum("ready again" in message for message in messages) == dies


def test_gpus_are_enough_and_those_of_replicas_are_disjoint(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"2 replicas of 2 ranks need 4 GPUs, and this host has 3.*RAY_ADDRESS"):
        cluster_connection(ReplicaOptions(2), 2, debug=False).__enter__()
    with cluster_connection(ReplicaOptions(1), 3, debug=False):
        pass
    made = []
    monkeypatch.setattr("para_core.fleet.replicas.LocalReplica", lambda *_, **options: made.append(options))
    make_replicas(RECIPE, ReplicaOptions(2), 2)
    assert [list(options["devices"]) for options in made] == [[0, 1], [2, 3]]
