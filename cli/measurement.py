"""Measurement of one request on a group of ranks: seconds, memory, launches, bytes, and a profile of each rank."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from para_core.adapters.registry import mesh_of
from para_core.cli.bars import Bars, NoBars
from para_core.cli.comparison import Reference, compare, make_reference
from para_core.cli.ranks import describe_end, ending_on_error, in_torchrun, launch_ranks, process_group, quiet
from para_core.fleet.recipe import Recipe, build, dtype_of
from para_core.fleet.request import Request
from para_core.fleet.work import Watch, call_pipe, metadata, step_callback
from para_core.planner.run_counter import RunCounter

# Seconds that the other ranks wait while the first one generates alone for a comparison.
_ALONE = 24 * 3600.0


@dataclass(frozen=True)
class MeasurementJob:
    """A request that a group of ranks generates several times.

    Args:
        warmup_runs, runs (`int`): Number of generations before, and of those that are timed.
        check (`bool`): Compare the result with that of one rank.
        profile (`Path`, *optional*): Folder in which each rank writes a trace.
        debug (`bool`): Show tracebacks and other libraries' log messages.
        errors (`Path`, *optional*): File to which a launched rank appends the sentence that ends it.
    """

    recipe: Recipe
    request: Request
    warmup_runs: int
    runs: int
    check: bool = False
    profile: Path | None = None
    debug: bool = False
    errors: Path | None = None


def measure(job: MeasurementJob, ranks: int) -> dict[str, Any] | None:
    """Run the job on ``ranks`` new ranks, or in this process. Return the figures on the first rank, None on others.

    Raises:
        RuntimeError: If a rank ended early.
    """
    if ranks == 1 or in_torchrun():
        return measure_rank(job)
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        try:
            figures: dict[str, Any] = launch_ranks(measure_rank, replace(job, errors=errors), ranks)[0]
        except ChildFailedError as error:
            reasons = errors.read_text().splitlines() if errors.exists() else []
            raise RuntimeError(reasons[0] if reasons else describe_end(error)) from None
    return figures


def trace_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return folder / f"rank-{rank}.json.gz"


def measure_rank(job: MeasurementJob) -> dict[str, Any] | None:
    """Run the job on this rank. On a launched rank, an error ends the process."""

    def note(reason: str) -> None:
        if job.errors is not None:
            # One short write in append mode is atomic.
            with job.errors.open("ab", buffering=0) as file:
                file.write(f"{reason}\n".encode())

    quiet(job.debug)
    first = os.environ.get("RANK", "0") == "0"
    with ending_on_error(note, debug=job.debug, launched=job.errors is not None):
        # Before there is a process group, so that this rank is the only one.
        reference = make_reference(job.recipe, job.request) if job.check and first else None
        with process_group(job.recipe, late=_ALONE if job.check else 0.0):
            return _measure(job, reference)


def _measure(job: MeasurementJob, reference: Reference | None) -> dict[str, Any] | None:
    first = not dist.is_initialized() or dist.get_rank() == 0
    pipe = build(job.recipe)
    extra = 1 + (job.profile is not None) + 2 * job.check
    total = job.warmup_runs + job.runs + extra
    with Bars(total, steps=False, unit="runs") if first else NoBars() as bars:
        for _ in range(job.warmup_runs):
            call_pipe(pipe, [job.request])
            bars.end()
        _reset_memory()
        runs = []
        for _ in range(job.runs):
            runs.append(timed_run(pipe, job.request))
            bars.end()
        memory = _memory()
        counts = count_run(pipe, job.request)
        bars.end()
        if job.profile is not None:
            _profile(pipe, job.request, job.profile)
            bars.end()
        check = compare(pipe, job.request, job.recipe, reference, bars.end) if job.check else None
    ranks = _gather({"runs": runs, **memory, **counts})
    if not first:
        return None
    return {
        **_description(pipe, job),
        "seconds": _seconds([rank.pop("runs") for rank in ranks]),
        "ranks": ranks,
        "check": check,
    }


def _description(pipe: Any, job: MeasurementJob) -> dict[str, Any]:
    described = metadata(pipe, job.request, job.recipe, 0.0)
    del described["seconds"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        **described,
        "dtype": str(dtype_of(job.recipe)).removeprefix("torch."),
        "warmup_runs": job.warmup_runs,
        "runs": job.runs,
    }


# -- seconds


def timed_run(pipe: Any, request: Request) -> dict[str, Any]:
    """Generate once, and return the seconds of the generation, and of each step but the first.

    The device is synchronized at both ends of the generation only: between them a GPU records events.
    """
    on_gpu = torch.cuda.is_available()
    marks: list[Any] = []

    def mark(step: int) -> None:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    options = step_callback(pipe, mesh_of(pipe), Watch(progress=mark))
    _wait_for_ranks()
    start = time.perf_counter()
    call_pipe(pipe, [request], **options)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    steps = [a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in pairwise(marks)]
    return {"seconds": seconds, "steps": steps}


def _wait_for_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(runs_of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the seconds of each run, which are those of its slowest rank, and their median and range."""
    runs = list(zip(*runs_of_ranks, strict=True))
    generations = [max(rank["seconds"] for rank in run) for run in runs]
    # Steps of one run differ if some are cached, so a run has one figure, their mean.
    means = [max(sum(rank["steps"]) / len(rank["steps"]) for rank in run) for run in runs if run[0]["steps"]]
    return {
        "per generation": _summary(generations),
        "per step": {**_summary(means), "steps of first rank": [list(run[0]["steps"]) for run in runs]}
        if means
        else None,
    }


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "each": list(values)}


# -- memory, launches and bytes of a rank


def _reset_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    # Linux: 5 resets the peak of resident memory. Elsewhere, and where it is not allowed, it counts from the start.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory() -> dict[str, int | None]:
    """Return the bytes that this rank held at most since :func:`_reset_memory`."""
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"device memory": device, "host memory": _host_peak()}


def _host_peak() -> int:
    try:
        peak_line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        peak_line = None
    if peak_line is not None:
        return int(peak_line[1]) * 1024
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def count_run(pipe: Any, request: Request) -> dict[str, Any]:
    """Generate once, and return the launches, collectives and bytes sent of this rank, in all and per step.

    A step's figures are means over all steps but the first, in which ranks agree on shapes.
    """
    at_steps: list[tuple[int, ...]] = []

    def note(step: int) -> None:
        at_steps.append((counter.launches, counter.collectives, counter.bytes_sent))

    options = step_callback(pipe, mesh_of(pipe), Watch(progress=note))
    _wait_for_ranks()
    with RunCounter() as counter:
        call_pipe(pipe, [request], **options)
    in_all = (counter.launches, counter.collectives, counter.bytes_sent)
    steps = len(at_steps) - 1
    per_step: list[float | None] = [None] * 3
    if steps > 0:
        per_step = [(last - begin) / steps for begin, last in zip(at_steps[0], at_steps[-1], strict=True)]
    names = ("launches", "collectives", "bytes sent")
    return {
        **dict(zip(names, in_all, strict=True)),
        **{f"{a} per step": b for a, b in zip(names, per_step, strict=True)},
    }


def _gather(figures: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [figures]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    return gathered


# -- profile


def _profile(pipe: Any, request: Request, folder: Path) -> None:
    """Generate once, and write the trace of this rank, which Perfetto opens."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    _wait_for_ranks()
    with profile(activities=activities) as profiler, record_function("para_core: one generation"):
        call_pipe(pipe, [request])
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace_path(folder, rank)))
