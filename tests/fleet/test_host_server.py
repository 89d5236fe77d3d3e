"""``para_core serve`` on one host and on Ray: what it answers while it loads and serves, its log, and its processes."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from para_core.cli.app import run
from para_core.fleet.pipeline_info import find_tiny_flux
from tests.fleet.commands import LOGGED, messages, serve
from tests.fleet.test_server import PATH, answer_of, ask, get, start, until

FIELDS = {"prompt": "a large red circle", "size": "64x48", "steps": 3, "seed": 7}


def rank_processes(command):
    """Return the ranks that the command started, or those on Ray, found by the name that Ray gives them."""
    named = [(process, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    on_ray = [process for process, words in named if words and words[0].startswith("ray::Rank")]
    return on_ray or psutil.Process(command.process.pid).children()


def data_of(port, **fields):
    status, _, body = ask(port, {**FIELDS, **fields})
    assert status == 200, body
    return body["data"]


def require_in_order(logged, *expected):
    """Require a line of each level and words in this order."""
    lines = iter(logged)
    for level, *words in expected:
        assert any(at == level and all(word in text for word in words) for at, text in lines), (level, words)


ENDED = ("INFO", "ended by SIGTERM")
STARTED = [("INFO", "starting", "FluxPipeline"), ("INFO", "loaded component 7 of 7"), ("INFO", "ready after")]


@pytest.mark.slow
def test_one_rank_needs_no_second_process(free_port):
    port = free_port
    with serve("--ranks", 1, "--port", port, "--warmup", "64x48") as command:
        command.read_until("component 1 of 7")
        assert ask(port, FIELDS)[0] == get(port, "/health")[0] == 503
        command.read_until(f"http://127.0.0.1:{port}/")
        assert rank_processes(command) == []
        assert data_of(port) == data_of(port) != data_of(port, seed=8)
        assert ask(port, {**FIELDS, "steps": 0}, X_Request_Id="bad")[0] == 400
        logged = messages(command.end())
    good = [("INFO", "warmed up for 64x48"), ("INFO", "is the first"), ("INFO", f"POST {PATH}", "200", " s")]
    require_in_order(logged, *STARTED[:2], *good, ("WARNING", "bad", "400", "refused", "'steps'"), ENDED)
    assert sum("loaded component 3 of 7" in text for _, text in logged) == 1


def test_used_port_and_broken_model_end_with_a_sentence(free_port, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", free_port)):
        assert run(["serve", "--port", str(free_port), "--ranks", "1"]) == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1].startswith(f"error: port {free_port} of 127.0.0.1 cannot be used")
    assert "loaded" not in shown
    broken = Path(shutil.copytree(find_tiny_flux(), tmp_path / "broken"))
    weights = next((broken / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    assert run(["serve", "--model", str(broken), "--port", str(free_port), "--ranks", "1"]) == 1
    assert "Unable to load weights" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("address", ["", "local"])
def test_the_command_logs_what_happens_until_it_is_told_to_end(free_port, address):
    port = free_port
    with serve("--ranks", 2, "--port", port, "--queue", 0, "--memory", 0.06, RAY_ADDRESS=address) as command:
        command.read_until(f"http://127.0.0.1:{port}/")
        assert len(rank_processes(command)) == 2
        assert b"may hold 0.06 GB" in json.dumps(ask(port, {**FIELDS, "size": "1984x1984"})[2]).encode()
        cancelled = start(port, {**FIELDS, "steps": 200}, X_Request_Id="cancelled")
        until(lambda: ask(port, None, method="DELETE", path=f"{PATH}/cancelled")[0] == 200)
        status, _, body = answer_of(cancelled)
        assert (status, "cancelled" in str(body)) == (409, True)
        long = start(port, {**FIELDS, "steps": 200}, X_Request_Id="long")
        time.sleep(2)
        rank_processes(command)[0].kill()
        status, _, body = answer_of(long)
        assert (status, "SIGKILL" in str(body)) == (500, True)
        command.read_until("ready again")
        process = rank_processes(command)[0]
        os.kill(process.pid, signal.SIGSEGV)  # while no request runs
        command.read_until("ready again")
        assert ask(port, FIELDS, X_Request_Id="last")[0] == 200
        ranks = rank_processes(command)
        # Ray prints lines of its own.
        lines = command.end(silent=not address)
        logged = messages([line for line in lines if LOGGED.fullmatch(line) or not address])
        assert psutil.wait_procs(ranks, 30)[1] == []

    died, again = ("ERROR", "rank", "SIGKILL"), [("INFO", "restarting"), ("INFO", "ready again after")]
    require_in_order(logged, *STARTED, died, *again, ("ERROR", "rank", "SIGSEGV", str(process.pid)), *again, ENDED)
    require_in_order(logged, ("ERROR", "long", "500", "SIGKILL"))
