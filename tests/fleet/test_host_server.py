"""``para_core serve`` on one host: what it answers while it loads and serves, its log, and its processes."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.fleet.commands import messages, serve

PATH = "/v1/images/generations"
FIELDS = {"prompt": "a large red circle", "size": "64x48", "steps": 3, "seed": 7}


@pytest.fixture
def port():
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, body, *, method="POST", path=PATH, **headers):
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request(method, path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def rank_processes(command):
    return psutil.Process(command.process.pid).children()


@pytest.mark.slow
def test_one_rank_needs_no_second_process(port):
    with serve("--ranks", 1, "--port", port, "--warmup", "64x48") as command:
        command.read_until("component 1 of 7")
        assert ask(port, FIELDS)[0] == 503
        assert ask(port, None, method="GET", path="/health")[0] == 503
        command.read_until(f"http://127.0.0.1:{port}/")
        assert rank_processes(command) == []
        first, second = (ask(port, FIELDS) for _ in range(2))
        assert first[0] == 200
        assert json.loads(first[1])["data"] == json.loads(second[1])["data"]
        logged = messages(command.end())
    assert any("warmed up for 64x48" in text for _, text in logged)
    assert sum("loaded component 3 of 7" in text for _, text in logged) == 1


@pytest.mark.slow
def test_used_port_and_broken_model_end_with_a_sentence(port, tmp_path):
    with socket.create_server(("127.0.0.1", port)), serve("--port", port, "--ranks", 1) as command:
        lines = [*command.process.stderr]
        assert command.process.wait(60) == 1
    assert lines[-1].startswith(f"error: port {port} of 127.0.0.1 cannot be used")
    assert not any("loaded" in line for line in lines)


@pytest.mark.long
def test_the_command_logs_what_happens_until_it_is_told_to_end(port):
    with serve("--ranks", 2, "--port", port, "--queue", 0) as command:
        command.read_until(f"http://127.0.0.1:{port}/")
        assert len(rank_processes(command)) == 2
        assert ask(port, FIELDS, X_Request_Id="good")[0] == 200
        assert ask(port, {**FIELDS, "steps": 0}, X_Request_Id="bad")[0] == 400
        ask(port, None, method="GET", path="/health")
        with ThreadPoolExecutor(1) as threads:
            long = threads.submit(ask, port, {**FIELDS, "steps": 200}, X_Request_Id="long")
            time.sleep(2)
            rank_processes(command)[0].kill()
            status, body = long.result()
        assert (status, b"SIGKILL" in body) == (500, True)
        command.read_until("ready again")
        process = rank_processes(command)[0]
        os.kill(process.pid, signal.SIGSEGV)  # while no request runs
        command.read_until("ready again")
        assert ask(port, FIELDS, X_Request_Id="last")[0] == 200
        logged = messages(command.end())

    def index_of(level, *words):
        return next(i for i, (at, text) in enumerate(logged) if at == level and all(word in text for word in words))

    order = [
        index_of("INFO", "starting", "FluxPipeline"),
        index_of("INFO", "loaded component 7 of 7"),
        index_of("INFO", "ready after"),
        index_of("INFO", "good", "first"),
        index_of("INFO", "good", f"POST {PATH}", "200", " s"),
        index_of("WARNING", "bad", "400", "refused", "'steps'"),
        index_of("ERROR", "rank", "SIGKILL"),
        index_of("INFO", "restarting"),
        index_of("INFO", "ready again after"),
        index_of("ERROR", "rank", "SIGSEGV", str(process.pid)),
        index_of("INFO", "ended by SIGTERM"),
    ]
    assert order == sorted(order)
    assert index_of("ERROR", "long", "500", "SIGKILL")
    assert not any("/health" in text for _, text in logged)


@pytest.mark.long
def test_two_replicas_answer_at_once_and_a_client_that_leaves_frees_its_replica(port):
    def health():
        return json.loads(ask(port, None, method="GET", path="/health")[1])["ready"]

    def accepted():
        lines = ask(port, None, method="GET", path="/metrics")[1].decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("para_core_requests_accepted "))

    with serve("--replicas", 2, "--ranks", 1, "--port", port) as command:
        command.read_until(f"http://127.0.0.1:{port}/")
        assert (health(), len(rank_processes(command))) == (2, 2)
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda _: ask(port, FIELDS), range(4)))
        assert [status for status, _ in answers] == [200] * 4
        assert len({json.loads(body)["data"][0]["b64_json"] for _, body in answers}) == 1
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", PATH, json.dumps({**FIELDS, "steps": 200}), {"Content-Type": "application/json"})
        while accepted() < 1:
            time.sleep(0.1)
        connection.close()
        deadline = time.monotonic() + 60
        while accepted() > 0:
            assert time.monotonic() < deadline, "the request still runs"
            time.sleep(0.2)
        rank_processes(command)[1].kill()
        while health() == 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while health() < 2:
            assert time.monotonic() < deadline + 120
            time.sleep(0.2)
        command.end()
