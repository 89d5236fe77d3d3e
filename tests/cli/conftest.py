"""Settings that the command changes for its process, and the width of its terminal."""

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


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # In 80 columns a message is wrapped inside a word if a temporary folder's path is long.
    monkeypatch.setenv("COLUMNS", "2000")
