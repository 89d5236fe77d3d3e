"""The command ``para_core serve`` as a process, and the lines that it writes to stderr."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A line of the log: its time, level, logger and message.
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) para_core\.(\S+): (.*)\n")


class Command:
    """A running ``para_core serve``. ``lines`` has what it has written to stderr so far."""

    def __init__(self, process):
        self.process, self.lines = process, []

    def read_until(self, text):
        """Read lines until one has ``text``, and return it."""
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"ended without {text!r}:\n{''.join(self.lines)}")

    def end(self):
        """Send SIGTERM, and return all lines. The command must succeed, and write nothing to stdout."""
        self.process.send_signal(signal.SIGTERM)
        self.lines += self.process.stderr.readlines()
        assert self.process.wait(120) == 0
        assert self.process.stdout.read() == ""
        return self.lines


@contextlib.contextmanager
def serve(*arguments):
    """Yield the command. It is killed at the end, or after 400 seconds."""
    words = [sys.executable, "-m", "para_core", "serve", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as process:
        late = threading.Timer(400, process.kill)
        late.start()
        try:
            yield Command(process)
        finally:
            late.cancel()
            process.kill()


def messages(lines):
    """Return level and message of each line. Every line must be one of the log, or one that the command prints."""
    printed = ("importing torch and diffusers", " answers on http://")
    logged = [(line, LOGGED.fullmatch(line)) for line in lines if not any(text in line for text in printed)]
    assert all(match for _, match in logged), [line for line, match in logged if not match]
    return [(match[1], match[3]) for _, match in logged]


def find_free_port():
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
