"""Attention on one device by backend: forward, lse and backward, compared with float64 and with SDPA's own error."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.exact import MASKS, Inputs, Results, exact, judge, make_inputs, sdpa
from benchmarks.gpu.job import FAILED, OK, REFUSED, WRONG, SectionJob, first_line, is_fatal
from para_core.attention.local import local_attention, local_attention_backward, local_attention_with_lse

BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
MEMORY = ("contiguous", "transposed", "packed")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# cuDNN builds a kernel for each shape, which takes up to a second. The parts run at the same time.
NEEDS = {"cases": 100.0}
LAST_CASE = 1.0  # seconds


def run(job: SectionJob) -> None:
    """Run the section for the backend ``job.part``."""
    shape, head_dims = ((1, 2, 9), (8, 12)) if job.tiny else ((2, 4, 333), (128, 64, 36, 96, 256))

    # The memory layout changes neither the computation nor the exact result.
    @functools.lru_cache(maxsize=2)
    def exact_of(head_dim: int, dtype: torch.dtype, mask: str) -> Results:
        return exact(make_inputs((*shape, head_dim), dtype, job.device, mask=mask))

    # All layouts of a case come one after the other, so that kernels built for a shape are used again.
    cases = itertools.product(DTYPES, head_dims, MASKS, MEMORY)
    for number, (dtype, head_dim, mask, memory) in enumerate(cases):
        if dtype == torch.float32 and mask == "float32":
            continue  # "float" is the same here.
        if job.seconds_left < LAST_CASE:
            job.run_out(f"{job.part}: cases from number {number} on")
            return
        inputs = make_inputs((*shape, head_dim), dtype, job.device, mask=mask, memory=memory)
        row = compare(inputs, exact_of(head_dim, dtype, mask), BACKENDS[job.part])
        name = str(dtype).removeprefix("torch.")
        job.add(backend=job.part, dtype=name, D=head_dim, mask=mask, memory=memory, **row)


def compare(inputs: Inputs, expected: Results, backend: SDPBackend) -> dict[str, Any]:
    """Return a verdict, both errors, and the refused part. If SDPA refuses, its math backend is the reference."""
    with sdpa_kernel(backend):
        own, sdpa_refused = _errors(sdpa, inputs, expected)
        errors, refused = _errors(ours, inputs, expected)
        # A rank that has nothing to merge calls it this way.
        alone, alone_refused = _errors(_without_lse, inputs, expected)
    messages = {"SDPA refused": sdpa_refused, "refused": refused, "refused without lse": alone_refused}
    row: dict[str, Any] = {name: message for name, message in messages.items() if message is not None}
    if own is None:
        with sdpa_kernel(SDPBackend.MATH):
            own = sdpa(inputs).errors(expected)
    computed = [errors_of_call for errors_of_call in (errors, alone) if errors_of_call is not None]
    options = {"dtype": inputs.query.dtype, "lse_bound": inputs.lse_bound}
    if any(judge(errors_of_call, own, **options) == WRONG for errors_of_call in computed):
        verdict = WRONG
    elif len(computed) == 2:
        verdict = OK
    else:
        # A call that SDPA refuses may be refused here too.
        verdict = REFUSED if sdpa_refused is not None else FAILED
    return {"verdict": verdict, "errors": errors, "without lse": alone, "SDPA": own, **row}


def _errors(
    attend: Callable[[Inputs], Results], inputs: Inputs, expected: Results
) -> tuple[dict[str, float] | None, str | None]:
    """Return the errors, or the reason why there are none: the exception, and SDPA's reasons, which are warnings."""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            return attend(inputs).errors(expected), None
        except (RuntimeError, ValueError) as error:
            if is_fatal(error):
                raise
            told = dict.fromkeys(str(reason.message).splitlines()[0] for reason in reasons)
            return None, " | ".join([first_line(error), *told])[:600]


def ours(inputs: Inputs) -> Results:
    """Run the forward with lse, and the backward from out and lse."""
    out, lse = local_attention_with_lse(inputs.call)
    dq, dk, dv, _ = local_attention_backward(inputs.call, inputs.grad_out, out, lse, mask_gradient=False)
    return Results(out, dq, dk, dv, lse)


def _without_lse(inputs: Inputs) -> Results:
    return Results(local_attention(inputs.call))
