"""Ctrl-C during a call: the first one calls a function, which asks the ranks to stop; the second one raises."""

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
