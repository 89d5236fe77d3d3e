"""The handle of a pipeline on ranks: called like the pipeline, from one process that is no rank.

``launch`` makes a :class:`Launched`; ``fleet/engine.py`` has a :class:`LaunchState` without one. What the
ranks answer during a call is read in ``running_call.py``, and processes are in ``processes.py``. Tests:
tests/launcher/test_calls.py, tests/launcher/test_cancel.py.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from para_core.launcher.callbacks import name_callbacks, take_out_callbacks
from para_core.launcher.display import Display
from para_core.launcher.errors import Cancelled, set_outcome
from para_core.launcher.messages import (
    LOADING,
    Call,
    LoadJob,
    Outcome,
    PipeDescription,
    PipeOfRank,
    RandomState,
)
from para_core.launcher.pickling import generators_in, module_of_user
from para_core.launcher.processes import RankGroup
from para_core.launcher.randomness import CallerSeeds
from para_core.launcher.running_call import RunningCall, import_early
from para_core.launcher.thread_state import apply_state, current_state
from para_core.launcher.wire import Body


@dataclass(frozen=True)
class LaunchOptions:
    """Options of :func:`launch`, validated."""

    load: Callable[[], Any]
    ranks: int
    start: Callable[[], RankGroup]  # starts the processes
    timeout: float  # seconds after which a collective gives up
    silence: float  # seconds without a step or an answer after which the ranks are ended
    display: Callable[[], Display]
    # Whether Ctrl-C first lets the ranks finish their step, instead of ending them at once.
    finishes_step: bool = True


@dataclass(eq=False)
class Ticket:
    """A call that waits for its turn, or runs. Any thread may cancel it."""

    cancelled: bool = False
    running: RunningCall | None = None

    def cancel(self) -> None:
        """End the call after its current step, or before it begins.

        While the ranks load the pipeline for the call, this has no effect on them until they have loaded it:
        the call is sent then, and ends after its first step.
        """
        self.cancelled = True
        # Read once: the thread of the call sets it to None when the call ends.
        running = self.running
        if running is not None:
            with suppress(OSError):  # The first rank has ended, which the call will see.
                running.cancel()


@dataclass(eq=False)
class LaunchState:
    """The ranks and calls of a handle. Calls of several threads run one after another.

    The thread that holds ``turn`` changes the fields. Other threads read some of them without it, so a value
    may be old by then. They also set ``closed``; :meth:`Launched.restart` and the ``reopen`` of
    ``fleet/engine.py`` clear it.
    """

    options: LaunchOptions
    by_value: str | None  # name of the module whose functions are sent by value
    load: Body  # the pickled function that returns the pipeline
    turn: threading.Lock = field(default_factory=threading.Lock)
    seeds: CallerSeeds = field(default_factory=CallerSeeds)
    group: RankGroup | None = None
    # Ends the group with this object, and with this process.
    finalizer: weakref.finalize[Any, Any] | None = None
    closed: bool = False
    changed: bool = False  # whether run or a method may have changed the pipelines since they were loaded
    calls: int = LOADING  # the number of the last call
    told_of_cuda: bool = False  # whether a line has said that this process has initialized its GPU
    current: Ticket | None = None
    thread: int | None = None  # the thread of the running call
    pipe: PipeDescription = field(default_factory=lambda: PipeDescription("pipeline", [], []))

    def start_if_ended(self) -> RankGroup:
        """Return the running ranks. If they have ended, start them first, and load the pipeline on them.

        Raises:
            RuntimeError: :meth:`Launched.close` was called while the ranks started. They have been ended.
            RankDied, Exception: As :meth:`RunningCall.wait`. The ranks have been ended.
        """
        if self.group is not None and not self.group.ended:
            return self.group
        display = self.options.display()
        if self.changed:
            # A warning would be shown once per program only.
            display.notice(
                "the ranks start again: changes that run() and methods made to the pipeline are lost."
            )
            self.changed = False
        display.line(f"starting {self.options.ranks} ranks" if self.options.ranks > 1 else "starting 1 rank")
        self.seeds.forget()
        random = self.seeds.state_for_call()
        # Ctrl-C before the next line ends the group too, because nobody refers to it then
        # (RankGroup.__del__).
        group = self.options.start()
        try:
            self.group = group
            if self.finalizer is not None:
                self.finalizer.detach()
            self.finalizer = weakref.finalize(self, group.end, idle=False)
            if self.closed:
                # Another thread called close() while the ranks started, and could not end them yet.
                raise RuntimeError("the pipeline is closed. restart() starts its ranks again.")
            self._load_on(group, display, random)
        except BaseException:
            # The next call would take ranks that have not loaded the pipeline for ranks that have.
            group.end(idle=False)
            raise
        return group

    def _load_on(self, group: RankGroup, display: Display, random: RandomState) -> None:
        """Load the pipeline on ``group``, whose ranks begin with the random state ``random``."""
        job = Body.of(LoadJob(self.load, group.host, self.options.timeout, random))
        group.send("load", body=job)
        self.seeds.note_sent()
        # Import torch here while the ranks do, because their results need it.
        loading = RunningCall(
            group, LOADING, display, self.options.silence, finishes_step=self.options.finishes_step
        )
        outcomes = loading.wait(["torch"])
        _raise_error_of(outcomes)
        for module in outcomes[0].modules:
            import_early(module)
        self.seeds.continue_from(outcomes[0].random)
        self.pipe = outcomes[0].value

    def call(
        self,
        ticket: Ticket,
        function: Any,
        args: Any,
        kwargs: Any,
        *,
        everywhere: bool = False,
        changes: bool = False,
        listener: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run a call on all ranks when it is its turn, and return the first rank's result.

        Args:
            ticket: The call, by which it can be cancelled.
            function: A function of the pipeline, the name of a method of it, or None to call the pipeline
                itself.
            everywhere: Whether to return the results of all ranks, as a list.
            changes: Whether the call may change the pipeline, which a later start of the ranks would undo.
            listener: Called here with each value that the first rank pushes. The function then gets a
                :class:`~para_core.launcher.link.CallerLink` as ``link``.

        Raises:
            RuntimeError: In a callback of the running call, in a forked process, or after
                :meth:`Launched.close`.
            Cancelled, RankDied, Exception: As :meth:`RunningCall.wait`.
        """
        self.check_caller()
        with self._turn_of(ticket):
            group = self.start_if_ended()
            if function is None:
                args, kwargs = name_callbacks(args, kwargs, self.pipe.parameters)
            kwargs, callbacks = take_out_callbacks(kwargs)
            generators = generators_in((args, kwargs))
            call = Call(
                function=function,
                args=args,
                kwargs=kwargs,
                random=self.seeds.state_for_call(),
                thread=current_state(),
                generators=generators,
                callbacks=tuple(callbacks),
                linked=listener is not None,
            )
            body = Body.of(call, self.by_value)
            self.calls += 1
            self.changed |= changes
            display = self.options.display()
            self._tell_of_cuda(display, generators)
            running = RunningCall(
                group,
                self.calls,
                display,
                self.options.silence,
                callbacks,
                listener,
                finishes_step=self.options.finishes_step,
                randomness=(self.seeds, generators),
            )
            ticket.running = running
            try:
                outcomes = self._send_and_wait(ticket, group, running, everywhere, body)
            finally:
                display.close()
                if running.random is not None:
                    self.seeds.continue_from(running.random, generators)
            _raise_error_of(outcomes)
            results = [outcome.value for outcome in outcomes]
            return results if everywhere else results[0]

    @contextmanager
    def _turn_of(self, ticket: Ticket) -> Iterator[None]:
        """Wait for the turn of ``ticket``, and inside the context let it be the running call."""
        with self.turn:
            if self.closed:
                raise RuntimeError("the pipeline is closed. restart() starts its ranks again.")
            if ticket.cancelled:
                raise Cancelled("cancelled before it began.")
            self.current, self.thread = ticket, threading.get_ident()
            try:
                yield
            finally:
                self.current = self.thread = ticket.running = None

    def _send_and_wait(
        self, ticket: Ticket, group: RankGroup, running: RunningCall, everywhere: bool, body: Body
    ) -> list[Outcome]:
        """Send the call ``running``, whose pickled :class:`Call` is ``body``, and return the ranks' outcomes.

        After any exception either all ranks have answered or they have been ended.
        """
        try:
            group.send("call", running.number, everywhere, body=body)
            self.seeds.note_sent()
            if ticket.cancelled:
                # If it was cancelled before ticket.running was set, the ranks have not been told. If later,
                # they have: a second message changes nothing, because a rank keeps only the number of the
                # call that was cancelled last, also of one that it has not begun.
                ticket.cancel()
            return running.wait()
        except BaseException:
            if not running.has_all_answers:
                # Ctrl-C outside RunningCall.wait: the message may be cut off, or ranks may still run the
                # call.
                group.end(idle=False)
            raise

    def _tell_of_cuda(self, display: Display, generators: Sequence[Any]) -> None:
        """Tell the user once that a generator of a GPU takes memory of that GPU in this process."""
        if not self.told_of_cuda and any(generator.device.type != "cpu" for generator in generators):
            self.told_of_cuda = True
            display.notice(
                "a torch.Generator of a GPU has initialized it in this process too. CPU generators do not."
            )

    def check_caller(self) -> None:
        """Raise RuntimeError in a callback of the running call, which would wait for itself, and in a forked
        process, in which the threads that receive messages do not run.

        To be called before ``turn`` is taken: a fork has it locked if a call was running.
        """
        if self.thread == threading.get_ident():
            raise RuntimeError(
                "a callback cannot call the pipeline whose call it belongs to: that call has not ended."
            )
        if self.group is not None and self.group.owner != os.getpid():
            raise RuntimeError(
                "this process is a fork of the one that launched the ranks: launch in this process."
            )

    def end(self) -> None:
        """End the ranks, at once if a call is running.

        Idle ranks, and those that load the pipeline outside of a call, first get some seconds to end themselves.
        """
        if self.group is not None:
            self.group.end(idle=self.current is None)

    def cancel(self) -> bool:
        """Cancel the running call. Return whether there is one."""
        ticket = self.current
        if ticket is None:
            return False
        ticket.cancel()
        return True


