"""Signals: the first Ctrl-C of a call asks the ranks to stop, and Ray leaves the program's handler of SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_interrupt_calls(function: Callable[[], None]) -> Iterator[None]:
    """Inside this context, let the first SIGINT call ``function``, and each further one raise
    KeyboardInterrupt.

    Does nothing outside the main thread, which alone gets signals, and if the program has a handler of its
    own.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        function()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM at the end of this context, inside which ``ray.init`` replaces it.

    A handler that a library has installed below Python cannot be installed again: if Ray has replaced it, the
    default takes its place. Does nothing outside the main thread, which alone may set handlers. Ray replaces
    none of Python's there; for the one that it then installs below Python see ``fleet/http/pool.py``.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            if before is not None:
                signal.signal(signal.SIGTERM, before)
            elif signal.getsignal(signal.SIGTERM) is not None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
