"""Milliseconds on the device, on the host, and by kind of kernel. On a CPU a clock replaces events."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities


class _ClockEvent:
    """A replacement of ``torch.cuda.Event`` on devices whose work is done when the call returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _ClockEvent) -> float:
        return 1e3 * (end.at - self.at)


def _event(device: torch.device) -> Any:
    return _ClockEvent() if device.type == "cpu" else torch.cuda.Event(enable_timing=True)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], Any], device: torch.device, *, repeats: int) -> dict[str, float]:
    """Return the median times of a call until the device is done, and until the call returns. ``call`` has run
    before.
    """
    on_device, on_host = [], []
    for _ in range(repeats):
        start, end = _event(device), _event(device)
        synchronize(device)
        start.record()
        began = time.perf_counter()
        call()
        on_host.append(1e3 * (time.perf_counter() - began))
        end.record()
        synchronize(device)
        on_device.append(start.elapsed_time(end))
    return {"ms": round(statistics.median(on_device), 4), "host ms": round(statistics.median(on_host), 4)}


@dataclass(frozen=True)
class Kernel:
    """A kernel as the profiler saw it, with times in microseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Profile:
    """One call as the profiler saw it.

    Args:
        kernels: what the device did, in order of time. On a CPU they are the aten operators.
        waits: how often the host waited for the device.
    """

    kernels: list[Kernel]
    waits: int

    @property
    def copies(self) -> int:
        """Return the number of copies from and to the host."""
        return sum(_matches(kernel.name, ("htod", "dtoh")) for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Return the number of kernels, fills and copies on the device."""
        return len(self.kernels) - self.copies

    @property
    def busy_ms(self) -> float:
        """Return the milliseconds in which the device did something."""
        end = total = 0.0
        for kernel in self.kernels:
            total += max(0.0, kernel.start + kernel.duration - max(kernel.start, end))
            end = max(end, kernel.start + kernel.duration)
        return total / 1e3


# The functions of the CUDA runtime that make the host wait. A copy from pageable memory is followed by one of them.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def profiled(call: Callable[[], Any], device: torch.device) -> Profile:
    """Run ``call`` once under the profiler. ``call`` has run before. A torch without CUPTI sees no kernels."""
    cpu, name = device.type == "cpu", "profiled call"
    activities = {ProfilerActivity.CPU}
    if not cpu:
        activities |= supported_activities() & {ProfilerActivity.CUDA}
    synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        with record_function(name):
            call()
        synchronize(device)
    events = list(profiler.events() or ())
    span = next(event.time_range for event in events if event.name == name and event.device_type == DeviceType.CPU)
    kernels, waits = [], 0
    for event in events:
        start = event.time_range.start
        if cpu and event.name.startswith("aten::"):
            kernels.append(Kernel(event.name, start, event.self_cpu_time_total))
        elif event.device_type == DeviceType.CUDA:
            # Annotations are drawn around kernels.
            if event.is_user_annotation or event.name == name:
                continue
            kernels.append(Kernel(event.name, start, event.time_range.end - start))
        elif event.name in _WAITS and span.start <= start <= span.end:
            waits += 1
    return Profile(sorted(kernels, key=lambda kernel: kernel.start), waits)


_ATTENTION = ("flash", "fmha", "attention", "sdpa", "cudnn")
_COPY = ("copy", "memcpy", "memset", "cat", "fill", "empty", "pack", "exchange")


def phases(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the milliseconds of the phases of one attention call over a mesh, distinguished by the names and the order
    of kernels.

    ``pack`` is all before the first attention kernel. After that, ``merge`` is arithmetic, ``copies between`` are
    copies between attention kernels (blocks, casts), and ``unpack`` is copies after the last one.
    """
    ordered = list(kernels)
    attention = [index for index, kernel in enumerate(ordered) if _matches(kernel.name, _ATTENTION)]
    if not attention:
        return {}
    totals: dict[str, float] = defaultdict(float)
    for index, kernel in enumerate(ordered):
        if index in attention:
            phase = "attention"
        elif index < attention[0]:
            phase = "pack"
        elif not _matches(kernel.name, _COPY):
            phase = "merge"
        else:
            phase = "copies between" if index < attention[-1] else "unpack"
        totals[phase] += kernel.duration / 1e3
    return {name: round(total, 4) for name, total in totals.items()}


def _matches(name: str, words: Iterable[str]) -> bool:
    return any(word in name.lower() for word in words)