class Launched:
    """A pipeline on several ranks. Returned by :func:`launch`, and called like the pipeline.

    Calls return the first rank's result. Public methods of the pipeline's class, such as
    ``load_lora_weights``, run on every rank; :meth:`run` runs any function there. Calls from several threads
    run one after another.

    The handle's own ``call``, ``run``, ``cancel``, ``restart`` and ``close`` hide methods of these names that
    the pipeline has: ``run(lambda pipe: pipe.close())`` reaches them.
    """

    _state: LaunchState

    def __init__(self, options: LaunchOptions) -> None:
        by_value = module_of_user(options.load)
        vars(self)["_state"] = LaunchState(options, by_value, Body.of(options.load, by_value))
        with self._state.turn:
            self._state.start_if_ended()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline on all ranks, and return the first rank's output.

        Callbacks run in this process. Generators, and torch's seed, continue as if the pipeline were in this
        process.

        Raises:
            Cancelled: If :meth:`cancel` ended the call.
            RankDied: If a rank ended or hangs. The next call starts the ranks again.
            Exception: What the pipeline raised; its cause is the traceback on the rank.
        """
        return self._run(Ticket(), None, args, kwargs)

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline as :meth:`__call__` does, and let other tasks run meanwhile.

        Callbacks run in another thread. If the awaiting task is cancelled, the call ends after its current
        step.

        Raises:
            RuntimeError: In a callback of the running call, or in a forked process.
            Cancelled, RankDied, Exception: As :meth:`__call__`.
        """
        # Check here, because the running call's callback is in this thread, and not in the one that is started below.
        self._state.check_caller()
        # The call runs in a thread of its own, which does not inherit the gradients and autocast of this one.
        loop, ticket, thread_state = asyncio.get_running_loop(), Ticket(), current_state()
        future: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            result, error = None, None
            try:
                with apply_state(thread_state):
                    result = self._run(ticket, None, args, kwargs)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # The loop has been closed.
                loop.call_soon_threadsafe(set_outcome, future, result, error)

        threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            ticket.cancel()
            raise

    def run(self, function: Callable[..., Any], /, *args: Any, all_ranks: bool = False, **kwargs: Any) -> Any:
        """Call ``function(pipe, *args, **kwargs)`` on every rank, and return the first rank's result.

        With ``all_ranks`` it returns a list of the results of all ranks. Results travel by value: tensors
        come to the CPU.

        Raises:
            TypeError: ``function`` is not callable, or a value cannot be sent.
            Cancelled, RankDied, Exception: As :meth:`__call__`.
        """
        if not callable(function):
            raise TypeError(
                f"run got {function!r}; expected a function whose first argument is the pipeline."
            )
        return self._run(Ticket(), function, args, kwargs, everywhere=all_ranks, changes=True)

    def cancel(self) -> bool:
        """End the running call after its current step, from another thread. Return whether a call is running.

        That call raises :class:`Cancelled`, and the next call runs on the same processes. If the ranks still
        load the pipeline for that call, loading ends first. Loading by :func:`launch` or :meth:`restart` is
        no call, and cannot be cancelled.
        """
        return self._state.cancel()

    def restart(self) -> None:
        """End the ranks, even in the middle of a call, and start them again. Also reopens a closed pipeline.

        Raises:
            RuntimeError: In a callback of the running call, or in a forked process.
            RankDied, Exception: As :func:`launch`.
        """
        state = self._state
        state.check_caller()
        state.end()
        with state.turn:
            state.end()
            state.closed = state.changed = False
            state.start_if_ended()

    def close(self) -> None:
        """End the ranks, even in the middle of a call. Later calls raise RuntimeError."""
        self._state.closed = True
        self._state.end()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(
        self,
        ticket: Ticket,
        function: Any,
        args: Any,
        kwargs: Any,
        *,
        everywhere: bool = False,
        changes: bool = False,
    ) -> Any:
        result = self._state.call(ticket, function, args, kwargs, everywhere=everywhere, changes=changes)
        if everywhere:
            return [self._replace_pipe(x) for x in result]
        return self._replace_pipe(result)

    def _replace_pipe(self, result: Any) -> Any:
        """Return this handle in place of the pipeline that a rank returned, and other results as they are."""
        return self if isinstance(result, PipeOfRank) else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._state.pipe.methods:
            raise AttributeError(_on_ranks(name))

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._run(Ticket(), name, args, kwargs, changes=True)

        method.__name__ = name
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name!r}: the pipeline is on the ranks. Set it there: run(lambda pipe, value: setattr(pipe, {name!r}, "
            "value), value)."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(_on_ranks(name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._state.pipe.methods})

    def __repr__(self) -> str:
        state = self._state
        return f"<{state.pipe.name} on {state.options.ranks} ranks{', closed' if state.closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a launched pipeline cannot be sent to its ranks or to another process. A function of run gets the rank's "
            "pipeline as its first argument"
        )


def _raise_error_of(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the first outcome that has one: its value could not be sent or loaded."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def _on_ranks(name: str) -> str:
    return f"{name!r}: the pipeline is on the ranks, so its attributes are not here. Use run(lambda pipe: pipe.{name})."
