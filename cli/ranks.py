"""Generation of requests on one group of ranks: this process, torchrun's ranks, or ranks started by torchrun's API."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from para_core.cli.launcher import in_torchrun, stated_ranks
from para_core.cli.progress import Bars, showing_phases
from para_core.fleet.encode_first import EncodeFirst
from para_core.fleet.failures import sentence
from para_core.fleet.loading import build
from para_core.fleet.outputs import write_result
from para_core.fleet.prompts import Line, Problem
from para_core.fleet.recipe import Recipe
from para_core.fleet.work import Watch, call_pipe, generate
from para_core.torch_internals import default_store

T = TypeVar("T")
# A rank that raised waits this long for all others to report that they raised too. If one does not report, the rank
# ends, and the launcher stops the others.
_AGREEMENT_TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class RankJob:
    """Requests that one group of ranks generates one after another."""

    recipe: Recipe
    lines: Sequence[Line]
    folder: Path  # of the results
    journal: Path  # to which ranks append events, such as the end of a line, as one JSON object per line
    debug: bool = False  # whether to show tracebacks and other libraries' log messages
    errors: Path | None = None  # file for error messages of ranks, set by run_on_ranks


class RankEndedError(RuntimeError):
    """Raised if a new process of :func:`run_on_ranks` ended early, with the message of the first that failed."""


def is_first_rank() -> bool:
    """Whether this process is rank 0, in the process group if there is one, or no rank at all."""
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def count_ranks(requested: int | None, replicas: int) -> int:
    """Return the number of ranks of each replica: ``requested``, else torchrun's ranks, else GPUs // ``replicas``.

    The last is at least 1. Raise typer.BadParameter if a number is below 1 or contradicts torchrun's ranks, or if a
    single replica has more ranks than this machine has GPUs (without GPUs, any number is accepted).
    """
    stated = stated_ranks(requested, replicas)
    if stated is not None and in_torchrun():
        return stated
    gpus = torch.cuda.device_count()
    ranks = stated or max(1, gpus // replicas)
    if gpus and replicas == 1 and ranks > gpus:
        raise typer.BadParameter(
            f"--ranks {ranks}, and this machine has {gpus} GPUs: expected at most one rank per GPU."
        )
    return ranks


def run_job(job: RankJob, ranks: int) -> list[Problem]:
    """Generate all lines on ``ranks`` ranks (see :func:`run_on_ranks`), and return a problem for each failed line.

    If the processes end early during a line, this line has failed, and new processes generate the remaining lines.
    Raise RankEndedError if they end early while no line is running, or if a result cannot be written.
    """
    problems, remaining = list[Problem](), job.lines
    while remaining:
        ended = None
        job.journal.write_bytes(b"")
        try:
            run_on_ranks(run_rank, replace(job, lines=remaining), ranks)
        except RankEndedError as error:
            ended = error
        events = [json.loads(text) for text in job.journal.read_text().splitlines() if text]
        done = {event["line"] for event in events if event["event"] == "done"}
        problems += [Problem(event["line"], event["reason"]) for event in events if event["event"] == "failed"]
        begun = {event["line"] for event in events if event["event"] == "begin"}
        if ended is None:
            break
        in_flight = begun - {*done, *(problem.number for problem in problems)}
        if not in_flight or any(event["event"] == "unwritten" for event in events):
            raise ended
        problems += [Problem(number, str(ended)) for number in in_flight]
        remaining = [line for line in remaining if line.number not in begun]
    return sorted(problems, key=lambda problem: problem.number)


def run_on_ranks(function: Callable[[Any], T], job: Any, ranks: int) -> T:
    """Run ``function(job)`` on ``ranks`` new processes, or in this process if ``ranks`` is 1 or torchrun started it.

    Return the first rank's result, under torchrun this rank's. ``job`` is pickled. Its attribute ``debug`` says whether
    torchrun's messages are shown. ``function`` runs in :func:`ending_on_error`. Raise RankEndedError if a new process
    ended early.
    """
    if ranks == 1 or in_torchrun():
        return function(job)
    if not job.debug:
        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed."):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    # A plain line, because the first rank draws its own progress in the same terminal.
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"starting {ranks} ranks")
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            run_id="para_core",
            nproc_per_node=ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        errors = Path(folder) / "errors"
        try:
            with _starting_processes_without_sigint():
                result: T = elastic_launch(config, _on_one_thread)(function, replace(job, errors=errors))[0]
        except ChildFailedError as error:
            reasons = errors.read_text().splitlines() if errors.exists() else []
            raise RankEndedError(reasons[0] if reasons else _describe_end(error)) from None
        return result


@contextmanager
def _starting_processes_without_sigint() -> Iterator[None]:
    """Inside this context, start processes that get no SIGINT until they unblock it. This process handles it as before.

    A terminal sends Ctrl-C to all its processes, and a rank that gets it in the middle of an import would print a
    traceback. Processes inherit the signals that the main thread blocks; this process receives them in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # If it started later, multiprocessing's tracker would unblock SIGINT.
    resource_tracker.ensure_running()
    ended = threading.Event()
    receiver = threading.Thread(target=ended.wait, name="receives SIGINT", daemon=True)
    receiver.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ended.set()


