"""The Hopper tier of attention, which no call takes by itself: errors and speed beside the portable kernel, flash and cuDNN.

A section of its own: what has never run on a device may hang, and is to take nothing with it.
"""

from __future__ import annotations

import contextlib

import torch

from benchmarks.attention import HOPPER_WAY, TINY_HOPPER, Size, hopper_ways, measure
from benchmarks.gpu_check.job import OK, WRONG, Job, SectionSkipped

# What decides most first: each kind of call is compiled for each way, which takes seconds.
SIZES = (Size(16384, 128, False), Size(16384, 128, True), Size(4096, 64, False), Size(4096, 256, False))


def run(job: Job) -> None:
    if job.device.type == "cuda" and torch.cuda.get_device_capability(job.device) != (9, 0):
        raise SectionSkipped("the Hopper tier needs a device of compute capability 9.0.")
    portable = 0.0
    with _interpreted() if job.device.type == "cpu" else contextlib.nullcontext():
        sizes = TINY_HOPPER if job.tiny else SIZES
        for row in measure(sizes, job.device, ways=hopper_ways, enough_time=lambda: job.seconds_left > 8):
            if "left out" in row:
                job.leave_out(f"{row['tokens']} tokens, D = {row['head_dim']}", row["left out"])
                continue
            if row["way"] == "triton":
                portable = row.get("error", 0.0)
            if row["way"].startswith(HOPPER_WAY):
                # Both round in the same places.
                row["verdict"] = OK if row.get("error", torch.inf) <= 1.2 * portable else WRONG
            job.add(**row)


def _interpreted() -> contextlib.AbstractContextManager[None]:
    from benchmarks.interpreted import interpreted

    return interpreted()
