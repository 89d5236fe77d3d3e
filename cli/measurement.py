"""Measurement of one request on a group of ranks: seconds, memory, launches, bytes sent, and profiler traces.

`bench.py` calls :func:`measure`. Launches and bytes are counted in `para_core/recorder/run_counter.py`, and
pixels are compared in `comparison.py`. Tests: tests/cli/test_bench.py.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from para_core.cli.comparison import Reference, compare, make_reference
from para_core.cli.progress import Bars, showing_phases
from para_core.cli.ranks import ending_on_error, gather_values, is_first_rank, process_group
from para_core.cli.traces import trace_path
from para_core.fleet.build import build, dtype_of
from para_core.fleet.engine import LaunchedRanks, OwnRank, open_ranks, starts_processes
from para_core.fleet.libraries import quiet
from para_core.fleet.recipe import Recipe, can_verify
from para_core.fleet.request import Request
from para_core.fleet.work import Watch, call_pipe, make_metadata, make_step_callback
from para_core.launcher.link import CallerLink
from para_core.progress import report
from para_core.recorder.run_counter import RunCounter

# Additional timeout in seconds, because the other ranks wait while the first rank generates alone for the
# comparison. Under torchrun it stays that of the default group: torch has no public function to change it, so
# with --check a rank that never answers is noticed only after this time.
_SECONDS_OF_REFERENCE = 24 * 3600.0


@dataclass(frozen=True)
class MeasurementJob:
    """A request that a group of ranks generates several times, and the measurements to make."""

    recipe: Recipe
    request: Request
    warmup_runs: int  # before the timed ones
    runs: int
    check: bool = False  # whether to compare the result with that of one rank
    profile: Path | None = None  # folder in which each rank writes a profiler trace
    debug: bool = False  # whether to show tracebacks and other libraries' log messages

    def count_untimed(self, *, verifies: bool) -> int:
        """Return the number of runs before the timed ones. If calls are verified, which takes time, at least one."""
        return max(self.warmup_runs, int(verifies))


def measure(job: MeasurementJob, ranks: int) -> dict[str, Any] | None:
    """Run the job on ``ranks`` ranks, and return the figures; on torchrun's ranks but the first, None.

    On a rank of torchrun, an exception ends the process: other ranks may wait for this one in a collective.
    """
    with ending_on_error(debug=job.debug):
        reference: Reference | None = None
        late = 0.0
        if job.check:
            late = _SECONDS_OF_REFERENCE
            if is_first_rank():
                reference = _generate_reference(job, ranks)
        with process_group(job.recipe, late=late):
            return _measure_on(job, ranks, reference)


def _generate_reference(job: MeasurementJob, ranks: int) -> Reference:
    """Return the result of one rank alone, which :func:`measure` calls before there is a process group.

    If this process will be a rank itself, it generates here. Else a process does that ends before the ranks
    start, so that its memory is free again.
    """
    load = partial(_ReferenceRank, job)
    single_rank: LaunchedRanks | OwnRank = OwnRank(load)
    if starts_processes(ranks):
        env: dict[str, str] = {}
        if "OMP_NUM_THREADS" not in os.environ:
            # As the ranks will have: a CPU adds up in another order with another number of threads.
            env["OMP_NUM_THREADS"] = "1"
        single_rank = LaunchedRanks(load, 1, timeout=job.recipe.timeout, debug=job.debug, env=env)
    with closing(single_rank), showing_phases():
        report("generating on one rank, for the comparison")
        single_rank.start()
        reference: Reference = single_rank.call("make")
        return reference


class _ReferenceRank:
    """One rank without others, which makes the reference of a job."""

    def __init__(self, job: MeasurementJob) -> None:
        quiet(job.debug)
        self._job = job

    def make(self) -> Reference:
        return make_reference(self._job.recipe, self._job.request)


def _measure_on(job: MeasurementJob, ranks: int, reference: Reference | None) -> dict[str, Any] | None:
    """Load the pipeline on ``ranks`` ranks, run the job, and return its figures on the first rank, else None.

    ``reference`` is that of the first rank; None on others, and without ``job.check``.
    """
    first = is_first_rank()
    # An exact transformer is compared call by call as well, which names the module if it differs. The
    # comparison costs a call of the transformer, so it takes place in a run that is not timed.
    verifies = job.recipe.verify or (job.check and ranks > 1 and can_verify(job.recipe))
    load = partial(MeasuredRank, job, verifies)
    with closing(open_ranks(load, ranks, timeout=job.recipe.timeout, debug=job.debug)) as group:
        with showing_phases(shown=first):
            group.start()
        # As often as MeasuredRank.measure pushes: it also counts one run, and compares two.
        total = job.count_untimed(verifies=verifies) + job.runs + 1
        total += int(job.profile is not None) + 2 * int(job.check)
        with Bars(total, shown=first, steps=False, unit="runs") as bars:
            figures: dict[str, Any] | None = group.call("measure", reference, listener=lambda _: bars.end())
    return figures


class MeasuredRank:
    """The pipeline of a job on this rank. ``verifies`` says whether calls of its transformer are compared."""

    def __init__(self, job: MeasurementJob, verifies: bool) -> None:
        quiet(job.debug)
        self._job = job
        self._untimed_runs = job.count_untimed(verifies=verifies)
        self._pipe = build(replace(job.recipe, verify=verifies))

    def measure(self, reference: Reference | None, link: CallerLink) -> dict[str, Any] | None:
        """Generate as often as the job says. Return the figures on the first rank, None on others. A
        collective call.

        None is pushed after each generation. ``reference`` is used on the first rank.
        """
        job, pipe = self._job, self._pipe
        first = is_first_rank()
        done = partial(link.push, None)
        for _ in range(self._untimed_runs):
            call_pipe(pipe, [job.request])
            done()
        _reset_memory()
        runs = []
        for _ in range(job.runs):
            runs.append(time_run(pipe, job.request))
            done()
        memory = _read_peak_memory()
        counts = count_run(pipe, job.request)
        done()
        if job.profile is not None:
            _profile(pipe, job.request, job.profile)
            done()
        if not first:
            reference = None
        check: dict[str, Any] | None = None
        if job.check:
            check = compare(pipe, job.request, job.recipe, reference, done)
        ranks = gather_values({"runs": runs, **memory, **counts})
        if not first:
            return None
        return {
            "date": time.strftime("%Y-%m-%d"),
            # The seconds of several runs, below, replace those of one.
            **make_metadata(pipe, job.request, job.recipe, seconds=0.0),
            "dtype": str(dtype_of(job.recipe)).removeprefix("torch."),
            "warmup_runs": self._untimed_runs,
            "runs": job.runs,
            "seconds": _summarize_seconds([rank.pop("runs") for rank in ranks]),
            "ranks": ranks,
            "check": check,
        }


def time_run(pipe: Any, request: Request) -> dict[str, Any]:
    """Generate once, and return ``{"seconds": of the generation, "steps": [of each step but the first]}``. A
    collective call.

    On a GPU, steps are timed with events. The device is synchronized only before and after the generation,
    because waiting after each step would slow it down.
    """
    on_gpu = torch.cuda.is_available()
    instants: list[float] = []
    events: list[torch.cuda.Event] = []

    def mark(step: int) -> None:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
        else:
            instants.append(time.perf_counter())

    options = make_step_callback(pipe, Watch(progress=mark))
    _wait_for_ranks()
    start = time.perf_counter()
    call_pipe(pipe, [request], **options)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    steps = [end - begin for begin, end in pairwise(instants)]
    if on_gpu:
        steps = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    return {"seconds": seconds, "steps": steps}


def _wait_for_ranks() -> None:
    """Wait for all ranks and this rank's device, so that no earlier work is measured. A collective call."""
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summarize_seconds(runs_of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Summarize the results of :func:`time_run` for each rank and run. The slowest rank counts."""
    runs = list(zip(*runs_of_ranks, strict=True))
    generations = [max(rank["seconds"] for rank in run) for run in runs]
    # The cache may skip some steps, so a run is represented by the mean over its steps.
    means = [max(sum(rank["steps"]) / len(rank["steps"]) for rank in run) for run in runs if run[0]["steps"]]
    per_step: dict[str, Any] | None = None
    if means:
        per_step = {**_summarize(means), "steps of first rank": [list(run[0]["steps"]) for run in runs]}
    return {"per generation": _summarize(generations), "per step": per_step}


def _summarize(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "each": list(values)}


def _reset_memory() -> None:
    """Begin to measure the peak memory of this rank, which :func:`_read_peak_memory` returns."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    # On Linux, writing 5 to this file resets the peak of resident memory. If that is impossible, the peak
    # since the start of the process is reported.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _read_peak_memory() -> dict[str, int | None]:
    """Return this rank's peak bytes since :func:`_reset_memory`, as ``{"device memory": …, "host memory":
    …}``.

    Device memory is None without a GPU. If the peak of host memory cannot be reset, it is that since the
    process began.
    """
    device: int | None = None
    if torch.cuda.is_available():
        device = torch.cuda.max_memory_allocated()
    # ru_maxrss is not reset by clear_refs, but exists beyond Linux. Its unit is a byte on macOS, else 1024
    # bytes.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":
        host *= 1024
    with suppress(OSError):
        for kilobytes in re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            host = int(kilobytes) * 1024
    return {"device memory": device, "host memory": host}


def count_run(pipe: Any, request: Request) -> dict[str, Any]:
    """Generate once, and return the launches, collectives and bytes sent of this rank, in total and per step.
    A collective call. The figures per step are None if the pipeline has no callback, or only one step.
    Compiled modules run eagerly here.

    The figures per step are means without the first step, in which ranks also exchange shapes.
    """
    at_steps: list[dict[str, int]] = []

    def counts() -> dict[str, int]:
        names = {"launches": counter.launches, "collectives": counter.collectives}
        return {**names, "bytes sent": counter.bytes_sent}

    options = make_step_callback(pipe, Watch(progress=lambda step: at_steps.append(counts())))
    _wait_for_ranks()
    # RunCounter is a dispatch mode, inside which a module compiled in place (module.compile()) raises. So run
    # it uncompiled.
    with torch.compiler.set_stance("force_eager"), RunCounter() as counter:
        call_pipe(pipe, [request], **options)
    total = counts()
    figures: dict[str, Any] = {**total, **{f"{name} per step": None for name in total}}
    steps = len(at_steps) - 1
    if steps > 0:
        for name in total:
            figures[f"{name} per step"] = (at_steps[-1][name] - at_steps[0][name]) / steps
    return figures


def _profile(pipe: Any, request: Request, folder: Path) -> None:
    """Generate once, and write this rank's trace in Chrome's format, which Perfetto opens. A collective call."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    _wait_for_ranks()
    with profile(activities=activities) as profiler, record_function("para_core: one generation"):
        call_pipe(pipe, [request])
    rank = 0
    if dist.is_initialized():
        rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace_path(folder, rank)))
