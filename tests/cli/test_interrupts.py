"""Ctrl-C and SIGTERM end a command in any state with one sentence, and leave no process."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from para_core.cli.signals import Terminated, terminable

pytestmark = pytest.mark.slow


@pytest.fixture
def free_port():
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


ROOT = Path(__file__).parents[2]
LONG = ["--prompt", "a red circle", "--size", "32x32", "--steps", "1000000"]
# Much more than a command needs, also on a busy machine.
SECONDS = 20
# A program that calls the command with a transformer whose first step never ends, in code that looks at no signal.
STUCK = """
import ctypes, sys
from para_core.__main__ import main
import para_core.fleet.rank as rank

def generate(*args):
    print("stuck", file=sys.stderr, flush=True)
    libc = ctypes.CDLL(None)
    while True:
        libc.sleep(3600)

rank.generate = generate
main()
"""


def run_until(text, seconds, words, number):
    """Run a command until a line of its output has ``text``, and ``seconds`` longer; then send it a signal.

    Return its exit code, and the lines that follow. None of its processes may remain.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *words], start_new_session=True, **options) as command:
        late = threading.Timer(300, command.kill)
        late.start()
        try:
            lines = []
            for line in command.stdout:
                lines.append(line)
                if text in line:
                    break
            time.sleep(seconds)
            processes = psutil.Process(command.pid).children(recursive=True)
            # As a terminal sends it: to all processes of the command's group.
            os.killpg(command.pid, number)
            assert command.wait(SECONDS) is not None
            _, alive = psutil.wait_procs(processes, SECONDS)
            assert not alive
        finally:
            late.cancel()
            command.kill()
        return command.returncode, command.stdout.read().splitlines()


def sentences(lines):
    """Return lines that are no progress of loading."""
    return [line for line in lines if not line.startswith(("load", "parallel", "starting", "moving", "generating"))]


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_while_libraries_are_imported(tmp_path, seconds):
    words = ["-m", "para_core", "generate", *LONG, "--out", str(tmp_path)]
    code, lines = run_until("importing torch", seconds, words, signal.SIGINT)
    assert (code, lines) == (130, ["interrupted"])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (1, "loaded component 2"),
        pytest.param(1, "generating", marks=pytest.mark.long),
        (2, "starting 2 ranks"),
        pytest.param(2, "loaded component 2", marks=pytest.mark.long),
        pytest.param(2, "generating", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("number", "code", "sentence"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "ended by SIGTERM", marks=pytest.mark.long),
    ],
)
def test_generate(tmp_path, ranks, text, number, code, sentence):
    words = ["-m", "para_core", "generate", *LONG, "--ranks", str(ranks), "--out", str(tmp_path)]
    ended, lines = run_until(text, 1.0, words, number)
    assert ended == code
    said, results = sentences(lines)
    assert said == f"{sentence}: run the same command again to continue."
    assert results.startswith("0 generated in ")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (1, "loaded component 2"),
        pytest.param(1, "answers on", marks=pytest.mark.long),
        pytest.param(2, "starting 2 ranks", marks=pytest.mark.long),
        pytest.param(2, "loaded component 2", marks=pytest.mark.long),
        (2, "answers on"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_serve(ranks, text, number, free_port):
    words = ["-m", "para_core", "serve", "--ranks", str(ranks), "--port", str(free_port)]
    code, lines = run_until(text, 0.5, words, number)
    assert code == 0
    (said,) = [line for line in lines if ": replica 0: " not in line]
    assert ("interrupted" if number == signal.SIGINT else "ended by SIGTERM") in said


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_serve_with_a_request_that_runs(ranks, free_port):
    url = f"http://127.0.0.1:{free_port}/v1/images/generations"
    body = json.dumps({"prompt": "a", "size": "64x48", "steps": 200}).encode()
    answers = []

    def ask():
        while not answers:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            try:
                answers.append(urllib.request.urlopen(request, timeout=100).status)
            except urllib.error.HTTPError as error:
                if error.code != 503:  # else it loads
                    return
                time.sleep(0.1)
            except (OSError, http.client.HTTPException):
                if process.poll() is not None:
                    return
                time.sleep(0.1)

    words = ["-m", "para_core", "serve", "--ranks", str(ranks), "--port", str(free_port)]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        code, lines = run_until("is the first", 0.5, words, signal.SIGINT)
    finally:
        process.kill()
        process.wait()
    thread.join()
    assert (code, answers) == (0, [])
    (said,) = lines
    assert "interrupted" in said and "1 requests were not finished" in said


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_bench(ranks):
    words = ["-m", "para_core", "bench", *LONG, "--ranks", str(ranks)]
    code, lines = run_until("parallelizing" if ranks > 1 else "loaded component 7", 2.0, words, signal.SIGINT)
    assert (code, sentences(lines)) == (130, ["interrupted: there are no figures."])


def test_in_a_step_that_sees_no_signal(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(STUCK)
    words = [str(program), "generate", *LONG, "--out", str(tmp_path / "out")]
    code, lines = run_until("stuck", 0.5, words, signal.SIGINT)
    assert code == 130
    assert re.match("interrupted: run", sentences(lines)[0])


def test_one_end_is_reported_once():
    reported = []
    with pytest.raises(Terminated), terminable(lambda end: reported.append(end) or 0):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(5)
    time.sleep(1.5)
    assert reported == []
    assert signal.set_wakeup_fd(-1) == -1
