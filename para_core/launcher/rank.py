"""One rank of a launched pipeline: a process that joins the others, loads the pipeline, and runs the caller's calls.

``processes.py`` and ``hosts.py`` start it. Modules that import torch are imported inside functions, so that
the connection stands before torch is loaded. Tests: tests/launcher/test_calls.py,
tests/launcher/test_failures.py.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from para_core.launcher.connection import CallerConnection, end_process
from para_core.launcher.link import CallerLink
from para_core.launcher.messages import (
    LOADING,
    Call,
    LoadJob,
    Outcome,
    PipeDescription,
    PipeOfRank,
    RandomState,
)
from para_core.launcher.wire import Body, Channel


def main_of_child(fd: int, rank: int, ranks: int) -> None:
    """Run a rank in a process that the caller started. ``fd`` is the descriptor of its socket."""
    main(Channel(socket.socket(fileno=fd)), rank, ranks)


def main(channel: Channel, rank: int, ranks: int) -> None:
    """Run a rank in this process until the caller closes it or ends, and end the process."""
    # A terminal and Jupyter send Ctrl-C to all processes. The caller tells all ranks to stop after the same
    # step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = CallerConnection(channel, rank, ranks)
    try:
        try:
            pipe = _load_pipe(connection)
        except BaseException as error:
            connection.send_error(error, LOADING, RandomState())
            # The caller ends this process when all ranks have answered, or some seconds after the first
            # error (_GRACE in running_call.py, far below these 60). This rank waits for that, because its end
            # would be reported in place of the error.
            time.sleep(60)
            end_process()
        else:
            _run_calls(connection, pipe)
    except ConnectionError:
        end_process()  # The caller has ended.
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries, and collectives that another rank has left, must not hold up the end.
    os._exit(0)


def _load_pipe(connection: CallerConnection) -> Any:
    """Make the process group, load the pipeline, tell the caller so, and return the pipeline. Collective."""
    from para_core.launcher.import_warnings import hide_import_warnings
    from para_core.launcher.process_group import accept_repeated_init, join_process_group
    from para_core.launcher.randomness import random_state_of_rank, set_random_state
    from para_core.launcher.report_loading import report_loading_to
    from para_core.launcher.steps import hook_progress_bars

    def exchange_port(port: int | None) -> int:
        # The first rank has the port, and the caller tells it to all ranks.
        if port is not None:
            connection.channel.send(("port", port))
        head, _ = connection.jobs.get()
        return int(head[1])

    _, body = connection.jobs.get()
    job: LoadJob = body.load()
    timeout = timedelta(seconds=job.timeout)
    connection.side_group = join_process_group(
        connection.rank, connection.ranks, job.host, exchange_port, timeout
    )
    set_random_state(job.random)
    with report_loading_to(connection), hide_import_warnings(), accept_repeated_init(timeout):
        pipe = job.load.load()()
    description = _describe_pipe(pipe)
    if not callable(pipe) and not description.methods:
        raise TypeError(f"load returned {pipe!r}; expected the pipeline, or another object with methods.")
    hook_progress_bars(pipe, connection)
    answer = Outcome(description, random_state_of_rank(), _modules_of_results(pipe))
    connection.channel.send(("result", connection.rank, LOADING), Body.of(answer))
    return pipe


def _modules_of_results(pipe: Any) -> tuple[str, ...]:
    """Return modules that the caller needs to load results, so that the first call does not wait for them."""
    module = type(pipe).__module__
    if not module.startswith("diffusers."):
        return ()
    sibling = f"{module.rpartition('.')[0]}.pipeline_output"
    return ("diffusers.utils", *([sibling] if sibling in sys.modules else []))


def _describe_pipe(pipe: Any) -> PipeDescription:
    """Return the class name, the methods and the parameters of ``pipe``, which the handle shows as its own."""
    cls = type(pipe)
    methods = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]
    try:
        signature = inspect.signature(pipe)
    except (TypeError, ValueError):
        # It is not callable, or a builtin without a signature.
        return PipeDescription(cls.__name__, methods, [])
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in positional]
    return PipeDescription(cls.__name__, methods, names)


def _run_calls(connection: CallerConnection, pipe: Any) -> None:
    """Run calls until the caller closes this rank."""
    from para_core.launcher.randomness import random_state_of_rank

    call: Call | None
    body: Body | None
    outcome: Outcome | None
    while True:
        (kind, *head), body = connection.jobs.get()
        if kind == "close":
            return
        number, everywhere = head
        connection.call_number = number
        call = None
        try:
            call = body.load()
            outcome = _run(connection, pipe, call, everywhere)
        except BaseException as error:
            connection.send_error(
                error, number, random_state_of_rank(() if call is None else call.generators)
            )
        else:
            connection.channel.send(("result", connection.rank, number), _body_of(outcome))
        connection.call_number = None
        # The memory of arguments and results is released before the next call, not after it.
        body = outcome = call = None


def _run(connection: CallerConnection, pipe: Any, call: Call, everywhere: bool) -> Outcome:
    """Run a call, and return its outcome, whose value is None on all ranks but the first unless ``everywhere``."""
    from para_core.launcher.callbacks import Relay
    from para_core.launcher.randomness import random_state_of_rank, set_random_state
    from para_core.launcher.thread_state import apply_state

    set_random_state(call.random)
    kwargs = {
        **call.kwargs,
        **{name: Relay(connection, pipe, name, call.generators) for name in call.callbacks},
    }
    if call.linked:
        kwargs["link"] = CallerLink(connection.push, connection.is_cancelled)
    with apply_state(call.thread):
        if call.function is None:
            result = pipe(*call.args, **kwargs)
        elif isinstance(call.function, str):
            result = getattr(pipe, call.function)(*call.args, **kwargs)
        else:
            result = call.function(pipe, *call.args, **kwargs)
    random = random_state_of_rank(call.generators)
    if result is pipe:
        result = PipeOfRank()
    return Outcome(result if everywhere or connection.rank == 0 else None, random)


def _body_of(outcome: Outcome) -> Body:
    """Return the pickled outcome, or one that says why its value cannot be pickled, or has no room."""
    try:
        return Body.of(outcome)
    except TypeError as error:
        problem: Exception = TypeError(str(error))
    except OSError as error:
        problem = OSError(f"there is no room to send the result: {error}")
    return Body.of(Outcome(None, outcome.random, error=problem))
