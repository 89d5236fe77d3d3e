"""Lines that the caller prints while ranks load, and the progress bars of its calls.

``handle.py`` makes one for each call, and ``running_call.py`` calls it with what the first rank reports.
`fleet/engine.py` and `fleet/local_replica.py` have others. Tests: tests/launcher/test_calls.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


class Display:
    """Lines and progress bars on standard error.

    ``progress`` is whether to show them. It may also be a function that is called with the numbers of
    finished and of all steps; then only :meth:`notice` prints.
    """

    def __init__(self, progress: bool | Callable[[int, int | None], None]) -> None:
        self._progress = progress
        self._bars: dict[int, Any] = {}

    def line(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Print a line about progress, unless none is to be shown.
        A counted phase has ``done`` of ``total`` parts.
        """
        if self._progress is True:
            self.notice(text)

    def notice(self, text: str) -> None:
        """Print a line that the user must know of."""
        sys.stderr.write(f"para_core: {text}\n")
        sys.stderr.flush()

    def open_bar(self, number: int, total: int | None, options: Mapping[str, Any]) -> None:
        """Begin a bar with the options that the user has set by ``set_progress_bar_config``."""
        if self._progress is True:
            from tqdm.auto import tqdm

            self._bars[number] = tqdm(total=total, **options)

    def step(self, number: int, done: int, total: int | None) -> None:
        """Show that ``done`` steps are finished."""
        if callable(self._progress):
            self._progress(done, total)
        elif number in self._bars:
            self._bars[number].update(done - self._bars[number].n)

    def close_bar(self, number: int) -> None:
        """Close a bar, which stays visible."""
        if number in self._bars:
            self._bars.pop(number).close()

    def close(self) -> None:
        """Close all bars."""
        for number in list(self._bars):
            self.close_bar(number)
