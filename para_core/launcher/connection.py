"""A rank's connection to the caller: messages, the end of steps, cancellation, and the end of the process.

``rank.py`` makes it, before anything is loaded. The other end is in ``processes.py`` and ``running_call.py``.
Tests: tests/launcher/test_cancel.py, tests/launcher/test_life.py, and tests/launcher/test_failures.py for errors.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

from para_core.launcher.errors import Cancelled
from para_core.launcher.messages import RandomState, RankError
from para_core.launcher.pickling import PortableException
from para_core.launcher.wire import Body, Channel


class CallerConnection:
    """The connection of rank ``rank`` to the caller.

    A thread receives messages, so that a call can be cancelled while the main thread runs it. If the caller
    ends, the thread ends this process.
    """

    def __init__(self, channel: Channel, rank: int, ranks: int) -> None:
        self.channel, self.rank, self.ranks = channel, rank, ranks
        self.jobs = queue.SimpleQueue[tuple[tuple[Any, ...], Body]]()  # messages for the main thread
        self.replies = queue.SimpleQueue[Body]()  # of callbacks that run in the caller
        # The gloo process group of all ranks for the launcher's own exchanges, which rank.py sets after
        # join_process_group; None before, or on one rank.
        self.side_group: Any = None
        # The number of the running call, which rank.py sets; None if no call is running.
        self.call_number: int | None = None
        self._cancelled: int | None = None  # the number of the call that the caller cancelled last
        # Number of progress bars of all calls: one that is closed late must not close a bar of the next call.
        self._bars = 0
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._end_with_parent, args=(os.getppid(),), daemon=True).start()

    def _listen(self) -> None:
        """Receive messages until the caller ends, and then end this process. Runs in a thread."""
        try:
            while True:
                head, body = self.channel.receive()
                if head[0] == "cancel":
                    self._cancelled = head[1]
                elif head[0] == "reply":
                    self.replies.put(body)
                elif head[0] == "where":
                    self.channel.send(("where", self.rank), Body.of(_position()))
                else:
                    self.jobs.put((head, body))
        except (EOFError, OSError):  # OSError if the caller has ended before the answer was sent.
            end_process()

    def _end_with_parent(self, parent: int) -> None:
        """End this process once its ``parent`` has ended. Runs in a thread."""
        # A process that the caller forked keeps the connection open after the caller has ended.
        # PR_SET_PDEATHSIG is no alternative: it sends its signal when the thread ends that started this
        # process.
        while os.getppid() == parent:
            time.sleep(0.5)
        end_process()

    def report(self, *message: Any, body: Body | None = None) -> None:
        """Send a message about the running call, if this is the first rank.
        Without a running call, send nothing.
        """
        if self.rank == 0 and self.call_number is not None:
            self.channel.send((message[0], self.call_number, *message[1:]), body)

    def push(self, value: Any) -> None:
        """Send a value from the first rank to the listener of the running call."""
        if self.rank == 0:
            self.report("pushed", body=Body.of(value))

    def is_cancelled(self) -> bool:
        """Whether a message that the caller has cancelled the running call has reached this rank. False if no
        call is running.
        """
        return self.call_number is not None and self._cancelled == self.call_number

    def open_bar(self, total: int | None, options: dict[str, Any]) -> int:
        """Report a progress bar, and return its number."""
        self._bars += 1
        self.report("bar", self._bars, total, options)
        return self._bars

    def end_step(self, bar: int, done: int, total: int | None) -> None:
        """Report a finished step.
        Raise Cancelled on all ranks if the caller has cancelled the call. Collective.
        """
        if self.call_number is None:
            return
        self.report("step", bar, done, total)
        if self._agree_to_cancel():
            steps = str(done)
            if total is not None:
                steps = f"{done} of {total}"
            raise Cancelled(f"cancelled after step {steps}.")

    def _agree_to_cancel(self) -> bool:
        """Return on all ranks whether the first one has been told to cancel the call. Collective.

        The message of the caller may reach the ranks at different steps.
        """
        cancelled = self.is_cancelled()
        if self.side_group is None:
            return cancelled
        import torch
        import torch.distributed as dist

        flag = torch.tensor([cancelled], dtype=torch.uint8)
        dist.broadcast(flag, src=0, group=self.side_group)
        return bool(flag)

    def send_error(self, error: BaseException, number: int, random: RandomState) -> None:
        """Send an exception, its traceback, and the random state after it to the caller."""
        text = "".join(traceback.format_exception(error))
        # Unlike str(error), this does not raise if a method of the exception does. Notes may name this rank.
        described = traceback.TracebackException.from_exception(error)
        described.__notes__ = None
        summary = "".join(described.format_exception_only()).strip()
        if isinstance(error, SystemExit):
            error = RuntimeError(f"the rank called sys.exit({error.code!r}).")
        # Frames and causes may refer to what cannot be pickled; the text has them.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        pickled = Body.of(RuntimeError(summary))
        # An exception whose constructor takes other arguments than its args cannot be loaded as it is.
        for portable in (error, PortableException(error)):
            # Pickling and loading call the exception's own methods.
            with suppress(Exception):
                loadable = Body.of(portable)
                loadable.load()
                pickled = loadable
                break
        self.channel.send(("error", self.rank, number), Body.of(RankError(pickled, summary, text, random)))


def _position() -> tuple[bool, str]:
    """Return whether the main thread waits for other ranks, and the line of the program at which it is."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    waits = any("torch/distributed" in frame.filename for frame in frames)
    frame = next((x for x in reversed(frames) if "torch/distributed" not in x.filename), frames[-1])
    return waits, f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def end_process() -> None:
    """End this process at once, and the processes that it started, if it leads a session of its own."""
    if os.getpid() == os.getsid(0):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
