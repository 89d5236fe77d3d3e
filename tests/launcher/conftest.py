"""Launched pipelines that the tests of a module share."""

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
