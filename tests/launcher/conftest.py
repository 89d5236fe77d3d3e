"""Launched pipelines that the tests of this folder share, and programs that launch their own."""

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from para_core import launch
from tests.launcher.loads import load_flux, load_steps


@pytest.fixture(scope="package")
def steps():
    """Return a ``Steps`` on two ranks. A test may end its ranks: the next call starts new ones."""
    with launch(load_steps, ranks=2, progress=False) as pipe:
        yield pipe


@pytest.fixture(scope="package")
def flux_and_lines():
    """Return the small FLUX on two ranks, and the lines that were shown while it was loaded."""
    with redirect_stderr(io.StringIO()) as lines:
        pipe = launch(load_flux, ranks=2)
    with pipe:
        yield pipe, lines.getvalue()


@pytest.fixture(scope="package")
def flux(flux_and_lines):
    """Return the small FLUX on two ranks."""
    return flux_and_lines[0]


@pytest.fixture(scope="package")
def alone():
    """Return the small FLUX in this process, on one device."""
    return load_flux()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a program, given its text."""

    def start_program(text):
        (tmp_path / "program.py").write_text(text)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        return subprocess.Popen([sys.executable, tmp_path / "program.py"], env=environment, **pipes)

    return start_program


@pytest.fixture(autouse=True)
def sigint_is_handled():
    """Handle SIGINT as Python does. If pytest runs in the background of a shell, it ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