def _on_one_thread(function: Callable[[Any], T], job: Any) -> T:
    """Return ``function(job)``, by default on one thread of the CPU, as torchrun does: ranks share the CPU cores.

    From here on SIGINT, which the launcher blocked, ends the process at once and silently.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return function(job)


def _describe_end(error: ChildFailedError) -> str:
    """Return a sentence that says which rank ended early, and how."""
    # If a rank ends, the launcher stops the other ranks with SIGTERM. So the rank with another exit code ended first.
    rank, failure = next(
        ((rank, failure) for rank, failure in error.failures.items() if failure.exitcode != -signal.SIGTERM),
        next(iter(error.failures.items())),
    )
    if failure.exitcode >= 0:
        return f"rank {rank} ended with exit code {failure.exitcode}; --debug shows why."
    name = signal.Signals(-failure.exitcode).name
    hint = ": most likely the machine ran out of memory" if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{hint}."


@contextmanager
def ending_on_error(errors: Path | None, *, debug: bool) -> Iterator[None]:
    """If an exception is raised inside this context, append its message to the file ``errors``, and end the process.

    Without a file, print the message. A process that no launcher started does not end: the exception is raised.
    """
    try:
        yield
    except Exception as error:
        if errors is not None:
            _append(errors, sentence(error))
        if debug:
            traceback.print_exc()
        if "RANK" not in os.environ:
            raise
        if errors is None:
            sys.stderr.write(f"error: rank {os.environ['RANK']}: {sentence(error)}\n")
        # Exit at once, without cleanup: the launcher then stops the other ranks, which may wait in a collective.
        sys.stderr.flush()
        os._exit(1)


# Libraries whose log messages advise on settings that this command chooses, and not its user.
_LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "peft", "torch", "torchao", "transformers")


def quiet(debug: bool) -> None:
    """Hide the progress bars of diffusers and transformers, and unless ``debug``, the warnings of all libraries."""
    from diffusers.utils import logging as diffusers_logging
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    # tqdm's default lock is a system semaphore. If a signal ends a rank, Python warns that the semaphore leaked.
    tqdm.set_lock(threading.RLock())
    if not debug:
        for name in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


@contextmanager
def process_group(recipe: Recipe, *, late: float = 0.0) -> Iterator[None]:
    """Initialize the default process group inside this context, and select this rank's GPU. Only under torchrun.

    Ranks wait for each other ``late`` seconds longer than the recipe's timeout.
    """
    if not in_torchrun():
        yield
        return
    dist.init_process_group(timeout=timedelta(seconds=recipe.timeout + late))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    yield
    dist.destroy_process_group()


def run_rank(job: RankJob) -> None:
    """Generate the job's requests on this rank. An exception ends the process if a launcher started it."""
    quiet(job.debug)
    with ending_on_error(job.errors, debug=job.debug), process_group(job.recipe):
        _run_lines(job)


