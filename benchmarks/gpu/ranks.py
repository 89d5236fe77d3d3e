"""4 ranks on one device, over gloo: attention and its gradients, compared with one rank in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.calls import Case
from benchmarks.gpu.exact import Inputs, Results, exact, judge, make_inputs, sdpa
from benchmarks.gpu.job import FAILED, OK, WRONG, SectionJob, first_line, is_fatal
from benchmarks.gpu.processes import run_world
from para_core import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode

# e4m3 has 3 fraction bits. Rounding to it is off by 2.5 % of a number on average, once when sending and once when
# receiving.
EIGHT_BITS_BOUND = 0.1
LAST_CASE = 6.0  # seconds
RANKS = 4
NEEDS = {"4 ranks": 50.0}  # seconds of all cases, including the start of Python on each rank


def cases(tokens: int) -> list[Case]:
    """Return the cases. Those that fail most often come first. ``tokens`` + 1 is divisible by many numbers of ranks."""
    return [
        Case("uneven tokens, fewer heads than ranks", tokens, 3),
        Case("even", tokens + 1, 8),
        Case("bool mask, uneven", tokens, 8, mask="bool full"),
        Case("causal, uneven", tokens, 8, mask="causal"),
        Case("GQA, uneven", tokens, 8, key_heads=2),
        Case("key padding", tokens + 1, 8, mask="bool key padding"),
        Case("float mask", tokens + 1, 8, mask="float"),
        Case("float32 mask, uneven", tokens, 8, mask="float32"),
        Case("8 bits, uneven", tokens, 8, comm_dtype=torch.float8_e4m3fn),
        Case("float32, uneven", tokens, 6, dtype=torch.float32),
        Case("float16", tokens + 1, 8, dtype=torch.float16),
        Case("float32, float mask", tokens + 1, 8, mask="float", dtype=torch.float32),
    ]


def run(job: SectionJob) -> None:
    tokens, head_dim = (15, 8) if job.tiny else (511, 64)
    if job.has_time("4 ranks", NEEDS["4 ranks"]):
        run_world(job, attend_on_all_meshes, RANKS, tokens, head_dim)


def attend_on_all_meshes(device: torch.device, end: float, tokens: int, head_dim: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case and mesh, on rank 0. No case begins in the last seconds before ``end``."""
    num_ranks = dist.get_world_size()
    meshes = {
        name: (mode, init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses")))
        for name, mode, shape in (
            ("ring", RingAttnMode, (num_ranks, 1)),
            ("Ulysses", UlyssesAttnMode, (1, num_ranks)),
            (f"ring 2 × Ulysses {num_ranks // 2}", UnifiedAttnMode, (2, num_ranks // 2)),
        )
    }
    for case in cases(tokens):
        shape = (2, case.heads, case.tokens, head_dim)
        inputs = make_inputs(shape, case.dtype, device, mask=case.mask, key_heads=case.key_heads)
        expected = exact(inputs) if dist.get_rank() == 0 else None
        for name, (mode, mesh) in meshes.items():
            if _first_rank_says(time.monotonic() > end - LAST_CASE):
                yield {"left out": f"{case.name} on {name}"}
                continue
            row: dict[str, Any] = {"mesh": name, "case": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
            try:
                results = _over_ranks(inputs, mode(mesh, comm_dtype=case.comm_dtype), gradients=case.comm_dtype is None)
            except (RuntimeError, ValueError, TypeError) as error:
                # In eager code all ranks raise errors about input. After any other error the ranks disagree, and the
                # time-out of the groups ends it.
                if is_fatal(error):
                    raise
                yield {**row, "verdict": FAILED, "raised": first_line(error)}
                continue
            if expected is not None:
                errors, own = results.errors(expected), sdpa(inputs).errors(expected)
                verdict = judge(errors, own, case.dtype)
                if case.comm_dtype is not None:
                    verdict = OK if errors["out"] <= EIGHT_BITS_BOUND else WRONG
                yield {**row, "verdict": verdict, "errors": errors, "one rank, SDPA": own}


def _first_rank_says(flag: bool) -> bool:
    told = [flag]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _over_ranks(inputs: Inputs, mode: UnifiedAttnMode, *, gradients: bool) -> Results:
    """Return out and gradients of the whole sequence, gathered on every rank."""
    with mode as cp, torch.no_grad():
        parts = [cp.shard(x, dim=2) for x in (*inputs.qkv, inputs.grad_out)]
        *qkv, grad_out = parts
        for x in qkv:
            x.requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            out = F.scaled_dot_product_attention(
                *qkv, inputs.mask, is_causal=inputs.is_causal, enable_gqa=inputs.heads_per_key_head > 1
            )
        tensors: list[Tensor | None] = [out.detach()]
        if gradients:
            out.backward(grad_out)
            tensors += [x.grad for x in qkv]
        return Results(*[None if x is None else cp.gather(x, dim=2) for x in tensors])
