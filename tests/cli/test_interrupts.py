"""Ctrl-C and SIGTERM end a command in any state with one sentence, and leave no process."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from para_core.cli.signals import terminable
from tests.fleet.commands import find_free_port

pytestmark = pytest.mark.slow

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
    while True:
        ctypes.CDLL(None).sleep(3600)

rank.generate_request = generate
main()
"""


def run_until(text, seconds, words, number, port=None):
    """Run a command until a line of its output has ``text``, and ``seconds`` longer; then send it a signal.

    With a port it is sent a long request once it answers. Return its exit code, and the lines that follow, without
    progress. None of its processes may remain. It has a RANK as on a cluster: without WORLD_SIZE it is no rank.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "500", "RANK": "1"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *words], start_new_session=True, **options) as command:
        late = threading.Timer(300, command.kill)
        late.start()
        try:
            connection = None
            for line in command.stdout:
                if port is not None and "answers on" in line:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
                    body = json.dumps({"prompt": "a", "size": "64x48", "steps": 200})
                    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
                if text in line:
                    break
            time.sleep(seconds)
            processes = psutil.Process(command.pid).children(recursive=True)
            # As a terminal sends it: to all processes of the command's group.
            os.killpg(command.pid, number)
            assert command.wait(SECONDS) is not None
            assert psutil.wait_procs(processes, SECONDS)[1] == []
            if connection is not None:
                with contextlib.suppress(OSError, http.client.HTTPException):  # The end may cut the connection.
                    assert connection.getresponse().status >= 400
                connection.close()
        finally:
            late.cancel()
            command.kill()
        progress = ("load", "parallel", "starting", "moving", "generating")
        lines = command.stdout.read().splitlines()
        return command.returncode, [line for line in lines if not line.startswith(progress) and ": replica" not in line]


INTERRUPTED = r"interrupted: run the same command again to continue\.\n0 generated in "
# Each row has a command, its ranks, the text and seconds until the signal, the signal, the exit code, and what is said.
ROWS = [
    ("generate", 1, "importing torch", 0.7, "SIGINT", 130, "interrupted$"),
    pytest.param("generate", 2, "starting 2 ranks", 1.0, "SIGINT", 130, INTERRUPTED, marks=pytest.mark.long),
    ("request", 2, "is the first", 0.5, "SIGTERM", 0, r"[^\n]*ended by SIGTERM[^\n]*1 requests were not finished"),
]


@pytest.mark.parametrize(("command", "ranks", "text", "seconds", "name", "code", "says"), ROWS)
def test_signal_ends_a_command(tmp_path, command, ranks, text, seconds, name, code, says):
    port = find_free_port()
    words = ["-m", "para_core", "serve" if command == "request" else command, "--ranks", str(ranks)]
    words += ["--port", str(port)] if words[2] == "serve" else LONG
    words += ["--out", str(tmp_path)] if command == "generate" else []
    ended, lines = run_until(text, seconds, words, getattr(signal, name), port if command == "request" else None)
    assert ended == code, lines
    assert len(lines) == says.count(r"\n0 generated") + 1
    assert re.match(says, "\n".join(lines))


# A program that ignores the signal's exception, and whose report fails.
FAILING_REPORT = """
import contextlib, sys, time
from para_core.cli.signals import terminable

def report(end):
    raise OSError("the terminal is closed")

with terminable(report):
    print("stuck", file=sys.stderr, flush=True)
    while True:
        with contextlib.suppress(BaseException):  # as a library that ignores the exception
            time.sleep(3600)
"""
# The beginning of the command, which imports libraries, after its terminal was closed.
IMPORTING = """
import os, time, para_core.__main__
para_core.__main__._end_at_once_on_signals()
print("stuck", flush=True)
os.close(2)
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("text", "name", "code", "says"),
    [
        (FAILING_REPORT, "SIGTERM", 143, ""),
        (STUCK, "SIGINT", 130, "interrupted: run"),
        (IMPORTING, "SIGTERM", 143, "$"),
    ],
    ids=["its report fails", "its step sees no signal", "its terminal is closed"],
)
def test_stuck_process_ends(tmp_path, text, name, code, says):
    program = tmp_path / "program.py"
    program.write_text(text)
    words = [str(program), "generate", *LONG, "--out", str(tmp_path / "out")]
    ended, lines = run_until("stuck", 0.5, words, getattr(signal, name))
    assert ended == code and re.match(says, "\n".join(lines)), lines


def test_handler_that_python_cannot_install_again_is_replaced_by_the_default(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        with terminable():
            pass
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
