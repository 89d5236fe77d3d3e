"""Rank processes for distributed tests, started once per world size and kept for the whole run.

They are forked from one process that has imported torch, diffusers and the tiny models (tests/rank_preload.py), so new
ones cost a fraction of a second. ``os.environ``, ``sys.path`` and the working directory of a rank are those of the
parent when the rank starts.

    def total(x):                                   # a plain top-level function; it runs on every rank
        dist.all_reduce(x)
        return x

    def test_total(rank_pool):
        for out in rank_pool.run(total, 2, torch.ones(3)):
            assert torch.equal(out, torch.full((3,), 2.0))

Every job starts fresh: its own gloo WORLD without groups and meshes of the previous job, Dynamo reset, seed 0, and the
warning filters of the calling test. Arguments and results travel by value.

**When a job counts as hung.** A rank makes progress when its job starts and ends, when the job calls :func:`heartbeat`,
and while it imports the test's module or compiles, up to ``compile_limit`` seconds per job. The job is hung if no rank
has made progress for ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT`` seconds (environment; 60). The test then fails with the
stack of every rank. Being busy is not progress, because an endless loop is busy too.

If a rank hangs, dies or cannot import the test, only that test fails: the ranks of that world size are killed, and the
next test gets new ones. Errors that all ranks raised leave the processes alive.
"""

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

