"""Handling of Ctrl-C and SIGTERM: a command ends with a sentence and the usual exit code, 130 or 143."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from para_core.cli.ranks import in_torchrun

_INTERRUPTED, _TERMINATED = 130, 143


class _Terminated(KeyboardInterrupt):
    """Raised on SIGTERM. Like Ctrl-C it ends the command, and does not count as an error of the current request."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside this context, raise :class:`_Terminated` on SIGTERM, which would otherwise end the process silently.

    Does nothing on torchrun's ranks, and outside the main thread.
    """
    if in_torchrun() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: Any) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def describe_signal(end: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for ``end``, a KeyboardInterrupt or torchrun's SignalException."""
    by_ctrl_c = type(end) is KeyboardInterrupt or getattr(end, "sigval", None) == signal.SIGINT
    return ("interrupted", _INTERRUPTED) if by_ctrl_c else ("ended by SIGTERM", _TERMINATED)
