"""The caller's side of one call: the messages of the ranks until all have answered, and what they mean together.

``handle.py`` makes one for each call, and one for loading. What the ranks send is made in ``connection.py``
and ``rank.py``. Tests: tests/launcher/test_failures.py, tests/launcher/test_cancel.py.
"""

from __future__ import annotations

import importlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

from para_core.launcher.callbacks import run_callback
from para_core.launcher.display import Display
from para_core.launcher.errors import Cancelled, RankDied, RankTraceback
from para_core.launcher.interrupts import first_interrupt_calls
from para_core.launcher.messages import LOADING, CallbackReply, Outcome, RandomState, RankError
from para_core.launcher.processes import RankGroup
from para_core.launcher.randomness import CallerSeeds
from para_core.launcher.wire import Body

# After one rank has failed, the others have this many seconds to answer. They may wait for it in a
# collective.
_GRACE = 10.0
# A rank that does not say within this many seconds where it is does not run Python code.
_ANSWER = 2.0


class RunningCall:
    """A call that all ranks of ``group`` run, or their loading. It ends the ranks unless they stay usable.

    Args:
        number: The number of the call, :data:`LOADING` for loading.
        timeout: Seconds without a message of a rank after which the ranks are ended.
        callbacks: The callbacks among the call's arguments, by name, which run in this process.
        listener: Called with each value that the first rank pushes.
        finishes_step: Whether Ctrl-C first lets the ranks finish their step.
        randomness: The random state of this process, and the generators among the arguments, with which
            callbacks run.
    """

    def __init__(
        self,
        group: RankGroup,
        number: int,
        display: Display,
        timeout: float,
        callbacks: Mapping[str, Callable[..., Any]] | None = None,
        listener: Callable[[Any], None] | None = None,
        *,
        finishes_step: bool = True,
        randomness: tuple[CallerSeeds, Sequence[Any]] | None = None,
    ) -> None:
        self._group, self.number, self._display, self._timeout = group, number, display, timeout
        self._callbacks, self._listener, self._finishes_step = callbacks or {}, listener, finishes_step
        self._seeds, self._generators = randomness or (CallerSeeds(), [])
        self._outcomes: dict[int, Outcome] = {}
        self._errors: dict[int, RankError] = {}
        self._open_bars = set[int]()
        # What ends the call in the caller: KeyboardInterrupt, or what a callback or the function ``progress``
        # raised.
        self._raised: BaseException | None = None
        # Whether cancel() was called, and whether Ctrl-C was pressed, which :meth:`_interruptible` notes.
        self._cancelled = self._signalled = False
        self._last_progress = time.monotonic()
        self._first_error = 0.0

    def cancel(self) -> None:
        """Let the ranks end the call after their current step. Any thread may call this."""
        self._cancelled = True
        self._group.channels[0].send(("cancel", self.number))

    @property
    def random(self) -> RandomState | None:
        """Random state of the first rank after the call, None if it did not answer."""
        answer = self._outcomes.get(0) or self._errors.get(0)
        return None if answer is None else answer.random

    @property
    def has_all_answers(self) -> bool:
        """Whether every rank has answered. The others may still run the call."""
        return len(self._outcomes) + len(self._errors) == len(self._group.members)

    def wait(self, modules: Sequence[str] = ()) -> list[Outcome]:
        """Return the outcomes of all ranks, in rank order. Import ``modules`` while the ranks work.

        Raises:
            Cancelled: If :meth:`cancel` was called. The ranks stay usable.
            RankDied: If a rank ended, or made no progress for ``timeout`` seconds. The ranks have been ended.
            Exception: What the ranks raised. Unless all raised the same, they have been ended.
            BaseException: KeyboardInterrupt, or what a callback raised. The ranks stay usable if they
                finish their step.
        """
        with self._interruptible():
            try:
                for module in modules:
                    import_early(module)
                self._collect()
            except BaseException:
                # A second Ctrl-C, or a rank that ended.
                self._group.end(idle=False)
                if self._raised is not None:
                    raise self._raised from None
                raise
        return self._conclude()

    def _interruptible(self) -> AbstractContextManager[None]:
        """Return a context in which the first Ctrl-C is a message to :meth:`_collect`, and the second one raises."""
        if not self._finishes_step:
            return nullcontext()

        def note() -> None:
            self._signalled = True
            self._group.inbox.put((("interrupt", self.number), Body(b"")))

        return first_interrupt_calls(note)

    def _collect(self) -> None:
        """Handle messages until all ranks have answered, or until one has failed and the others had time to
        answer.

        Raises:
            RankDied: A rank ended, or no message came in time.
        """
        while not self.has_all_answers:
            try:
                head, body = self._group.inbox.get(timeout=self._seconds_left())
            except queue.Empty:
                if self._errors:
                    return
                self._raise_stuck()
            except BaseException as error:
                if self._raised is not None:
                    raise
                # The program has a handler of SIGINT of its own, which raised.
                self._interrupt(error)
                continue
            self._handle_message(head, body)
            # A callback may have taken any time.
            self._last_progress = time.monotonic()

    def _seconds_left(self) -> float:
        """Return the seconds to wait for the next message."""
        deadline = self._last_progress + self._timeout
        if self._errors:
            deadline = min(deadline, self._first_error + _GRACE)
        return max(0.0, deadline - time.monotonic())

    def _handle_message(self, head: tuple[Any, ...], body: Body) -> None:
        """Do what one message asks for.
        Its ``head`` is the kind of the message, and what follows depends on that.
        """
        kind = head[0]
        if kind in ("result", "error") and head[2] != self.number:
            return  # the answer to another call, which must not count as one to this call
        if kind == "result":
            self._outcomes[head[1]] = _load_outcome(body, head[1])
        elif kind == "error":
            self._first_error = self._first_error or time.monotonic()
            self._errors[head[1]] = _load_body(body, head[1])
        elif kind == "ended" or self._group.ended:
            raise RankDied("the ranks were ended by close() or restart(), or at the end of this process.")
        elif kind == "died":
            raise RankDied(f"rank {head[1]} {self._group.members[head[1]].describe_end()}", head[1])
        elif kind == "interrupt":
            # A message of an earlier call came after its last answer, and _conclude has raised
            # KeyboardInterrupt then.
            if head[1] == self.number:
                self._interrupt(KeyboardInterrupt())
        elif kind == "callback":
            self._answer_callback(head[2], body)
        elif kind == "pushed":
            self._call_listener(_load_body(body, 0))
        elif kind == "port":
            self._group.send("port", head[1])
        else:
            self._show(kind, head[1:])

    def _show(self, kind: str, content: tuple[Any, ...]) -> None:
        """Show progress that the first rank reports.
        The content of a message about a bar begins with the call.
        """
        try:
            if kind == "line":
                self._display.line(*content)
            elif kind == "import":
                import_early(*content)
            elif kind == "bar":
                self._open_bars.add(content[1])
                self._display.open_bar(*content[1:])
            elif kind == "step":
                self._display.step(*content[1:])
            elif kind == "bar closed":
                self._open_bars.discard(content[1])
                self._display.close_bar(content[1])
        except BaseException as error:
            # The user's function ``progress`` raised.
            self._interrupt(error)

    def _call_listener(self, value: Any) -> None:
        """Call the listener with a value that the first rank pushed."""
        try:
            if self._listener is not None:
                self._listener(value)
        except BaseException as error:
            self._interrupt(error)

    def _interrupt(self, error: BaseException) -> None:
        """End the call after the current step, and raise ``error`` then; at once if steps are not finished."""
        if not self._finishes_step:
            raise error
        self._raised = self._raised or error
        self._group.channels[0].send(("cancel", self.number))
        if isinstance(error, KeyboardInterrupt) and not self._open_bars:
            doing = (
                "load the pipeline" if self.number == LOADING else "are not between two steps of a pipeline"
            )
            self._display.notice(
                f"interrupted: the ranks {doing}, and finish that first. Ctrl-C again ends them."
            )

    def _answer_callback(self, name: str, body: Body) -> None:
        """Run a callback, and send its effect to all ranks, which wait for it.
        If it raises, they end the call.
        """
        reply = Body.of(CallbackReply(raised=True))
        if self._raised is None:
            try:
                reply = Body.of(run_callback(self._callbacks[name], body, self._seeds, self._generators))
                self._seeds.note_sent()
            except BaseException as error:
                self._interrupt(error)
        self._group.send("reply", body=reply)

    def _conclude(self) -> list[Outcome]:
        """Return the outcomes of all ranks, or raise what the answers mean together; see :meth:`wait`."""
        same_errors = len({_error_identity(failed) for failed in self._errors.values()}) <= 1
        if self._errors and (self._is_incomplete() or not same_errors or self.number == LOADING):
            # Ranks disagree, so their connections may be broken: a rank may still wait for another.
            self._group.end(idle=False)
        if self._signalled and self._raised is None:
            # Ctrl-C came after the last answer.
            self._raised = KeyboardInterrupt()
        if self._raised is not None:
            if self.number == LOADING:
                self._group.end(idle=False)
            raise self._raised
        if self._errors:
            self._raise_error()
        if self._cancelled:
            raise Cancelled("cancelled after its last step.")
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]

    def _is_incomplete(self) -> bool:
        """Whether a rank has not raised: it has returned, or has not answered. For a call in which one raised."""
        return len(self._errors) < len(self._group.members)

    def _raise_error(self) -> NoReturn:
        """Raise the error of the rank that failed first, with the traceback on that rank as its cause."""
        # An error about another rank comes after that rank's own.
        rank, failed = next(iter(self._errors.items()))
        error = failed.load_error()
        if isinstance(error, Cancelled):
            raise error
        if self._is_incomplete():
            error.add_note(
                f"Only rank {rank} raised this. The ranks were ended, and the next call starts them again."
            )
        raise error from RankTraceback(failed.traceback)

    def _raise_stuck(self) -> NoReturn:
        """Raise RankDied, with the ranks for which the others wait."""
        answered = {*self._outcomes, *self._errors}
        positions = self._positions()
        waiting = {rank for rank, (waits, _) in positions.items() if waits}
        stuck = [rank for rank in range(len(self._group.members)) if rank not in answered | waiting]
        lines = []
        for rank in range(len(self._group.members)):
            if rank not in answered:
                lines.append(f"  rank {rank}: {positions.get(rank, (False, 'does not run Python code'))[1]}")
        named = "all ranks wait for each other"
        if stuck:
            verb = "hangs" if len(stuck) == 1 else "hang"
            named = f"rank {', '.join(map(str, stuck))} {verb}"
        raise RankDied(
            f"no rank made progress for {self._timeout:g} s: {named}. The ranks were ended, and the next call starts "
            "them again; if a step or loading may take longer, pass a larger timeout= to launch.\n"
            + "\n".join(lines),
            stuck[0] if len(stuck) == 1 else None,
        )

    def _positions(self) -> dict[int, tuple[bool, str]]:
        """Return by rank whether it waits for others, and at which line it is.
        Ranks that do not answer are missing.
        """
        self._group.send("where")
        positions: dict[int, tuple[bool, str]] = {}
        deadline = time.monotonic() + _ANSWER
        while len(positions) < len(self._group.members):
            try:
                head, body = self._group.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if head[0] == "where":
                positions[head[1]] = body.load()
        return positions


def _error_identity(failed: RankError) -> str:
    """Return the type and the text of an error, by which the errors of several ranks are compared."""
    kind = failed.summary.partition(":")[0]
    # The text of an error about memory has the numbers of the rank's own device.
    return kind if kind.endswith("OutOfMemoryError") else failed.summary


def _load_body(body: Body, rank: int) -> Any:
    """Return the content of a message. Raise RuntimeError if this process cannot load it."""
    try:
        return body.load()
    except Exception as error:
        raise RuntimeError(f"the answer of rank {rank} cannot be loaded in this process: {error}") from error


def _load_outcome(body: Body, rank: int) -> Outcome:
    """Return the outcome of a rank; one with an error if this process cannot load its value."""
    try:
        outcome: Outcome = _load_body(body, rank)
    except RuntimeError as error:
        return Outcome(None, RandomState(), error=error)
    return outcome


def import_early(name: str) -> None:
    """Import a module while the ranks work, so that the first result does not wait for it."""
    # A module may raise anything, such as OSError for a library that this host lacks. A result that needs the
    # module says so.
    with suppress(Exception):
        importlib.import_module(name)
