"""The Triton kernel of attention: its errors, exact and in 8 bits, and its speed next to flash and cuDNN."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.attention.single_device import TINY, Size, measure, portable_ways, run_way, triton_ways
from benchmarks.gpu.exact import MASKS, Inputs, Results, exact, judge, make_inputs, sdpa
from benchmarks.gpu.job import FAILED, OK, WRONG, SectionJob, first_line, is_fatal
from benchmarks.gpu.processes import Task, interpreted_on_cpu, run_in_pool
from para_core.attention.backend_selection import Backend
from para_core.attention.backends import LocalAttentionCall
from para_core.attention.local import local_attention_with_lse

# Each kind of call is compiled for each head dim and dtype, which takes seconds: all masks for the most common, and
# each other once.
CASES = [
    *[(torch.bfloat16, 128, mask) for mask in MASKS],
    *[(torch.bfloat16, head_dim, mask) for head_dim in (64, 36, 96, 256) for mask in ("none", "causal")],
    (torch.float16, 128, "none"),
    (torch.float32, 64, "bool full"),
]
# No bfloat16: Triton's interpreter truncates to it where a GPU rounds.
# In 8 bits, which is not exact: of out and of lse, for normal tensors (docs/kernels.md has 0.01).
INT8_CASES = [(torch.bfloat16, 128, "none"), (torch.float16, 64, "causal"), (torch.bfloat16, 256, "bool full")]
INT8_BOUND = 0.03
TINY_CASES = [(torch.float16, 8, "none"), (torch.float16, 8, "bool full"), (torch.float32, 8, "causal")]
SIZES = (Size(4096, 128, False), Size(16384, 128, False), Size(16384, 128, True), Size(4096, 64, False))
# Seconds of compiling in a pool of processes: 35 kernels of 5 to 20 s each on up to 12 cores; of errors; and of
# timings, 6 ways of each size.
WAY = 2.0
NEEDS = {"compile": 90.0, "errors": 30.0, "sizes": len(SIZES) * 6 * WAY}


def run(job: SectionJob) -> None:
    sizes = TINY if job.tiny else SIZES
    exact_cases, int8_cases = (TINY_CASES, TINY_CASES[:1]) if job.tiny else (CASES, INT8_CASES)
    cases: list[Case] = [("triton", *case) for case in exact_cases]
    cases += [("triton-int8", *case) for case in int8_cases]
    if job.has_time("compile", NEEDS["compile"]):
        tasks: list[Task] = [(f"errors of {case}", compile_case, (case, job.tiny)) for case in cases]
        ways = triton_ways(sizes, job.device, portable_ways)
        tasks += [(f"{name}, {size}", run_way, (size, portable_ways, name)) for size, name in ways]
        # Triton's interpreter compiles nothing: on a CPU one task shows that the pool runs.
        run_in_pool(job, tasks[:1] if job.device.type == "cpu" else tasks, 100.0 if job.tiny else NEEDS["compile"])
    with interpreted_on_cpu(job.device):
        for case in cases:
            _add_errors(job, case)
        for row in measure(
            sizes, job.device, ways=portable_ways, enough_time=lambda: job.seconds_left > (0 if job.tiny else WAY)
        ):
            if "left out" in row:
                job.run_out(f"{row['way']}, {row['tokens']} tokens, D = {row['head_dim']}")
                continue
            if "refused" in row and row["way"].startswith("triton"):
                row["verdict"] = FAILED
            job.add(**row)


# Backend, dtype, head dim and mask.
Case = tuple[Backend, torch.dtype, int, str]


def _inputs(device: torch.device, case: Case, tiny: bool) -> Inputs:
    _, dtype, head_dim, mask = case
    return make_inputs((*((1, 1, 9) if tiny else (2, 4, 333)), head_dim), dtype, device, mask=mask)


def compile_case(device: torch.device, case: Case, tiny: bool) -> None:
    inputs = _inputs(device, case, tiny)
    qkv = inputs.query, inputs.key, inputs.value
    local_attention_with_lse(LocalAttentionCall(*qkv, mask=inputs.mask, is_causal=inputs.is_causal), backend=case[0])


def _add_errors(job: SectionJob, case: Case) -> None:
    backend, dtype, head_dim, mask = case
    row = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), "D": head_dim, "mask": mask}
    if not job.tiny and job.seconds_left < NEEDS["sizes"]:  # which are kept for the timings
        job.run_out(f"errors of {row}")
        return
    try:
        job.add(**row, **_compare(_inputs(job.device, case, job.tiny), backend))
    except Exception as error:  # Triton's own errors are no RuntimeErrors
        if is_fatal(error):
            raise
        job.add(**row, verdict=FAILED, raised=first_line(error))


def _compare(inputs: Inputs, backend: Backend) -> dict[str, Any]:
    expected = exact(inputs)
    own = sdpa(inputs).errors(expected)
    qkv = inputs.query, inputs.key, inputs.value
    out, lse = local_attention_with_lse(
        LocalAttentionCall(*qkv, mask=inputs.mask, is_causal=inputs.is_causal), backend=backend
    )
    errors = Results(out, lse=lse).errors(expected)
    if backend == "triton":
        verdict = judge(errors, own, inputs.query.dtype)
    else:
        verdict = OK if all(error <= INT8_BOUND for error in errors.values()) else WRONG
    return {"verdict": verdict, "errors": errors, "SDPA": own}
