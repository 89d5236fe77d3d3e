"""Facts about the machine, and the first use of the CUDA libraries, so that later sections need not wait for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.gpu.job import OK, WRONG, SectionJob
from benchmarks.gpu.timing import synchronize
from benchmarks.harness import relative_error

# Libraries of several GB may come from a cold disk.
NEEDS = {"first use of the libraries": 95.0}
BOUND = 1e-2  # This is the bound for bfloat16 products.


def run(job: SectionJob) -> None:
    job.add(**_facts(job.device))
    if not job.has_time("first use of the libraries", NEEDS["first use of the libraries"]):
        return
    uses: dict[str, Callable[[torch.device], float]] = {
        "matrix product": _product,
        "convolution": _convolution,
        "attention": _attention,
    }
    for name, use in uses.items():
        job.measure(_first_use, use, job.device, use=name)


def _first_use(use: Callable[[torch.device], float], device: torch.device) -> dict[str, Any]:
    began = time.monotonic()
    error = use(device)
    synchronize(device)
    seconds = round(time.monotonic() - began, 2)
    return {"verdict": OK if error <= BOUND else WRONG, "error": error, "seconds": seconds}


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
            "architectures of torch": torch.cuda.get_arch_list(),
        }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            facts["nvidia-smi"] = done.stdout.strip().splitlines()
    return facts


def _product(device: torch.device) -> float:
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return relative_error((a.to(device, torch.bfloat16) @ a.to(device, torch.bfloat16)).cpu(), a @ a)


def _convolution(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 8, 16, 16, generator=generator), torch.randn(8, 8, 3, 3, generator=generator)
    out = F.conv2d(x.to(device, torch.bfloat16), weight.to(device, torch.bfloat16), padding=1)
    return relative_error(out.cpu(), F.conv2d(x, weight, padding=1))


def _attention(device: torch.device) -> float:
    q = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    out = F.scaled_dot_product_attention(*[q.to(device, torch.bfloat16)] * 3)
    return relative_error(out.cpu(), F.scaled_dot_product_attention(q, q, q))
