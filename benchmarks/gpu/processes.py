"""Rank processes that share one device, and pools of processes that compile kernels at the same time."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.job import SectionJob, first_line

# After a rank has failed, the others have this time to report.
GRACE = 5.0  # seconds
_LINE = "{}.jsonl"
_ERROR = "{}.error"
Rows = list[dict[str, Any]]


def use_no_network(device_index: int = 0) -> None:
    """Set the environment variables of torch.distributed in this process, which belongs to this package.

    Args:
        device_index: index of the device that a mesh chooses for this rank.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    os.environ["LOCAL_RANK"] = str(device_index)


def run_ranks(
    function: Callable[..., Iterator[dict[str, Any]]],
    num_ranks: int,
    *args: Any,
    device: torch.device,
    backend: str,
    seconds: float,
    device_per_rank: bool = False,
    bind: bool = False,
    timeout: float = 60.0,
    on_rows: Callable[[list[Rows]], None] = lambda rows: None,
) -> tuple[list[Rows], dict[int, str]]:
    """Run ``function(device, *args)`` on every rank.

    Args:
        function: a function at the top level of a module. Each row that it yields is written at once, so a killed rank
            keeps its rows.
        device: the device of all ranks.
        device_per_rank: whether rank ``i`` has CUDA device ``i`` instead.
        bind: whether to pass the device as ``device_id`` to ``init_process_group``.
        timeout: the time-out of the process group, in seconds.
        on_rows: a function that is called with the rows of each rank so far, each time that there are more.

    Returns:
        The rows of each rank, and the error of each rank that failed or was killed after ``seconds``.
    """
    context = multiprocessing.get_context("spawn")
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        devices = [f"{device.type}:{rank}" if device_per_rank else str(device) for rank in range(num_ranks)]
        group = {"backend": backend, "num_ranks": num_ranks, "bind": bind, "timeout": timeout}
        ranks = [
            context.Process(target=_rank_main, args=(rank, folder, devices[rank], group, end - 1, function, args))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()

        def rows_so_far() -> list[Rows]:
            return [_rows(folder / _LINE.format(number)) for number in range(num_ranks)]

        known = [0] * num_ranks
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
            time.sleep(0.1)
            rows = rows_so_far()
            if known != [len(of_rank) for of_rank in rows]:
                known = [len(of_rank) for of_rank in rows]
                on_rows(rows)
            if any(rank.exitcode for rank in ranks):
                end = min(end, time.monotonic() + GRACE)
        errors = {}
        for number, rank in enumerate(ranks):
            if rank.is_alive():
                errors[number] = f"killed: it had not ended after {seconds:.0f} s, or another rank had failed"
                rank.kill()
            rank.join()
            raised = folder / _ERROR.format(number)
            if raised.exists():
                errors[number] = raised.read_text()
            elif rank.exitcode and number not in errors:
                errors[number] = f"exit code {rank.exitcode}"
        rows = rows_so_far()
        on_rows(rows)
        return rows, errors


def run_world(
    job: SectionJob,
    function: Callable[..., Iterator[dict[str, Any]]],
    num_ranks: int,
    *args: Any,
) -> None:
    """Run ``function(device, end, *args)`` on ranks that share the device over gloo, and add the rows of the first one.

    Args:
        function: a function at the top level of a module. ``end`` is the time at which its processes are killed. A row
            with "left out" names what it had no time for.

    Raises:
        RuntimeError: A rank failed.
    """
    seconds, known = job.seconds_left, 0

    def add_new(rows: list[Rows]) -> None:
        nonlocal known
        for row in rows[0][known:]:
            if "left out" in row:
                job.run_out(row["left out"])
            else:
                job.add(ranks=num_ranks, **row)
        known = len(rows[0])

    end = time.monotonic() + seconds
    _, errors = run_ranks(
        function, num_ranks, end, *args, device=job.device, backend="gloo", seconds=seconds, on_rows=add_new
    )
    if errors:
        raise RuntimeError("\n".join(f"rank {rank} of {num_ranks}: {error}" for rank, error in errors.items()))


def _rows(file: Path) -> Rows:
    # A rank that was killed may leave half a line.
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def _rank_main(
    rank: int,
    folder: Path,
    device_name: str,
    group: dict[str, Any],
    end: float,
    function: Callable[..., Iterator[dict[str, Any]]],
    args: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(max(0.1, end - time.monotonic()), exit=True)
    device = torch.device(device_name)
    use_no_network(device.index or 0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with process_group(rank=rank, device=device, store=folder / "store", **group):
            with (folder / _LINE.format(rank)).open("w", buffering=1) as lines:
                for row in function(device, *args):
                    lines.write(json.dumps(row) + "\n")
            if group["backend"] == "gloo":
                dist.barrier()
    except BaseException:
        (folder / _ERROR.format(rank)).write_text(traceback.format_exc())
        # Do not end by an exception: if a peer has failed, the threads of the groups may never end.
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def process_group(
    backend: str,
    device: torch.device,
    rank: int,
    num_ranks: int,
    store: Path,
    *,
    bind: bool = False,
    timeout: float = 60.0,
) -> Iterator[None]:
    """Create the default group of this process on ``device``, and destroy it at the end. ``bind`` passes
    ``device_id=device``, which torch accepts for accelerators only.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(store), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
        device_id=device if bind and device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """Return the backend of a group whose ranks have a device each."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Create a group of this process alone."""
    backend = backend_of(device)
    with tempfile.TemporaryDirectory() as folder, process_group(backend, device, 0, 1, Path(folder) / "store"):
        yield


# Each process has a CUDA context of half a gigabyte.
MOST = 12
# A task has a name, a function at the top level of a module, and its arguments after the device.
Task = tuple[str, Callable[..., Any], tuple[Any, ...]]


def run_in_pool(job: SectionJob, tasks: Sequence[Task], seconds: float) -> dict[str, str]:
    """Run each task once, and add a row with the time that all of them took.

    Returns:
        The tasks that raised, with the error, and those that had not ended after ``seconds``, with a note. Nothing is
            raised, because a task that fails here fails again when it is measured.
    """
    began = time.monotonic()
    processes = min(MOST, len(os.sched_getaffinity(0)), len(tasks))
    missing = {name: f"had not ended after {seconds:.0f} s" for name, _, _ in tasks}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(_run, [(str(job.device), *task) for task in tasks])
        # A process that dies leaves its task unanswered, so only the time limit ends the wait.
        with contextlib.suppress(multiprocessing.TimeoutError):
            for _ in tasks:
                name, error = results.next(timeout=max(0.1, began + seconds - time.monotonic()))
                if error is None:
                    del missing[name]
                else:
                    missing[name] = error
    job.add(
        compiled=len(tasks) - len(missing),
        processes=processes,
        seconds=round(time.monotonic() - began, 1),
        missing=missing,
    )
    return missing


def _run(task: tuple[str, str, Callable[..., Any], tuple[Any, ...]]) -> tuple[str, str | None]:
    device_name, name, function, arguments = task
    device = torch.device(device_name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    try:
        with interpreted_on_cpu(device):
            function(device, *arguments)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    except Exception as error:
        return name, first_line(error)
    return name, None


def interpreted_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return Triton's interpreter as a context on a CPU, and nothing on a GPU."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    from tests.kernels.interpreted import interpreted

    return interpreted()
