"""The Triton kernel of attention at two sizes, next to PyTorch's: milliseconds, TFLOP/s and error.

The planner reads the figures of attention.json (``measured`` of ``plan_mesh``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.attention.single_device import TINY, Size, WaysOfSize, measure, run_way, triton_ways, ways_of
from benchmarks.gpu.exact import OWN_AT_MOST
from benchmarks.gpu.job import FAILED, OK, WRONG, SectionJob
from benchmarks.gpu.kernels import INT8_BOUND
from benchmarks.gpu.processes import interpreted_on_cpu, run_in_pool

# FLUX.1 at 1024 × 1024, and a short video.
SIZES = (Size(4608, 128, False), Size(16384, 128, False))
# These are seconds of compiling in a pool of processes, and of timings (6 ways of each size).
COMPILE, WAY = 38.0, 1.5
NEEDS = {"compile": COMPILE, "sizes": len(SIZES) * 6 * WAY}


def run(job: SectionJob) -> None:
    sizes = TINY if job.tiny else SIZES
    compile_ways(job, sizes, ways_of, COMPILE)
    with interpreted_on_cpu(job.device):
        for row in timings(job, sizes, ways_of, WAY):
            job.add(**row, **verdict_on(row))


def verdict_on(row: dict[str, Any]) -> dict[str, str]:
    """Return the verdict on a Triton way that computes attention of all keys, and nothing for other ways."""
    bound = {"triton": OWN_AT_MOST, "triton, four continuing calls": OWN_AT_MOST, "triton-int8, not exact": INT8_BOUND}
    if row["way"].startswith("triton") and "refused" in row:
        return {"verdict": FAILED}
    if row["way"] not in bound:
        return {}
    return {"verdict": OK if row["error"] <= bound[row["way"]] else WRONG}


def compile_ways(job: SectionJob, sizes: Sequence[Size], ways: WaysOfSize, seconds: float) -> None:
    """Compile the kernels of all Triton ways in a pool of processes."""
    if not job.has_time("compile", seconds):
        return
    named = triton_ways(sizes, job.device, ways)
    tasks = [(f"{name}, {size}", run_way, (size, ways, name)) for size, name in named]
    # Triton's interpreter compiles nothing, so one task shows that the pool runs.
    run_in_pool(job, tasks[:1] if job.tiny else tasks, 100.0 if job.tiny else seconds)


def timings(job: SectionJob, sizes: Sequence[Size], ways: WaysOfSize, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and size for which ``seconds`` remain."""
    least = 0 if job.tiny else seconds
    for row in measure(sizes, job.device, ways=ways, enough_time=lambda: job.seconds_left > least):
        if "left out" in row:
            job.run_out(f"{row['way']}, {row['tokens']} tokens, D = {row['head_dim']}")
        else:
            yield row
