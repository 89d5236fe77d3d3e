"""Settings that the command changes for its process."""

import logging
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def settings_of_this_process() -> Iterator[None]:
    """The command quiets libraries for the whole process, which is its own elsewhere."""
    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)
