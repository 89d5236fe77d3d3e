"""Exceptions of a call on ranks that did not end by itself."""

from __future__ import annotations


class Cancelled(RuntimeError):
    """Raised by a call that ``cancel`` ended. The ranks stay usable."""


class RankDied(RuntimeError):
    """Raised if a rank's process ended, or no longer answers. The next call starts all ranks again.

    ``rank`` is the number of the rank that ended, None if it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankTraceback(Exception):
    """Cause of an exception that came from a rank. Its text is the traceback on that rank."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"
