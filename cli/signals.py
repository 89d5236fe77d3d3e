"""The end of a command by Ctrl-C or SIGTERM: with one sentence, and with the shell's exit code.

``para_core generate`` and ``bench`` end within about two seconds, because they pass ``report`` to
:func:`terminable`. ``para_core serve`` handles signals in its event loop
(:mod:`para_core.fleet.http.host_server`), and takes only :class:`SignalCode` from here. Tests:
tests/cli/test_interrupts.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from para_core.cli.torchrun import in_torchrun

# Seconds in which the main thread can end the command by itself, before another thread ends the process.
_PATIENCE_SECONDS = 1.0


class SignalCode(int):
    """Exit code of a command that a signal has ended.

    ``para_core/__main__.py`` then ends the process at once: all is done, and the interpreter's own end takes
    seconds once torch is imported.
    """


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM. Like Ctrl-C it ends the command, and is no error of the current request."""


def describe_signal(end: KeyboardInterrupt) -> tuple[str, SignalCode]:
    """Return the message and the exit code, 128 and the number of the signal, for ``end``."""
    if isinstance(end, Terminated):
        return "ended by SIGTERM", SignalCode(143)
    return "interrupted", SignalCode(130)


@contextmanager
def terminable(report: Callable[[KeyboardInterrupt], int] | None = None) -> Iterator[None]:
    """Inside this context, raise KeyboardInterrupt on Ctrl-C, and :class:`Terminated` on SIGTERM.

    If SIGINT is ignored, as in a background job of a shell, it stays ignored.

    With ``report``: if the context has not ended a second later, as in the middle of a long step or of a
    library that ignores the exception, ``report`` is called in another thread, and the process ends with the
    exit code that it returns.

    Python ignores what is raised in a callback of a weak reference or in ``__del__``. If a signal arrives
    there, it is sent again. Does nothing on torchrun's ranks, and outside the main thread.
    """
    if in_torchrun() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: Any) -> None:
        raise Terminated

    def send_again(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            report_ignored(ignored)
            return
        signum = signal.SIGINT
        if ignored.exc_type is Terminated:
            signum = signal.SIGTERM
        # By then the callback, in which Python calls this function, has ended.
        threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()

    previous = signal.signal(signal.SIGTERM, end)
    interrupts = signal.getsignal(signal.SIGINT)
    if interrupts is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    report_ignored, sys.unraisablehook = sys.unraisablehook, send_again
    try:
        if report is None:
            yield
        else:
            with _ending_late(report):
                yield
    finally:
        sys.unraisablehook = report_ignored
        _restore_handler(signal.SIGINT, interrupts, signal.default_int_handler)
        _restore_handler(signal.SIGTERM, previous, signal.SIG_DFL)


def _restore_handler(number: signal.Signals, previous: Any, default: Any) -> None:
    """Install the handler ``previous``, or ``default`` if it is None: a library has then installed its own
    below Python, which Python cannot install again.
    """
    if previous is None:
        previous = default
    signal.signal(number, previous)


@contextmanager
def _ending_late(report: Callable[[KeyboardInterrupt], int]) -> Iterator[None]:
    """If a signal arrives in this context, and it lasts a second longer, call ``report`` and end the process."""
    # Python's own handlers run in the main thread between two instructions. The interpreter's C handler
    # writes each signal to this socket at once, also while the main thread runs in a library.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    ended = threading.Event()

    def watch() -> None:
        number = 0
        while number not in (signal.SIGINT, signal.SIGTERM):
            received = reader.recv(1)
            if not received:
                return
            number = received[0]
        if ended.wait(_PATIENCE_SECONDS):
            return
        end = KeyboardInterrupt()
        if number == signal.SIGTERM:
            end = Terminated()
        code: int = describe_signal(end)[1]
        try:
            code = report(end)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Also if report or a closed terminal raises: nothing else ends the process.
            os._exit(code)

    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="para_core signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()
        reader.close()
