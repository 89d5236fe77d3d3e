"""Settings that the command changes for its process, and the width of its terminal."""

import logging
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def settings_of_this_process() -> Iterator[None]:
    """Restore warnings and logging after each test, because the command quiets libraries for its whole process."""
    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # In 80 columns a message is wrapped inside a word if a temporary folder's path is long.
    monkeypatch.setenv("COLUMNS", "2000")
