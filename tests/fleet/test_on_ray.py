"""Replicas of two ranks on Ray, and the server over them: the same bytes, cancelling at a step, a rank that dies."""

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="the extra ray is not installed: make test-fleet")

from para_core.fleet.build import build, find_model
from para_core.fleet.prompt_file import Line
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.replicas import generate_lines
from para_core.fleet.request import make_request
from para_core.fleet.work import generate
from tests.fleet.commands import serve

# Ray keeps sockets and threads open until the cluster ends, which raises warnings.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
PORT = 8123
PATH = "/v1/images/generations"
SMALL = {"size": "64x48", "steps": 3}
PROMPTS = ["a large red circle", "a blue square", "a green triangle", "a small star"]


@pytest.fixture(scope="module")
def model():
    return find_model(None)


@pytest.fixture(scope="module")
def recipe(model):
    return Recipe(model.name, mesh=(("ring", 2),), timeout=60)


@pytest.fixture(scope="module")
def server():
    """Serve with two replicas of two ranks on a cluster that the command starts."""
    size = ["--replicas", 2, "--ranks", 2, "--mesh", "ring=2", "--max-batch", 2, "--queue", 2, "--memory", 0.06]
    with serve(*size, "--request-seconds", 300, "--port", PORT, seconds=3600, RAY_ADDRESS="local") as command:
        command.read_until(f":{PORT}/")
        # Nobody reads the log, but the pipe must not become full.
        threading.Thread(target=command.process.stderr.read, daemon=True).start()
        yield


