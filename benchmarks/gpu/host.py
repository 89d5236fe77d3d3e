"""The host's part of a call: its milliseconds, the launches, and whether the host or the GPU waits for the other.

"simulated" are the counts of the same call on the simulated device (``simulated_counts``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.calls import WARM_UP, CountedCall, attention_calls, step_calls
from benchmarks.gpu.job import FAILED, OK, SectionJob
from benchmarks.gpu.timing import Profile, milliseconds, profiled
from benchmarks.harness import read_results

NEEDS = {"attention calls": 12.0, "steps": 35.0}  # seconds
# This many calls are queued one after the other, as in a loop of denoising, so that the host may run ahead.
QUEUED = 4


def run(job: SectionJob) -> None:
    simulated: dict[str, dict[str, int]] = read_results("simulated_counts")["calls"]
    # Steps come first, because they say whether the GPU waits.
    for what, calls in (("steps", step_calls), ("attention calls", attention_calls)):
        if job.has_time(what, NEEDS[what]):
            for call in calls(job.device, tiny=job.tiny):
                job.measure(measured, job, call, simulated.get(call.name, {}), call=call.name)


def measured(job: SectionJob, call: CountedCall, simulated: dict[str, int]) -> dict[str, Any]:
    """Return the milliseconds of a step or of an attention call, and the counts of the call.

    The verdict is FAILED if the host waited more often than on the simulated device.
    """
    for _ in range(WARM_UP):
        call.run()

    calls, repeats = (1, 1) if job.tiny else (QUEUED, 5)

    def queued() -> None:
        for _ in range(calls):
            call.run()

    per = calls * max(1, call.steps)
    times = milliseconds(queued, job.device, repeats=repeats)
    profile = profiled(call.run, job.device)
    row: dict[str, Any] = {name: round(value / per, 4) for name, value in times.items()}
    if call.steps and job.device.type != "cpu":
        row["GPU idle"] = idle_part(profile, row["ms"] * call.steps)
    # A profiler that sees no kernel counts none.
    counts = {"launches": profile.launches, "copies": profile.copies} if profile.kernels else {}
    row |= {"launches": None, "copies": None, **counts, "waits": profile.waits}
    row |= {f"simulated {name}": count for name, count in simulated.items()}
    if profile.waits > simulated.get("waits", 0):
        row |= {"verdict": FAILED, "waits at": places_of_waits(call.run)}
    else:
        row["verdict"] = OK
    return row


def idle_part(profile: Profile, ms: float) -> float | None:
    """Return the part of ``ms`` in which the GPU did nothing, because the host was slower; None without a profile."""
    return round(max(0.0, 1 - profile.busy_ms / max(ms, 1e-6)), 3) if profile.kernels else None


def places_of_waits(call: Callable[[], Any]) -> list[str]:
    """Return the lines of Python at which PyTorch made the host wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sorted(
        {f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)}
    )