def _run_lines(job: RankJob) -> None:
    # Ranks may see different finished results in the folder, so the first rank's lines count.
    lines = from_first_rank(job.lines)
    encode_first = EncodeFirst()
    first = is_first_rank()
    with showing_phases(shown=first):
        pipe = build(job.recipe, encode_first if len(lines) > 1 else None)

    def fails_alike(line: Line) -> bool:
        if _all_ranks_failed("encoding", line.number):
            return True
        # This rank ends after False is returned. The event tells the launching process not to run the line again.
        _note(job, event="begin", line=line.number)
        return False

    with Bars(len(lines), shown=first) as bars:
        for batch in encode_first.batches(lines, lambda request: call_pipe(pipe, [request]), fails_alike):
            for line in batch:
                _run_line(job, pipe, line, bars, first)


def from_first_rank(value: T) -> T:
    """Return the first rank's value on all ranks. A collective call if there is a process group."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks on all ranks. A collective call if there is a process group."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _run_line(job: RankJob, pipe: Any, line: Line, bars: Bars, first: bool) -> None:
    if first:
        _note(job, event="begin", line=line.number)
        bars.begin(line.number, line.request.fields.get("num_inference_steps"))
    watch = Watch(progress=bars.step if first else None)
    try:
        with torch.profiler.record_function("para_core: one request") if job.debug else nullcontext():
            result = generate(pipe, line.request, job.recipe, watch)
    except Exception as error:
        if job.debug:
            traceback.print_exc()
        if not _all_ranks_failed("line", line.number):
            raise
        if first:
            _note(job, event="failed", line=line.number, reason=sentence(error))
        torch.cuda.empty_cache()
    else:
        if result is not None:
            try:
                write_result(job.folder, line, result)
            except OSError:
                # This event ends the job, because no other result could be written either.
                _note(job, event="unwritten", line=line.number)
                raise
            _note(job, event="done", line=line.number)
    if first:
        bars.end()


def _all_ranks_failed(phase: str, number: int) -> bool:
    """Return whether all ranks raised on line ``number``, so that none still waits in a collective.

    Ranks report through the store of the process group, because a collective of the group may be blocked. ``phase``
    tells the calls apart that a line has.
    """
    if not dist.is_initialized():
        return True
    store = default_store()
    keys = [f"para_core/{phase}/{number}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, _AGREEMENT_TIMEOUT)
    except (RuntimeError, ValueError):
        return False
    return True


def _note(job: RankJob, **event: Any) -> None:
    _append(job.journal, json.dumps(event))


def _append(path: Path, line: str) -> None:
    # One short write in append mode is atomic, so lines of several ranks do not mix.
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


class _Terminated(KeyboardInterrupt):
    """Raised on SIGTERM. Like Ctrl-C it ends the command, and does not count as an error of the current request."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside this context, raise :class:`_Terminated` on SIGTERM, which would otherwise end the process silently.

    Python ignores what is raised in a callback of a weak reference or in ``__del__``. If a signal arrives there, it is
    sent again. Does nothing on torchrun's ranks, and outside the main thread.
    """
    if in_torchrun() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: Any) -> None:
        raise _Terminated

    def send_again(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            report(ignored)
            return
        signum = signal.SIGTERM if ignored.exc_type is _Terminated else signal.SIGINT
        # By then the callback, in which Python calls this function, has ended.
        threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()

    previous = signal.signal(signal.SIGTERM, end)
    report, sys.unraisablehook = sys.unraisablehook, send_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGTERM, previous)


def describe_signal(end: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for ``end``, a KeyboardInterrupt or torchrun's SignalException."""
    by_ctrl_c = type(end) is KeyboardInterrupt or getattr(end, "sigval", None) == signal.SIGINT
    return ("interrupted", 130) if by_ctrl_c else ("ended by SIGTERM", 143)
