"""``para_core serve`` on one rank: what it answers while it loads and serves, its log, and its processes."""

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from para_core.cli.app import run
from para_core.fleet.http.host_server import run_server
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.result_files import lock_folder
from tests.fleet.commands import find_free_port, messages, serve
from tests.fleet.test_server import PATH, ask, get

FIELDS = {"prompt": "a large red circle", "size": "64x48", "steps": 3, "seed": 7}
# Lines of the log in this order, each with its level and words.
LOGGED = [
    *(("INFO", "starting", "FluxPipeline"), ("INFO", "loaded component 7 of 7"), ("INFO", "warmed up for 64x48")),
    *(("INFO", "is the first"), ("INFO", f"POST {PATH}", "200", " s"), ("WARNING", "bad", "400", "refused", "'steps'")),
    ("INFO", "ended by SIGTERM"),
]


@pytest.mark.slow
def test_one_rank_needs_no_second_process():
    port = find_free_port()
    with serve("--ranks", 1, "--port", port, "--warmup", "64x48") as command:
        command.read_until("component 1 of 7")
        assert ask(port, FIELDS)[0] == get(port, "/health")[0] == 503
        command.read_until(f"http://127.0.0.1:{port}/")
        assert psutil.Process(command.process.pid).children() == []
        first, again, other = (ask(port, {**FIELDS, "seed": seed})[2]["data"] for seed in (7, 7, 8))
        assert first == again != other
        assert ask(port, {**FIELDS, "steps": 0}, X_Request_Id="bad")[0] == 400
        logged = messages(command.end())
    lines = iter(logged)
    for level, *words in LOGGED:
        assert any(at == level and all(word in text for word in words) for at, text in lines), words
    assert sum("loaded component 3 of 7" in text for _, text in logged) == 1


def test_used_port_used_folder_and_broken_model_end_with_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = SimpleNamespace(kind="video", pipeline="", videos=tmp_path, ranks=1)
    with lock_folder(tmp_path), pytest.raises(RuntimeError, match="another para_core"):
        run_server(options, None, options, options, host="127.0.0.1", port=0, ready=None)
    port = find_free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert run(["serve", "--port", str(port), "--ranks", "1"]) == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1].startswith(f"error: port {port} of 127.0.0.1 cannot be used")
    assert "loaded" not in shown
    broken = Path(shutil.copytree(find_tiny_flux(), tmp_path / "broken"))
    weights = next((broken / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    assert run(["serve", "--model", str(broken), "--port", str(port), "--ranks", "1"]) == 1
    assert "Unable to load weights" in capsys.readouterr().err.splitlines()[-1]
