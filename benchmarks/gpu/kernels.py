"""Every Triton kernel next to its reference: attention, exact and in 8 bits, and the kernels around it.

A CPU interprets the kernels of attention. For the others it runs plain PyTorch, whose figures say nothing about them.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import small_kernels
from benchmarks.gpu.exact import MASKS, Inputs, Results, compare, exact, make_inputs
from benchmarks.gpu.job import OK, WRONG, SectionJob, SectionSkipped
from benchmarks.gpu.processes import interpreted_on_cpu, run_in_pool
from para_core.attention.local import local_attention_with_lse
from para_core.option_values import Backend
from para_core.triton_support import load_kernel

# A case has backend, dtype, head dim and mask.
Case = tuple[Backend, torch.dtype, int, str]
# Each kind of call is compiled for each head dim and dtype, which takes seconds. So the most common one has all masks.
CASES: tuple[Case, ...] = (
    *[("triton", torch.bfloat16, 128, mask) for mask in MASKS],
    *[("triton", torch.bfloat16, head_dim, "none") for head_dim in (64, 36, 96, 256)],
    ("triton", torch.float16, 128, "causal"),
    ("triton", torch.float32, 64, "bool full"),
    ("triton-int8", torch.bfloat16, 128, "none"),
    ("triton-int8", torch.float16, 64, "causal"),
)
# There is no bfloat16, because Triton's interpreter truncates to it where a GPU rounds.
TINY_CASES: tuple[Case, ...] = (
    ("triton", torch.float16, 8, "none"),
    ("triton", torch.float16, 8, "bool full"),
    ("triton", torch.float32, 8, "causal"),
    ("triton-int8", torch.float16, 8, "none"),
)
# In 8 bits, which is not exact, the bounds are for out and lse of normal tensors (docs/kernels.md has 0.01).
INT8_BOUND = 0.03
# Seconds: 14 kernels of attention compile in a pool of processes, the others at their first size.
NEEDS = {"compile": 55.0, "attention": 12.0, "small kernels": 38.0}
LAST_KERNEL = 3.0


def run(job: SectionJob) -> None:
    on_gpu = job.device.type != "cpu"
    if on_gpu and load_kernel("merge", job.device) is None:
        raise SectionSkipped("needs Triton, a C compiler, and a GPU of compute capability 8.0 or later")
    cases = TINY_CASES if job.tiny else CASES
    if job.has_time("compile", NEEDS["compile"]):
        tasks = [(str(case), attend_once, (case, job.tiny)) for case in cases]
        # Triton's interpreter compiles nothing, so one task shows that the pool runs.
        run_in_pool(job, tasks[:1] if job.tiny else tasks, 100.0 if job.tiny else NEEDS["compile"])
    if job.has_time("attention", NEEDS["attention"]):
        with interpreted_on_cpu(job.device):
            for case in cases:
                job.measure(_compare, job, case, **_named(case))
    if job.has_time("small kernels", NEEDS["small kernels"]):
        form = "Triton" if on_gpu else "plain PyTorch"
        sizes, dtype = (small_kernels.TINY, torch.float16) if job.tiny else (small_kernels.REAL, torch.bfloat16)
        for tokens, heads, head_dim in sizes:
            size = {"tokens": tokens, "heads": heads, "D": head_dim}
            for kernel in small_kernels.cases(job.device, tokens, heads, head_dim, dtype):
                if job.tiny or job.seconds_left >= LAST_KERNEL:
                    job.measure(small_kernels.measured, job, kernel, kernel=kernel.kernel, form=form, **size)
                else:
                    job.run_out(f"{kernel.kernel}, {size}")


def _named(case: Case) -> dict[str, Any]:
    backend, dtype, head_dim, mask = case
    return {"kernel": f"attention, {backend}", "dtype": str(dtype).removeprefix("torch."), "D": head_dim, "mask": mask}


def _inputs(device: torch.device, case: Case, tiny: bool) -> Inputs:
    _, dtype, head_dim, mask = case
    return make_inputs((*((1, 1, 9) if tiny else (2, 4, 333)), head_dim), dtype, device, mask=mask)


def attend_once(device: torch.device, case: Case, tiny: bool) -> None:
    _attend(_inputs(device, case, tiny), case[0])


def _attend(inputs: Inputs, backend: Backend) -> Results:
    with torch.no_grad():
        out, lse = local_attention_with_lse(inputs.call, backend=backend)
    return Results(out, lse=lse)


def _compare(job: SectionJob, case: Case) -> dict[str, Any]:
    inputs = _inputs(job.device, case, job.tiny)
    row = compare(_attend(inputs, case[0]), inputs, exact(inputs))
    if case[0] == "triton-int8":
        row["verdict"] = OK if all(error <= INT8_BOUND for error in row["errors"].values()) else WRONG
    return row