def ask(body, *, method="POST", path=PATH, port=PORT, **headers):
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request(method, path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def image(answer):
    status, body = answer
    assert status == 200, body
    return base64.b64decode(json.loads(body)["data"][0]["b64_json"])


def rank_processes():
    """Return the process ids of the ranks on this machine, found by the name that Ray gives them."""
    named = [(process.pid, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    return [pid for pid, words in named if words and words[0].startswith("ray::Rank")]


# This test runs before the server, which takes all of the cluster.
def test_prompts_finish_although_a_replica_is_killed(model, recipe, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    lines = [Line(i + 1, make_request({"prompt": PROMPTS[i % 4], **SMALL}, model, seed=i)) for i in range(8)]
    written = {}

    def write(line, result):
        written[line.number] = result.outputs[0].data
        if len(written) == 3:
            os.kill(rank_processes()[0], signal.SIGKILL)

    problems = generate_lines(lines, recipe, ReplicaOptions(2), 2, write=write)
    assert problems == []
    assert sorted(written) == list(range(1, 9))


def test_impossible_replica_ends_server_with_reason(model, tmp_path):
    broken = Path(shutil.copytree(model.name, tmp_path / "broken"))
    weights = next((broken / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with serve("--model", broken, "--ranks", 1, "--port", PORT + 12, RAY_ADDRESS="local") as command:
        lines = [*command.process.stderr]
        assert command.process.wait(120) == 1
    assert "Unable to load weights" in lines[-1]


def test_the_command_ends_while_a_replica_loads():
    before = set(rank_processes())
    with serve("--ranks", 1, "--port", PORT + 13, "--log-level", "warning", RAY_ADDRESS="local") as command:
        while not set(rank_processes()) - before and command.process.poll() is None:
            time.sleep(0.05)
        assert command.end() == []
        assert set(rank_processes()) <= before


def test_same_request_gives_same_bytes_on_any_replica(server, model, recipe):
    fields = {"prompt": PROMPTS[0], "seed": 5, **SMALL}
    with ThreadPoolExecutor(4) as threads:
        images = list(threads.map(lambda _: image(ask(fields)), range(4)))
    assert len(set(images)) == 1
    assert len(set(images[:1]) | {image(ask({**fields, "seed": 6}))}) == 2
    # The plain pipeline on one device differs only by the order of float sums.
    alone = Recipe(model.name)
    request = make_request(fields, model)
    expected = generate(build(alone), request, alone).outputs[0].data
    assert difference(images[0], expected) <= 1


def test_too_large_size_is_refused_by_planner(server):
    status, body = ask({"prompt": PROMPTS[0], "size": "1984x1984"})
    assert status == 400
    assert b"of each rank, which may hold 0.06 GB" in body


@pytest.mark.parametrize("fields", [{"size": "1x1"}, {"sigmas": []}, {"true_cfg_scale": 1e400}])
def test_refusal_of_pipeline_keeps_replica_alive(server, fields):
    before = rank_processes()
    status, body = ask({"prompt": PROMPTS[0], "steps": 2, "size": "64x48", **fields})
    assert status in (200, 400), body
    assert rank_processes() == before


def test_every_step_is_counted(server):
    before = steps_done()
    image(ask({"prompt": PROMPTS[0], **SMALL}))
    assert steps_done() == before + SMALL["steps"]


def difference(first, second):
    import io

    import numpy as np
    from PIL import Image

    pixels = [np.asarray(Image.open(io.BytesIO(data))).astype(int) for data in (first, second)]
    return np.abs(pixels[0] - pixels[1]).max()


def test_cancelled_request_stops_after_a_step(server):
    fields = {"prompt": PROMPTS[1], "seed": 1, **SMALL}
    expected = image(ask(fields))
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(ask, {**fields, "steps": 200}, X_Request_Id="long")
        other = threads.submit(ask, fields, X_Request_Id="other")
        wait_for_steps(1)
        assert ask(None, method="DELETE", path=f"{PATH}/long")[0] == 200
        status, body = long.result()
        assert status == 409
        assert b"cancelled after step" in body
        assert image(other.result()) == expected
    # Both replicas answer, also the one whose request was cancelled.
    with ThreadPoolExecutor(2) as threads:
        assert {image(answer) for answer in threads.map(ask, [fields] * 4)} == {expected}


def test_a_client_that_leaves_frees_its_replica(server):
    before, steps = cancelled(), steps_done()
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    body = json.dumps({"prompt": PROMPTS[2], **SMALL, "steps": 200})
    connection.request("POST", PATH, body, {"Content-Type": "application/json", "X-Request-Id": "leaves"})
    wait_for_steps(1)
    connection.close()
    deadline = time.monotonic() + 60
    while b"para_core_requests_accepted 0.0" not in metrics():
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.2)
    assert cancelled() == before + 1
    assert steps_done() < steps + 200


def metrics():
    return ask(None, method="GET", path="/metrics")[1]


def metric(name):
    lines = metrics().decode().splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def steps_done():
    return metric("para_core_steps_total")


def cancelled():
    return metric('para_core_requests_total{outcome="cancelled"}')


def wait_for_steps(number):
    before, deadline = steps_done(), time.monotonic() + 120
    while steps_done() < before + number:
        assert time.monotonic() < deadline, "no step was done"
        time.sleep(0.1)


def test_dying_rank_costs_its_request_and_is_replaced(server):
    fields = {"prompt": PROMPTS[3], "seed": 2, **SMALL}
    expected = image(ask(fields))
    before = rank_processes()
    assert len(before) == 4
    with ThreadPoolExecutor(2) as threads:
        long = [threads.submit(ask, {**fields, "steps": 100}) for _ in range(2)]
        wait_for_steps(2)
        os.kill(before[1], signal.SIGKILL)
        answers = [future.result() for future in long]
    statuses = sorted(status for status, _ in answers)
    assert statuses == [200, 500], answers
    assert any(b"rank" in body and b"SIGKILL" in body for _, body in answers)
    assert image(ask(fields)) == expected
    deadline = time.monotonic() + 300
    while len(rank_processes()) < 4:
        assert time.monotonic() < deadline, "the replica was not made again"
        time.sleep(1)
    with ThreadPoolExecutor(4) as threads:
        assert {image(answer) for answer in threads.map(ask, [fields] * 4)} == {expected}


def test_rank_that_dies_while_idle_is_seen_and_replaced(server):
    def ready():
        return json.loads(ask(None, method="GET", path="/health")[1])["ready"]

    def wait_for(count, seconds):
        deadline = time.monotonic() + seconds
        while ready() != count:
            assert time.monotonic() < deadline, f"not {count} replicas"
            time.sleep(0.2)

    wait_for(2, 300)
    os.kill(rank_processes()[0], signal.SIGKILL)
    wait_for(1, 20)
    wait_for(2, 300)


def test_equal_requests_are_one_batch(server):
    requests = [{"prompt": prompt, "seed": seed, **SMALL} for seed, prompt in enumerate(PROMPTS)]
    alone = [image(ask(each)) for each in requests]
    with ThreadPoolExecutor(4) as threads:
        together = [image(answer) for answer in threads.map(ask, requests)]
    assert max(difference(*pair) for pair in zip(alone, together, strict=True)) <= 1
