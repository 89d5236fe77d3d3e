"""A stack of FLUX.1's blocks in bfloat16 on one GPU, and on two ranks that share it over gloo.

The reference is the unmodified stack in float32. Ours may have the error of the unmodified stack in bfloat16, and a
little more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.flux import STACK, TINY_STACK, FluxSize, flux_inputs, flux_transformer, parallel, triton
from benchmarks.gpu.job import OK, WRONG, SectionJob
from benchmarks.gpu.processes import group_of_one, run_world
from benchmarks.harness import relative_error

NEEDS = {"one GPU": 25.0, "two ranks": 45.0}  # seconds
# Sums in another order round differently. Two ranks that do not exchange keys have 20 times the error.
SHARE_OF_16_BITS = 1.3


def run(job: SectionJob) -> None:
    job.add(**_facts(job.device))
    size = TINY_STACK if job.tiny else STACK
    if job.has_time("one GPU", NEEDS["one GPU"]):
        with group_of_one(job.device), torch.no_grad():
            stack = _Stack(job.device, size)
            for name, way in _ways(job.device).items():
                job.measure(stack.compared, way, model=size.layers, ranks=1, way=name)
    if job.has_time("two ranks", NEEDS["two ranks"]):
        run_world(job, on_two_ranks, 2, size)


def _ways(device: torch.device) -> dict[str, Any]:
    ways = {"parallel": parallel}
    return ways if device.type == "cpu" else {**ways, "parallel, Triton attention": triton}


@torch.no_grad()
def on_two_ranks(device: torch.device, _: float, size: FluxSize) -> Iterator[dict[str, Any]]:
    stack = _Stack(device, size)
    for name, way in {"Ulysses": parallel, "ring": partial(parallel, ring=True)}.items():
        yield {"model": size.layers, "way": name, **stack.compared(way)}
    if dist.get_rank() == 0:
        yield {"model": size.layers, "way": "negative control: no exchange", **stack.without_exchange()}


class _Stack:
    """The stack, its inputs, and the result of the unmodified stack in float32."""

    def __init__(self, device: torch.device, size: FluxSize) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self.device = device
        self.transformer, self.kwargs = flux_transformer(device, size), flux_inputs(device, size)
        plain: Tensor = self.transformer(**self.kwargs)[0]
        exactly = {name: x.float() for name, x in self.kwargs.items()}
        self.exact: Tensor = self.transformer.float()(**exactly)[0]
        self.transformer.bfloat16()  # The weights were bfloat16, so nothing is rounded.
        self.own_error = relative_error(plain, self.exact)

    def compared(self, way: Any) -> dict[str, Any]:
        with way(self.transformer, self.device):
            error = relative_error(self.transformer(**self.kwargs)[0], self.exact)
        verdict = OK if error <= SHARE_OF_16_BITS * self.own_error else WRONG
        return {"verdict": verdict, "error": error, "error of the unmodified model": self.own_error}

    def without_exchange(self) -> dict[str, Any]:
        """Run the unmodified stack on half of the tokens. The error must be seen, or the bound says nothing."""
        dims = {"hidden_states": 1, "encoder_hidden_states": 1, "img_ids": 0, "txt_ids": 0}
        half = {name: x.chunk(2, dims[name])[0] if name in dims else x for name, x in self.kwargs.items()}
        error = relative_error(self.transformer(**half)[0], self.exact.chunk(2, dim=1)[0])
        verdict = OK if error > SHARE_OF_16_BITS * self.own_error else WRONG
        return {"verdict": verdict, "error": error, "error of the unmodified model": self.own_error}


def _facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "NCCL": dist.is_nccl_available()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "devices": torch.cuda.device_count(),
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count,
            "GB": round(total / 1e9, 1),
            "GB free": round(free / 1e9, 1),
        }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            facts["nvidia-smi"] = done.stdout.strip().splitlines()
    return facts