NO_PROGRESS_TIMEOUT = float(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60"))
# The first rank waits for all imports, which may take minutes on busy cores.
START_TIMEOUT = 600.0
# A collective of WORLD gives up after this time. Groups that a job creates have their own time-outs.
_GROUP_TIMEOUT = timedelta(seconds=60)
_WATCH_INTERVAL = 0.25
# After a rank has died, the others have this time to report what they raised because of it.
_LAST_REPORTS = 3.0
# Between two jobs, a rank with a group of all ranks and no other has five threads.
_MOST_THREADS = 16

Function = Callable[..., Any]


class RankPoolError(RuntimeError):
    """A job failed on at least one rank. The message holds every failed rank's traceback.

    ``errors`` maps ranks to their exceptions. A rank that was stuck or died is missing from it.
    """

    def __init__(self, message: str, errors: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or {}


class RankPoolTimeout(RankPoolError):
    """A job made no progress on any rank. The message holds every rank's stack."""


class RankDied(RankPoolError):
    """A rank's process ended in the middle of a job. The message holds its exit code and the other ranks' stacks."""


# -- In the parent.


@dataclass
class _Report:
    """The result or the error of a job on one rank."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


Reports = dict[int, _Report]


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection
    beat: Any  # The shared double has the time.monotonic() of the last progress.
    stack_file: Path

    def stack(self) -> str:
        """Return the Python stack of every thread of the rank, or the last one if it died on a signal."""
        if self.process.is_alive():
            # faulthandler's own signal handler writes it, which works even if the rank is stuck in C++.
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            deadline, size = time.monotonic() + 5.0, -1
            # The stack is complete when the file has stopped growing.
            while time.monotonic() < deadline and (size <= 0 or size != self.stack_file.stat().st_size):
                size = self.stack_file.stat().st_size
                time.sleep(0.1)
        threads = self.stack_file.read_text(errors="replace").strip().split("\n\n")
        own = [thread for thread in threads if thread and f" in {_watch.__name__}\n" not in f"{thread}\n"]
        return "\n".join(own) + "\n" if own else "(it left no Python stack)\n"


@dataclass
class _Group:
    """The processes of one world size."""

    store: dist.TCPStore
    folder: tempfile.TemporaryDirectory[str]
    ranks: list[_Rank] = field(default_factory=list)
    num_jobs: int = 0

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.connection.close()
        self.folder.cleanup()

    def describe(self, reports: Reports) -> str:
        """Return a text about every rank: its traceback if it raised, or its stack if it is still running."""
        texts = []
        for index, rank in enumerate(self.ranks):
            if index not in reports:
                state = "is" if rank.process.is_alive() else "died"
                texts.append(f"rank {index} {state} here:\n{rank.stack()}")
            elif reports[index].error is not None:
                texts.append(f"rank {index} raised:\n{reports[index].traceback}")
            else:
                texts.append(f"rank {index} ended well.\n")
        return "\n".join(texts)

    def death(self, fn: Function, reports: Reports, dead: int) -> RankDied:
        """Return the error about a rank that died in ``fn``."""
        process = self.ranks[dead].process
        process.join(_LAST_REPORTS)
        code = process.exitcode
        # A collective often fails soon on the ranks that shared it with a dead one. Their error is what they report.
        deadline = time.monotonic() + _LAST_REPORTS
        for index, rank in enumerate(self.ranks):
            if index not in (*reports, dead):
                with contextlib.suppress(EOFError, ConnectionError):
                    if rank.connection.poll(max(0.0, deadline - time.monotonic())):
                        reports[index] = _decode_report(rank.connection.recv_bytes())
        how = f"exit code {code}" + (f" ({signal.Signals(-code).name})" if code is not None and code < 0 else "")
        return RankDied(f"rank {dead} died in {_name(fn)} with {how}.\n\n{self.describe(reports)}", _errors(reports))


@dataclass
class RankPool:
    """Rank processes for each world size, started at its first use.

    Args:
        compile_limit: seconds per job for which importing the test's module and compiling count as progress.
        grace: seconds without progress, after a rank has raised, after which the others count as stuck.
    """

    compile_limit: float = 600.0
    grace: float = 10.0
    _groups: dict[int, _Group] = field(default_factory=dict, init=False, repr=False)

    def run(
        self, fn: Function, world_size: int, /, *args: Any, timeout: float = NO_PROGRESS_TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank, and return the results in rank order.

        ``fn`` is a function at the top level of a module that the ranks can import. The job counts as hung after
        ``timeout`` seconds without progress.

        Raises:
            RankPoolError: ``fn`` raised on some ranks, no rank made progress, or a process ended.
        """
        reports = self._run(fn, world_size, args, kwargs, timeout)
        errors = _errors(reports)
        if errors:
            texts = [f"rank {index}:\n{reports[index].traceback}" for index in errors]
            message = "\n".join([f"{_name(fn)} raised on {len(errors)} of {world_size} ranks.\n", *texts])
            raise RankPoolError(message, errors) from next(iter(errors.values()))
        return [reports[index].value for index in range(world_size)]

    def run_expecting_errors(
        self, fn: Function, world_size: int, /, *args: Any, timeout: float = NO_PROGRESS_TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """Run ``fn`` like :meth:`run`, but return the exceptions of ranks that raised, with the traceback as a note.

        Every rank has to return or raise. A rank that is stuck or dies raises as in :meth:`run`.
        """
        reports = self._run(fn, world_size, args, kwargs, timeout)
        ordered = [reports[index] for index in range(world_size)]
        return [report.value if report.error is None else report.error for report in ordered]

    def close(self) -> None:
        """End all processes. The pool can be used again, and then starts new ones."""
        while self._groups:
            self._groups.popitem()[1].kill()

    def _run(
        self, fn: Function, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Reports:
        job = _encode_job(fn, args, kwargs)
        if world_size not in self._groups:
            self._groups[world_size] = _start(world_size, self.compile_limit)
        group = self._groups[world_size]
        group.num_jobs += 1
        try:
            for rank in group.ranks:
                rank.beat.value = time.monotonic()
                # If a rank died between two jobs, _wait finds it.
                with contextlib.suppress(BrokenPipeError):
                    rank.connection.send((group.num_jobs, job))
            reports = self._wait(group, fn, timeout)
            self._clean_up(group, fn)
        except BaseException:  # This includes KeyboardInterrupt, because ranks in an unknown state are of no use.
            self._groups.pop(world_size).kill()
            raise
        return reports

    def _clean_up(self, group: _Group, fn: Function) -> None:
        """Let the ranks destroy the job's process groups. None of them is in a collective any more."""
        for index, rank in enumerate(group.ranks):
            try:
                rank.connection.send(None)
                if not rank.connection.poll(self.grace):
                    raise RankPoolError(f"rank {index} is stuck destroying the groups of {_name(fn)}:\n{rank.stack()}")
                rank.connection.recv()
            except (EOFError, ConnectionError):
                done = {other: _Report() for other in range(len(group.ranks)) if other != index}
                raise group.death(fn, done, index) from None

    def _wait(self, group: _Group, fn: Function, timeout: float) -> Reports:
        reports: Reports = {}
        last_failure = float("inf")
        while len(reports) < len(group.ranks):
            pending = [(index, rank) for index, rank in enumerate(group.ranks) if index not in reports]
            wait([rank.connection for _, rank in pending], timeout=_WATCH_INTERVAL)
            for index, rank in pending:
                try:
                    if rank.connection.poll():
                        reports[index] = _decode_report(rank.connection.recv_bytes())
                        if reports[index].error is not None:
                            last_failure = time.monotonic()
                except (EOFError, ConnectionResetError):
                    raise group.death(fn, reports, index) from None
            if len(reports) == len(group.ranks):
                break
            idle = time.monotonic() - max(rank.beat.value for rank in group.ranks)
            if idle > timeout:
                raise RankPoolTimeout(
                    f"{_name(fn)} made no progress for {timeout:g} s on {len(group.ranks)} ranks. If it is only slow, "
                    f"call tests.rank_pool.heartbeat() in it, or pass timeout=.\n\n{group.describe(reports)}",
                    _errors(reports),
                )
            if min(time.monotonic() - last_failure, idle) > self.grace:
                raise RankPoolError(
                    f"{_name(fn)} raised on {len(_errors(reports))} of {len(group.ranks)} ranks, and the others were "
                    f"still stuck {self.grace:g} s later.\n\n{group.describe(reports)}",
                    _errors(reports),
                )
        return reports


# Several ranks share the cores, so more threads would only wait for each other.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
if sys.platform == "linux":
    _ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"  # This works even if the host's name does not resolve.


def _start(world_size: int, compile_limit: float) -> _Group:
    # With port 0 the system chooses a free one, and the store holds it from then on.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = _Group(store, tempfile.TemporaryDirectory(prefix="rank_pool_"))
    context = _context()
    environment = {**os.environ, **_ENVIRONMENT, "WORLD_SIZE": str(world_size)}
    try:
        for index in range(world_size):
            ours, theirs = context.Pipe()
            beat = context.Value("d", time.monotonic(), lock=False)
            stack_file = Path(group.folder.name) / f"rank{index}.txt"
            environment |= {"RANK": str(index), "LOCAL_RANK": str(index)}
            arguments = (store.port, stack_file, environment, compile_limit, theirs, beat)
            process = context.Process(target=_work, args=arguments, daemon=True, name=f"rank {index}")
            # The first rank starts the process that forks ranks. Python 3.11 to 3.13 do not pass sys.path on to it.
            with mock.patch.dict(os.environ, {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}):
                process.start()
            theirs.close()
            group.ranks.append(_Rank(process, ours, beat, stack_file))
        deadline = time.monotonic() + START_TIMEOUT
        for index, rank in enumerate(group.ranks):
            if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RankPoolTimeout(f"rank {index} of {world_size} did not start within {START_TIMEOUT:g} s")
            try:
                rank.connection.recv()
            except EOFError:
                raise RankDied(f"rank {index} of {world_size} died while starting: its output tells why") from None
    except BaseException:
        group.kill()
        raise
    return group


def _context() -> BaseContext:
    if torch.cuda.is_available():
        # The imports may touch the driver, and a process forked after that cannot use CUDA.
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_preload"])
    return context


def _encode_job(fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if not module or module == "__main__" or "<" in qualname or not qualname:
        raise TypeError(
            f"{fn!r} cannot be found by its name in another process. Expected a function at the top level of an "
            "importable module (no lambda, no closure, no partial): move it there and pass what it needs as arguments."
        )
    # Send the function by name: pickle would hide an import error of its module in the worker's receive.
    return _save((module, qualname, _save((args, kwargs)), list(warnings.filters)))


def _decode_report(data: bytes) -> _Report:
    value, error, text = pickle.loads(data)
    try:
        value = _load(value) if value is not None else None
        raised = pickle.loads(error) if error is not None else None
    except Exception as problem:
        return _Report(error=problem, traceback=f"{text}(and what the rank sent cannot be read here: {problem!r})")
    if text:
        if raised is None:
            raised = RankPoolError(text.strip().splitlines()[-1])
        raised.add_note(f"On the rank:\n{text}")
    return _Report(value, raised, text)


def _errors(reports: Reports) -> dict[int, BaseException]:
    return {index: report.error for index, report in sorted(reports.items()) if report.error is not None}


def _name(fn: Function) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


# -- In a rank.


_beat: Any = None  # The shared double of this process stays None outside a rank.


def heartbeat() -> None:
    """Tell the pool that the job on this rank makes progress. Does nothing outside a rank."""
    if _beat is not None:
        _beat.value = time.monotonic()


@dataclass
class _JobClock:
    """The seconds that the current job has spent importing its module and compiling."""

    seconds: float = 0.0
    is_importing: bool = False


def _work(
    port: int, stack_path: Path, environment: dict[str, str], compile_limit: float, connection: Connection, beat: Any
) -> None:
    global _beat  # noqa: PLW0603  one process, one rank: heartbeat() takes no argument that could carry it
    _beat = beat
    os.environ.clear()
    os.environ.update(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process, and the parent ends this one.
    torch.set_num_threads(1)
    job = _JobClock()
    threading.Thread(target=_watch, args=(compile_limit, job), daemon=True, name="watch").start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    with stack_path.open("w") as stack_file:
        faulthandler.enable(stack_file)
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        connection.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                number, data = connection.recv()
                job.seconds = 0.0
                report = _do(data, rank, world_size, dist.PrefixStore(f"job{number}", store), job)
                heartbeat()
                connection.send_bytes(report)
                connection.recv()
                if dist.is_initialized():
                    dist.destroy_process_group()
                _end_threads_of_old_groups()
                connection.send("clean")


def _end_threads_of_old_groups() -> None:
    """Free the gloo groups of earlier jobs that only reference cycles keep alive, if they have many threads.

    Some threads of a group wake up 100 times a second. Collecting takes 50 ms, so not every job does it.
    """
    if sys.platform == "linux" and sum(1 for _ in Path("/proc/self/task").iterdir()) > _MOST_THREADS:
        gc.collect()


def _do(data: bytes, rank: int, world_size: int, store: dist.Store, job: _JobClock) -> bytes:
    """Run one job, and return its report: (value or None, pickled exception or None, traceback or "")."""
    try:
        module, qualname, arguments, filters = _load(data)
        _start_fresh()
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters.extend(filters)
            # Import before there is a group, because a rank that imports longer would meet the group's time-out.
            try:
                job.is_importing = True
                fn = importlib.import_module(module)
            finally:
                job.is_importing = False
                store.set(f"imported{rank}", "")
            store.wait([f"imported{other}" for other in range(world_size)], timedelta(seconds=START_TIMEOUT))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
            for name in qualname.split("."):
                fn = getattr(fn, name)
            args, kwargs = _load(arguments)
            heartbeat()
            return pickle.dumps((_save(fn(*args, **kwargs)), None, ""))
    except BaseException as error:  # Outcomes of pytest and SystemExit do not derive from Exception.
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return pickle.dumps((None, None, text))
        return pickle.dumps((None, pickle.dumps(error), text))


def _start_fresh() -> None:
    if "torch._dynamo" in sys.modules:  # Importing it takes a second, and most jobs do not compile.
        torch.compiler.reset()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor caches group names by mesh. These groups ended with the previous job, but a new mesh compares equal.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        sys.modules["torch._dynamo.utils"].counters.clear()
    fill_uninitialized_memory()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)


def fill_uninitialized_memory() -> None:
    """Make ``torch.empty`` return NaN (integers: the largest), so that reading uninitialized memory is noticed."""
    # Without warn_only, operators that have no deterministic form would raise; their warning is filtered.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def _watch(limit: float, job: _JobClock) -> None:
    """Beat while the job imports or compiles. End this process when the parent is gone."""
    parent = multiprocessing.parent_process()
    while True:
        before = time.monotonic()
        time.sleep(_WATCH_INTERVAL)
        # Do not use getppid(): in the system, the parent of a rank is the process from which it was forked.
        if parent is None or not parent.is_alive():
            os._exit(1)
        if (job.is_importing or _is_compiling()) and job.seconds < limit:
            job.seconds += time.monotonic() - before
            heartbeat()


def _is_compiling() -> bool:
    callbacks = sys.modules.get("torch._dynamo.callback")
    # This name is private, but neither a callback (torch.compiler.reset() drops those) nor the main thread's frames
    # work as well. If a torch release renames it, a long compilation counts as a hang.
    counter = "_CompilationCallbackHandler__pending_callbacks_counter"
    # It is None while the module is still being imported, which this thread may see.
    handler = getattr(callbacks, "callback_handler", None)
    return bool(getattr(handler, counter, 0) > 0)


def _save(value: Any) -> bytes:
    # torch.save copies tensors into the bytes. multiprocessing's own pickling would send file descriptors.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
