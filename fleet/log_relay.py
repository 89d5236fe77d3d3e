"""Log records that one process collects, and another one logs: those of Ray's actors in the caller's process.

`rank_actor.py` collects what a rank reports while it loads, and `group.py` asks for it. Ranks of this host
report by :mod:`para_core.launcher` instead. Tests: tests/fleet/test_events.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

# Number of records that wait at most. The oldest are dropped, so that a rank without a reader keeps its
# memory.
_MOST_RECORDS = 2000


class LogEntry(NamedTuple):
    """A log record that can be sent to another process."""

    created: float  # seconds since 1970
    level: int
    logger: str
    message: str


class LogRelay(logging.Handler):
    """Handler that keeps the records of this process until a reader has got them.

    A reader that asks again after an answer was lost gets the same records again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = 0  # number of the last record
        self._entries: deque[tuple[int, LogEntry]] = deque(maxlen=_MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record. Called by logging.Handler.handle, which holds ``self.lock``, as :meth:`read` does."""
        try:
            message = self.format(record)
        except Exception:
            # A message that does not fit its arguments is printed and raises nothing, as in every handler of
            # logging.
            self.handleError(record)
            return
        self._last += 1
        self._entries.append((self._last, LogEntry(record.created, record.levelno, record.name, message)))

    def read(self, position: int) -> tuple[int, list[LogEntry]]:
        """Return the next position, and the records after ``position``. Forget those up to ``position``, the
        number of the last record that the reader has got, 0 before all.
        """
        with self.lock:  # type: ignore[union-attr]
            while self._entries and self._entries[0][0] <= position:
                self._entries.popleft()
            return self._last, [entry for _, entry in self._entries]


def log_entries(entries: Iterable[LogEntry]) -> None:
    """Log records of another process in this one, with their own times."""
    for entry in entries:
        logger = logging.getLogger(entry.logger)
        if logger.isEnabledFor(entry.level):
            record = logger.makeRecord(entry.logger, entry.level, "", 0, "%s", (entry.message,), None)
            record.created, record.msecs = entry.created, entry.created % 1 * 1000
            logger.handle(record)
