"""Replicas on this host: in this process, and as processes; their results, progress, cancelling, and deaths."""

import asyncio
import io
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from PIL import Image

from para_core.fleet.build import build, find_model
from para_core.fleet.failures import RequestFailed
from para_core.fleet.outputs import Output
from para_core.fleet.prompt_file import Line
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.replicas import connected, generate_lines, make_replicas
from para_core.fleet.request import Delivery, Request, make_request
from para_core.fleet.work import generate
from para_core.launcher.errors import Cancelled, RankDied

pytestmark = pytest.mark.slow
MODEL = find_model(None)
RECIPE = Recipe(MODEL.name, timeout=60)
SMALL = {"size": "64x48", "steps": 3}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def request(prompt="a large red circle", seed=5, **fields):
    return make_request({"prompt": prompt, **SMALL, **fields}, MODEL, seed=seed)


def on_replicas(test, ranks, count=1):
    """Run a test, an async function of started replicas."""

    async def run():
        replicas = make_replicas(RECIPE, ReplicaOptions(ranks), count)
        await asyncio.gather(*[replica.start() for replica in replicas])
        try:
            return await test(*replicas)
        finally:
            for replica in replicas:
                await replica.stop()

    return asyncio.run(run())


def pixels(result):
    return np.asarray(Image.open(io.BytesIO(result.outputs[0].data))).astype(int)


@pytest.mark.parametrize("ranks", [1, 2])
def test_results_progress_and_failures(ranks):
    async def test(replica):
        assert replica.process_ids.count(os.getpid()) == (ranks == 1)
        assert len(set(replica.process_ids)) == ranks
        events = []
        (result,) = await replica.generate_batch([("a", request(seed=5))], events.append)
        assert events == [1, 2, 3]
        with pytest.raises(RequestFailed, match="prompt_2"):
            await replica.generate(Request({"prompt": "a", "height": 48, "width": 64, "prompt_2": 5}, seed=0))
        batch = [("a", request(seed=5)), ("b", request("a blue square", seed=6))]
        together = await replica.generate_batch(batch)
        assert await replica.alive()
        return result, together

    result, together = on_replicas(test, ranks)
    expected = generate(build(RECIPE), request(seed=5), RECIPE)
    assert abs(pixels(result) - pixels(expected)).max() <= 1
    assert abs(pixels(together[0]) - pixels(expected)).max() <= 1
    assert together[1].metadata["seeds"] == [6]


def test_previews_come_while_the_request_runs():
    async def test(replica):
        events = []
        previewed = make_request({"prompt": "a", "size": "64x48", "steps": 6}, MODEL, seed=1)
        previewed = type(previewed)(previewed.fields, 1, delivery=Delivery(partial_images=2))
        await replica.generate_batch([("a", previewed)], events.append)
        return events

    events = on_replicas(test, 2)
    assert [event for event in events if isinstance(event, int)] == [1, 2, 3, 4, 5, 6]
    previews = [index for index, event in enumerate(events) if isinstance(event, Output)]
    assert len(previews) == 2 and previews[1] < len(events) - 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_cancelled_request_ends_after_a_step(ranks):
    async def test(replica):
        processes, reached = replica.process_ids, asyncio.Event()

        def progress(event):
            if event == 2:
                reached.set()

        running = asyncio.ensure_future(replica.generate_batch([("long", request(steps=200))], progress))
        await reached.wait()
        replica.cancel("another")
        replica.cancel("long")
        (outcome,) = await running
        assert isinstance(outcome, Cancelled)
        # One of a batch is left out of the results, and does not end the others.
        batch = [("a", request(seed=1)), ("b", request(seed=2))]
        running = asyncio.ensure_future(replica.generate_batch(batch, lambda event: replica.cancel("a")))
        outcomes = await running
        assert [type(outcome).__name__ for outcome in outcomes] == ["Cancelled", "Result"]
        assert replica.process_ids == processes
        assert len(await replica.generate_batch([("next", request())])) == 1

    on_replicas(test, ranks)


def test_rank_that_dies_costs_its_request(caplog):
    caplog.set_level(logging.INFO, "para_core.fleet")

    async def test(replica):
        before = replica.process_ids

        def progress(event):
            if event == 2:
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
        deadline = time.monotonic() + 20
        while await replica.alive():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert not replica.running

    on_replicas(test, 2)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "rank 1 was ended by SIGKILL" in errors[0] and "rank 0 was ended by SIGSEGV" in errors[1]


def test_stopped_replica_ends_its_request_and_says_nothing(caplog):
    async def test(replica):
        running = asyncio.ensure_future(replica.generate(request(steps=200)))
        await asyncio.sleep(1)
        await replica.stop()
        with pytest.raises(RankDied, match="stopped"):
            await running

    on_replicas(test, 2)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_replica_that_cannot_load_says_why(ranks, tmp_path):
    async def start():
        (replica,) = make_replicas(Recipe(str(tmp_path)), ReplicaOptions(ranks), 1)
        with pytest.raises(RuntimeError, match="model_index"):
            await replica.start()
        assert not await replica.alive()

    asyncio.run(start())


@pytest.mark.long
def test_lines_finish_although_a_rank_is_killed():
    lines = [Line(number, request(f"{number} circles", seed=number)) for number in range(1, 7)]
    written = {}

    def write(line, result):
        written[line.number] = pixels(result)
        if len(written) == 2:
            os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)

    assert generate_lines(lines, RECIPE, ReplicaOptions(1), 2, write=write) == []
    assert sorted(written) == [1, 2, 3, 4, 5, 6]
    pipe = build(RECIPE)
    assert abs(written[4] - pixels(generate(pipe, lines[3].request, RECIPE))).max() <= 1


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"2 replicas of 2 ranks need 4 GPUs, and this host has 3.*RAY_ADDRESS"):
        connected(ReplicaOptions(2), 2, debug=False).__enter__()
    with connected(ReplicaOptions(1), 3, debug=False):
        pass


def test_devices_of_replicas_are_disjoint(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    devices = []
    monkeypatch.setattr(
        "para_core.fleet.replicas.LocalReplica", lambda *_, **options: devices.append(options["devices"])
    )
    make_replicas(RECIPE, ReplicaOptions(2), 2)
    assert [list(each) for each in devices] == [[0, 1], [2, 3]]


def test_one_host_imports_no_ray():
    program = "import sys, para_core.fleet.replicas, para_core.cli.generation; print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
