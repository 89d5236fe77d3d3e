"""Exceptions of a call on ranks, and how a future of asyncio gets the outcome of one.

Tests: tests/launcher/test_failures.py, tests/launcher/test_cancel.py.
"""

from __future__ import annotations

import asyncio
from typing import Any


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


def set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """End ``future`` with ``error``, or with ``result`` if that is None. Called in the event loop of the future,
    because no other thread may touch it.
    """
    if future.done():
        return  # The task that waited for it was cancelled.
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        # As from next() on a module without parameters. A future refuses it, and would never end. It becomes
        # the cause of a RuntimeError, as if a coroutine had raised it.
        accepted = RuntimeError("the call raised StopIteration.")
        accepted.__cause__ = error
        future.set_exception(accepted)
    else:
        future.set_exception(error)
