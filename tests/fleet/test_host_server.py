"""``para_core serve`` on one host and on Ray: what it answers while it loads and serves, its log, and its processes."""

import base64
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest
import uvicorn

from para_core.cli.app import run
from para_core.fleet.pipeline_info import find_tiny_flux
from tests.fleet.commands import LOGGED, messages, serve
from tests.fleet.test_server import PATH, answer_of, ask, get, start, until
from tests.scripts import command_on_ranks
from zoo.video import PIPELINE as WAN

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_videos_have_the_bytes_of_generate(rank_pool, tmp_path, free_port):
    # This size has an odd number of tokens, 27.
    fields = {"frames": 9, "steps": 2, "seed": 5}
    named = [word for name, value in fields.items() for word in (f"--{name}", value)]
    generate = ["generate", "--model", WAN, "--prompt", "a red circle", "--size", "48x48", *named]
    command_on_ranks(rank_pool, *map(str, [*generate, "--out", tmp_path / "generated"]))
    options = ["--ranks", 2, "--port", free_port, "--model", WAN, "--out", tmp_path / "results"]
    with (
        serve(*options) as command,
        openai.OpenAI(base_url=f"http://127.0.0.1:{free_port}/v1", api_key="none", max_retries=0) as client,
    ):
        command.read_until(f":{free_port}/")
        started = client.videos.create(prompt="a red circle", size="48x48", extra_body=fields)
        until(lambda: client.videos.retrieve(started.id).status == "completed", 300)
        content = client.videos.download_content(started.id).read()
        assert not [text for level, text in messages(command.end()) if level == "ERROR"]
    assert content == (tmp_path / "generated" / "00001.mp4").read_bytes()


# -- An application of one's own, as docs/serving.md shows it.


def own_ranks():
    """Return the process ids of the ranks that this process started."""
    return [child.pid for child in psutil.Process().children() if "RANK" in child.environ()]


@pytest.fixture
def mounted():
    """Run the application of the page on the small model, and return its port."""
    (program,) = [block for block in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "Pool" in block]
    program = program.replace("black-forest-labs/FLUX.1-dev", str(find_tiny_flux()))
    small = '"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64, "prompt": prompt'
    names: dict[str, object] = {}
    exec(compile(program.replace('"prompt": prompt', small), str(PAGE), "exec"), names)
    web = uvicorn.Server(uvicorn.Config(names["app"], port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    until(lambda: web.started, 120)
    yield web.servers[0].sockets[0].getsockname()[1]
    web.should_exit = True
    thread.join()
    assert own_ranks() == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_own_endpoint_and_mounted_server_give_the_same_image_also_after_a_death(mounted):
    port, path, key = mounted, f"/flux{PATH}", {"Authorization": "Bearer secret"}
    fields = {**FIELDS, "steps": 2, "max_sequence_length": 64, "seed": 3}
    draw = "/draw?prompt=a+large+red+circle"
    status, headers, drawn = ask(port, None, path=f"{draw}&seed=3")
    assert (status, headers["content-type"]) == (200, "image/png")
    # Without a seed, each call has another one.
    assert len({drawn, ask(port, None, path=draw)[2], ask(port, None, path=draw)[2]}) == 3
    assert ask(port, fields, path=path)[0] == 401
    running = start(port, {**fields, "steps": 200}, path=path, **key)
    time.sleep(2)
    os.kill(own_ranks()[-1], signal.SIGKILL)
    assert answer_of(running)[0] == 500
    answer = ask(port, fields, path=path, **key)[2]
    assert base64.b64decode(answer["data"][0]["b64_json"]) == drawn
    answer = ask(port, {**fields, "response_format": "url"}, path=path, X_Request_Id="mine", **key)[2]
    assert answer["data"][0]["url"] == f"http://127.0.0.1:{port}/flux/v1/files/mine/0"
    assert get(port, "/flux/v1/files/mine/0", **key)[0] == get(port, "/flux/docs")[0] == 200
