"""The Triton kernel of attention: its errors beside PyTorch's for every kind of call, those in 8 bits, and speed beside flash and cuDNN."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from benchmarks.attention import TINY, Size, measure
from benchmarks.gpu_check.exact import MASKS, Inputs, Results, exact, judge, make_inputs, sdpa
from benchmarks.gpu_check.job import OK, WRONG, Job, first_line, is_fatal
from para_core.attention.choice import Backend
from para_core.attention.local import local_attention_with_lse

# Each kind of call is compiled for each head dim and dtype, which takes seconds: all masks for the most common, and each other once.
CASES = [
    *[(torch.bfloat16, 128, mask) for mask in MASKS],
    *[(torch.bfloat16, head_dim, mask) for head_dim in (64, 36, 96, 256) for mask in ("none", "causal")],
    (torch.float16, 128, "none"),
    (torch.float32, 64, "bool full"),
]
# No bfloat16: Triton's interpreter truncates to it where a GPU rounds.
# In 8 bits, which is not exact: of out and of lse, for normal tensors (docs/attention_kernel.md has 0.01).
INT8_CASES = [(torch.bfloat16, 128, "none"), (torch.float16, 64, "causal"), (torch.bfloat16, 256, "bool full")]
INT8_BOUND = 0.03
TINY_CASES = [(torch.float16, 8, "none"), (torch.float16, 8, "bool full"), (torch.float32, 8, "causal")]
SIZES = (Size(4096, 128, False), Size(16384, 128, False), Size(16384, 128, True), Size(4096, 64, False))
# Seconds that are kept for the timings.
FOR_SPEED = 45


def run(job: Job) -> None:
    with _interpreted() if job.device.type == "cpu" else contextlib.nullcontext():
        shape = (1, 1, 9) if job.tiny else (2, 4, 333)
        exact_cases, int8_cases = (TINY_CASES, TINY_CASES[:1]) if job.tiny else (CASES, INT8_CASES)
        backends: dict[Backend, Any] = {"triton": exact_cases, "triton-int8": int8_cases}
        for backend, cases in backends.items():
            for dtype, head_dim, mask in cases:
                row = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), "D": head_dim, "mask": mask}
                if not job.tiny and job.seconds_left < FOR_SPEED:
                    job.leave_out(f"errors of {row}", "out of time")
                    continue
                try:
                    job.add(**row, **_compare(make_inputs((*shape, head_dim), dtype, job.device, mask=mask), backend))
                except RuntimeError as error:
                    if is_fatal(error):
                        raise
                    job.add(**row, verdict=WRONG, raised=first_line(error))
        for row in measure(TINY if job.tiny else SIZES, job.device, enough_time=lambda: job.seconds_left > 10):
            if "left out" in row:
                job.leave_out(f"{row['tokens']} tokens, D = {row['head_dim']}", row["left out"])
            else:
                job.add(**row)


def _compare(inputs: Inputs, backend: Backend) -> dict[str, Any]:
    expected = exact(inputs)
    own = sdpa(inputs).errors(expected)
    qkv = inputs.query, inputs.key, inputs.value
    out, lse = local_attention_with_lse(*qkv, mask=inputs.mask, is_causal=inputs.is_causal, backend=backend)
    errors = Results(out, lse=lse).errors(expected)
    if backend == "triton":
        verdict = judge(errors, own, inputs.query.dtype)
    else:
        verdict = OK if all(error <= INT8_BOUND for error in errors.values()) else WRONG
    return {"verdict": verdict, "errors": errors, "SDPA": own}


def _interpreted() -> contextlib.AbstractContextManager[None]:
    from benchmarks.interpreted import interpreted

    return interpreted()
