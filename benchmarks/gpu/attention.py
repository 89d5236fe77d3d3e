"""The Triton kernel of attention: its errors, exact and in 8 bits, and its speed next to flash and cuDNN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.attention.single_device import TINY, Size, WaysOfSize, measure, portable_ways, run_way, triton_ways
from benchmarks.gpu.exact import MASKS, Inputs, Results, compare, exact, make_inputs
from benchmarks.gpu.job import FAILED, OK, WRONG, SectionJob
from benchmarks.gpu.processes import Task, interpreted_on_cpu, run_in_pool
from para_core.attention.local import local_attention_with_lse
from para_core.option_values import Backend

# Each kind of call is compiled for each head dim and dtype, which takes seconds. So the most common one has all masks,
# and each other kind has one.
CASES = [
    *[(torch.bfloat16, 128, mask) for mask in MASKS],
    *[(torch.bfloat16, head_dim, mask) for head_dim in (64, 36, 96, 256) for mask in ("none", "causal")],
    (torch.float16, 128, "none"),
    (torch.float32, 64, "bool full"),
]
# There is no bfloat16, because Triton's interpreter truncates to it where a GPU rounds. In 8 bits, which is not exact,
# the bounds are for out and lse of normal tensors (docs/kernels.md has 0.01).
INT8_CASES = [(torch.bfloat16, 128, "none"), (torch.float16, 64, "causal"), (torch.bfloat16, 256, "bool full")]
INT8_BOUND = 0.03
TINY_CASES = [(torch.float16, 8, "none"), (torch.float16, 8, "bool full"), (torch.float32, 8, "causal")]
SIZES = (Size(4096, 128, False), Size(16384, 128, False), Size(16384, 128, True), Size(4096, 64, False))
# These are seconds of compiling in a pool of processes (35 kernels of 5 to 20 s each on up to 12 cores), of errors, and
# of timings (6 ways of each size).
COMPILE, WAY = 90.0, 2.0
NEEDS = {"compile": COMPILE, "errors": 30.0, "sizes": len(SIZES) * 6 * WAY}


def run(job: SectionJob) -> None:
    sizes = TINY if job.tiny else SIZES
    exact_cases, int8_cases = (TINY_CASES, TINY_CASES[:1]) if job.tiny else (CASES, INT8_CASES)
    cases: list[Case] = [("triton", *case) for case in exact_cases]
    cases += [("triton-int8", *case) for case in int8_cases]
    compile_ways(job, sizes, portable_ways, [(f"errors of {case}", compile_case, (case, job.tiny)) for case in cases])
    with interpreted_on_cpu(job.device):
        for case in cases:
            row = {"backend": case[0], "dtype": str(case[1]).removeprefix("torch."), "D": case[2], "mask": case[3]}
            if not job.tiny and job.seconds_left < NEEDS["sizes"]:  # This time is kept for the timings.
                job.run_out(f"errors of {row}")
            else:
                job.measure(_compare, _inputs(job.device, case, job.tiny), case[0], **row)
        for row in timings(job, sizes, portable_ways, WAY):
            if "refused" in row and row["way"].startswith("triton"):
                row["verdict"] = FAILED
            job.add(**row)


def compile_ways(job: SectionJob, sizes: Sequence[Size], ways: WaysOfSize, tasks: Sequence[Task] = ()) -> None:
    """Compile the kernels of ``tasks`` and of all Triton ways in a pool of processes."""
    if not job.has_time("compile", COMPILE):
        return
    named = triton_ways(sizes, job.device, ways)
    tasks = [*tasks, *((f"{name}, {size}", run_way, (size, ways, name)) for size, name in named)]
    # Triton's interpreter compiles nothing, so on a CPU one task shows that the pool runs.
    run_in_pool(job, tasks[:1] if job.device.type == "cpu" else tasks, 100.0 if job.tiny else COMPILE)


def timings(job: SectionJob, sizes: Sequence[Size], ways: WaysOfSize, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and size for which ``seconds`` remain."""
    least = 0 if job.tiny else seconds
    for row in measure(sizes, job.device, ways=ways, enough_time=lambda: job.seconds_left > least):
        if "left out" in row:
            job.run_out(f"{row['way']}, {row['tokens']} tokens, D = {row['head_dim']}")
        else:
            yield row


# A case has backend, dtype, head dim and mask.
Case = tuple[Backend, torch.dtype, int, str]


def _inputs(device: torch.device, case: Case, tiny: bool) -> Inputs:
    _, dtype, head_dim, mask = case
    return make_inputs((*((1, 1, 9) if tiny else (2, 4, 333)), head_dim), dtype, device, mask=mask)


def compile_case(device: torch.device, case: Case, tiny: bool) -> None:
    _attend(_inputs(device, case, tiny), case[0])


def _attend(inputs: Inputs, backend: Backend) -> Results:
    out, lse = local_attention_with_lse(inputs.call, backend=backend)
    return Results(out, lse=lse)


def _compare(inputs: Inputs, backend: Backend) -> dict[str, Any]:
    row = compare(_attend(inputs, backend), inputs, exact(inputs))
    if backend == "triton-int8":
        row["verdict"] = OK if all(error <= INT8_BOUND for error in row["errors"].values()) else WRONG
    return row
