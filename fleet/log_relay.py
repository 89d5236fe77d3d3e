"""Log records that one process collects, and another one logs: those of Ray's actors in the process of the command."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

# Name of the logger above all loggers of this package.
ROOT = "para_core"
# Number of records that wait at most. The oldest are dropped.
_MOST_RECORDS = 2000
_READ_SECONDS = 0.3


class Entry(NamedTuple):
    """A log record that can be sent to another process."""

    created: float  # seconds since 1970
    level: int
    logger: str
    message: str


class Position(NamedTuple):
    """The last record that a reader has got, and the relay that it is from."""

    relay: str = ""
    number: int = 0


class LogRelay(logging.Handler):
    """Handler that keeps the records of this process until a reader has got them.

    A reader that asks again after an answer was lost gets the same records again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name, self._last = uuid.uuid4().hex, 0
        self._entries: deque[tuple[int, Entry]] = deque(maxlen=_MOST_RECORDS)

    def attach(self, level: int) -> None:
        """Keep the records of all loggers of this package at ``level`` or above, from now on."""
        logger = logging.getLogger(ROOT)
        logger.setLevel(level)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record."""
        self.add([Entry(record.created, record.levelno, record.name, self.format(record))])

    def add(self, entries: Iterable[Entry]) -> None:
        """Keep records of another process, too."""
        with self.lock:  # type: ignore[union-attr]
            for entry in entries:
                self._last += 1
                self._entries.append((self._last, entry))

    def read(self, position: Position) -> tuple[Position, list[Entry]]:
        """Return the records after ``position``, and the position after these. Forget those before ``position``."""
        with self.lock:  # type: ignore[union-attr]
            last_read = 0
            if position.relay == self._name:
                last_read = position.number
            while self._entries and self._entries[0][0] <= last_read:
                self._entries.popleft()
            return Position(self._name, self._last), [entry for _, entry in self._entries]


def log_entries(entries: Iterable[Entry]) -> None:
    """Log records of another process in this one, with their own times."""
    for entry in entries:
        logger = logging.getLogger(entry.logger)
        if logger.isEnabledFor(entry.level):
            record = logger.makeRecord(entry.logger, entry.level, "", 0, "%s", (entry.message,), None)
            record.created, record.msecs = entry.created, entry.created % 1 * 1000
            logger.handle(record)


class LogReader:
    """Thread that reads the records of other processes by ``read``, and logs them in this process."""

    def __init__(self, read: Callable[[Position], tuple[Position, list[Entry]]]) -> None:
        self._read_after, self._ended = read, threading.Event()
        self._thread = threading.Thread(target=self._read, name="para_core log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Log the last records, and end the thread."""
        self._ended.set()
        self._thread.join(10 * _READ_SECONDS)

    def _read(self) -> None:
        position = Position()
        while True:
            last = self._ended.wait(_READ_SECONDS)
            try:
                position, entries = self._read_after(position)
                log_entries(entries)
            except Exception as error:
                # The other process may be starting or ending; its records wait there.
                logging.getLogger(__name__).debug("no records can be read: %s", error)
            if last:
                return
