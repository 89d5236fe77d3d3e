"""Launched pipelines that the tests of a module share."""

import signal

import pytest

from para_core import launch
from tests.launcher.loads import load_flux, load_steps


@pytest.fixture(scope="module")
def steps():
    """Return a ``Steps`` on two ranks."""
    with launch(load_steps, ranks=2, progress=False) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def flux():
    """Return the small FLUX on two ranks."""
    with launch(load_flux, ranks=2, progress=False) as pipe:
        yield pipe


@pytest.fixture(autouse=True)
def sigint_is_handled():
    """Handle SIGINT as Python does. If pytest runs in the background of a shell, it ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
