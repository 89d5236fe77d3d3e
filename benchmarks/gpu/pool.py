"""Run calls once in a pool of processes, so that their kernels are compiled at the same time and lie in Triton's cache afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.job import Job, first_line

# Each process has a CUDA context of half a gigabyte.
MOST = 12
# A name, a function at the top level of a module, and its arguments after the device.
Task = tuple[str, Callable[..., Any], tuple[Any, ...]]


def run_in_pool(job: Job, tasks: Sequence[Task], seconds: float) -> dict[str, str]:
    """Run each task once and add a row with the time that they took.

    Returns:
        The tasks that raised, with the error, and those that had not ended after ``seconds``, with a note. Nothing is raised: what fails here
        fails again where it is measured.
    """
    began = time.monotonic()
    processes = min(MOST, len(os.sched_getaffinity(0)), len(tasks))
    missing = {name: f"had not ended after {seconds:.0f} s" for name, _, _ in tasks}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(_run, [(str(job.device), *task) for task in tasks])
        # A process that dies leaves its task unanswered: only the time limit ends the wait.
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
    from benchmarks.interpreted import interpreted

    return interpreted()
