"""Attention calls that must not make the host wait for the device, under ``torch.cuda.set_sync_debug_mode("error")``.

The process is first rank 0 of 8 with PyTorch's fake backend, whose collectives move nothing, so each wait is
para_core's own. Then two ranks run over gloo, which copies through the host and so may wait itself. That is reported
without a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.exact import Inputs, make_inputs
from benchmarks.gpu.job import FAILED, OK, SectionJob, first_line, is_fatal
from benchmarks.gpu.processes import run_ranks
from benchmarks.gpu.ranks import Case
from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode

WARM_UP = 2  # The first calls compute what later calls look up.
NEEDS = {"fake groups": 28.0, "two ranks over gloo": 22.0}  # seconds


def cases(tokens: int) -> list[Case]:
    """Return the cases. ``tokens`` is one less than a multiple of 8."""
    return [
        Case("even", tokens + 1),
        Case("uneven tokens and heads", tokens, heads=6),
        Case("causal", tokens, mask="causal"),
        Case("bool mask", tokens, mask="bool full"),
        Case("key padding", tokens + 1, mask="bool key padding"),
        Case("float32 mask", tokens + 1, mask="float32"),
        Case("GQA", tokens + 1, key_heads=2),
        Case("8 bits", tokens + 1, comm_dtype=torch.int8),
    ]


def run(job: SectionJob) -> None:
    tokens, head_dim = (31, 8) if job.tiny else (1023, 64)
    if job.device.type == "cpu":
        job.leave_out("the check itself", "a CPU has no queue to wait for; here calls are only made")
    for num_ranks, shapes in ((1, [(1, 1)]), (8, [(1, 8), (8, 1), (2, 4)])):
        with fake_group(num_ranks):
            for row in rows_of_meshes(job.device, shapes, tokens, head_dim):
                job.add(group=f"fake, {num_ranks} rank(s)", **row)
    if job.tiny:
        return  # In the tests, the section ranks starts processes.
    if not job.has_time("two ranks over gloo", NEEDS["two ranks over gloo"]):
        return
    rows, errors = run_ranks(
        over_gloo, 2, tokens, head_dim, device=job.device, backend="gloo", seconds=job.seconds_left
    )
    for row in rows[0]:
        # gloo's own waits are not judged here.
        waits = row.pop("verdict") == FAILED
        job.add(group="gloo, 2 ranks", **row, waits=waits)
    for rank, error in errors.items():
        job.leave_out(f"gloo, rank {rank} of 2", error.strip().splitlines()[-1])


def over_gloo(device: torch.device, tokens: int, head_dim: int) -> Iterator[dict[str, Any]]:
    """Yield the first case on both meshes. If a rank raises during a call, its peer waits for it."""
    for shape in ((1, 2), (2, 1)):
        for row in rows_of_meshes(device, [shape], tokens, head_dim, num_cases=1):
            yield row
            if "raised" in row:
                return


def rows_of_meshes(
    device: torch.device, shapes: list[tuple[int, int]], tokens: int, head_dim: int, num_cases: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row per mesh (ring, ulysses), case and kind of call."""
    for ring, ulysses in shapes:
        mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        for case in cases(tokens)[:num_cases]:
            shape = (1, case.heads, case.tokens, head_dim)
            inputs = make_inputs(shape, torch.bfloat16, device, mask=case.mask, key_heads=case.key_heads)
            with UnifiedAttnMode(mesh, assume_equal=True, comm_dtype=case.comm_dtype) as cp:
                calls = _calls(inputs, cp, gradients=case.comm_dtype is None)
                outcomes = {name: checked(call, device) for name, call in calls.items()}
            where = {"mesh": f"ring {ring} × Ulysses {ulysses}", "case": case.name}
            yield from ({**where, "call": name, **row} for name, row in outcomes.items())


def _calls(inputs: Inputs, cp: UnifiedAttnMode, *, gradients: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls, which are made under ``cp``."""
    options: dict[str, Any] = {"is_causal": inputs.is_causal, "enable_gqa": inputs.heads_per_key_head > 1}
    with torch.no_grad():
        parts = [cp.shard(x, dim=2) for x in inputs.qkv]
    leaves = [x.detach().requires_grad_() for x in parts]
    grad_out = torch.ones_like(leaves[0])

    @torch.no_grad()
    def forward() -> None:
        F.scaled_dot_product_attention(*parts, inputs.mask, **options)

    @torch.no_grad()
    def shard_and_gather() -> None:
        cp.gather(cp.shard(inputs.query, dim=2), dim=2)

    def forward_and_backward() -> None:
        out = F.scaled_dot_product_attention(*leaves, inputs.mask, **options)
        torch.autograd.grad(out, leaves, grad_out)

    calls = {"forward": forward, "shard and gather": shard_and_gather}
    return {**calls, "forward and backward": forward_and_backward} if gradients else calls


def checked(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Warm up, then call once with synchronising forbidden. Return the verdict."""
    for _ in range(WARM_UP):
        call()
    try:
        with _synchronizing_forbidden(device):
            call()
    except RuntimeError as error:
        if is_fatal(error):
            raise
        return {"verdict": FAILED, "raised": first_line(error)}
    return {"verdict": OK}


@contextmanager
def _synchronizing_forbidden(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
