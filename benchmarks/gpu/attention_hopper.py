"""The Hopper tier of attention, which no call uses unasked: errors and speed, next to the portable kernel, flash and
cuDNN.

It is a section of its own, because code that has never run on a device may hang, and should not take other results with
it.
"""

from __future__ import annotations

import torch

from benchmarks.attention.single_device import HOPPER_WAY, TINY_HOPPER, Size, hopper_ways
from benchmarks.gpu.attention import compile_ways, timings
from benchmarks.gpu.job import FAILED, OK, WRONG, SectionJob, SectionSkipped
from benchmarks.gpu.processes import interpreted_on_cpu

# The most important sizes come first, because each kind of call is compiled for each way, which takes seconds.
SIZES = (Size(16384, 128, False), Size(16384, 128, True), Size(4096, 64, False), Size(4096, 256, False))

# These are seconds of compiling in a pool of processes, and of timings (5 ways of each size).
COMPILE, WAY = 90.0, 3.0
NEEDS = {"compile": COMPILE, "sizes": len(SIZES) * 5 * WAY}


def run(job: SectionJob) -> None:
    if job.device.type == "cuda" and torch.cuda.get_device_capability(job.device) != (9, 0):
        raise SectionSkipped("the Hopper tier needs a device of compute capability 9.0.")
    sizes = TINY_HOPPER if job.tiny else SIZES
    compile_ways(job, sizes, hopper_ways, COMPILE)
    portable = 0.0
    with interpreted_on_cpu(job.device):
        for row in timings(job, sizes, hopper_ways, WAY):
            if row["way"] == "triton":
                portable = row.get("error", 0.0)
            if row["way"].startswith(HOPPER_WAY):
                # Both round in the same places.
                error = row.get("error")
                row["verdict"] = FAILED if error is None else OK if error <= 1.2 * portable else WRONG
            job.add(**row)
