"""Ctrl-C and SIGTERM, which end a command with a sentence and an exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from para_core.cli.ranks import in_torchrun

_INTERRUPTED, _TERMINATED = 130, 143


class _Terminated(KeyboardInterrupt):
    """SIGTERM. Like Ctrl-C it is no error of the current line."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`_Terminated` on SIGTERM, which would end the process without a word. Not on torchrun's ranks."""
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
    """Return how a KeyboardInterrupt, or a SignalException of torchrun, ended a command, and the exit code."""
    by_ctrl_c = type(end) is KeyboardInterrupt or getattr(end, "sigval", None) == signal.SIGINT
    return ("interrupted", _INTERRUPTED) if by_ctrl_c else ("ended by SIGTERM", _TERMINATED)
