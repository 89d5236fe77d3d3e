"""Exceptions of a call on ranks. Tests: tests/launcher/test_failures.py, tests/launcher/test_cancel.py."""

from __future__ import annotations


class Cancelled(RuntimeError):
    """The error of a call that ``cancel`` ended. The ranks stay usable."""


class RankDied(RuntimeError):
    """The error of a call in which a rank's process ended, or no longer answered. The next call starts all
    ranks again.

    ``rank`` is the number of the rank that ended, None if it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankTraceback(Exception):
    """The cause of an exception that came from a rank. Its text is the traceback on that rank."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def error_for_future(error: BaseException) -> BaseException:
    """Return the exception to set on a future of asyncio for ``error``.

    A future refuses StopIteration, as from ``next()`` on a module without parameters, and would never end. It
    becomes the cause of a RuntimeError, as if a coroutine had raised it.
    """
    if not isinstance(error, StopIteration):
        return error
    accepted = RuntimeError("the call raised StopIteration.")
    accepted.__cause__ = error
    return accepted
