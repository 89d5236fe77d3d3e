"""The doctor's checks of each rank's own machine: versions, memory, backends, speed of the device and of the host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core.planner.hardware import device_named
from para_core.planner.report import BROKEN, CHANGE, Finding, Ranks

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_PACKAGES = ("torch", "diffusers", "transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def versions(ranks: Ranks) -> Finding:
    """Of what matters here, which must be the same on all ranks."""
    own = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            own[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {version}" for name, version in own.items())
    every = ranks.gathered(own)
    different = sorted({name for one in every for name in {*one, *own} if one.get(name) != own.get(name)})
    if different:
        rank = next(rank for rank, one in enumerate(every) if one != own)
        found = ", ".join(f"{name} {every[rank].get(name, 'none')}" for name in different)
        return Finding(
            "versions",
            f"{text}; rank {rank}: {found}",
            BROKEN,
            f"install the same {', '.join(different)} on all hosts.",
        )
    return Finding("versions", text)


def memory(ranks: Ranks) -> Finding:
    """Of every rank's device, and what of it is free."""
    name, free, total = f"CPU, {os.cpu_count()} cores", 0, 0
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        name = torch.cuda.get_device_name(ranks.device)
    elif hasattr(os, "sysconf"):
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    every = ranks.gathered((name, free, total))
    names = sorted({one[0] for one in every})
    least = min(range(len(every)), key=lambda rank: every[rank][1])
    text = f"{len(every)} × {' and '.join(names)}; {every[least][1] / 1e9:.1f} of {every[least][2] / 1e9:.1f} GB free on rank {least}"
    if len(names) > 1:
        return Finding(
            "device", text, CHANGE, "ranks have equal shares, so the slowest device decides: use equal ones."
        )
    if ranks.device.type == "cuda" and every[least][1] < 0.8 * every[least][2]:
        return Finding("device", text, CHANGE, f"something else holds memory on rank {least}'s GPU: see nvidia-smi.")
    return Finding("device", text)


def backends(ranks: Ranks) -> Finding:
    """Which of SDPA's backends serve a plain call in this dtype, and whether there is Triton for this project's kernels."""
    query = torch.randn(1, 4, 256, 64, device=ranks.device, dtype=ranks.dtype)
    serve = []
    for name, backend in _BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(query, query, query)
        except RuntimeError:
            continue
        serve.append(name)
    found = ", ".join(serve) + f" ({str(ranks.dtype).removeprefix('torch.')})"
    if ranks.device.type != "cuda":
        return Finding("backends", found)
    if not {"flash", "cuDNN"} & set(serve):
        return Finding(
            "backends", found, CHANGE, "no flash or cuDNN attention serves this GPU: install a torch built for it."
        )
    if importlib.util.find_spec("triton") is None:
        return Finding(
            "backends", found, CHANGE, "install triton: merging and packing run in kernels of their own then."
        )
    return Finding("backends", found)


def seconds_of(work: Callable[[], Any], device: torch.device, *, repeats: int = 10, rounds: int = 5) -> float:
    """Seconds of one ``work()``: the median of ``rounds``, each of ``repeats``."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    taken = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        taken.append((time.perf_counter() - start) / repeats)
    return statistics.median(taken)


def speed(ranks: Ranks) -> tuple[Finding, dict[str, Any]]:
    """Operations per second of a large product, and of attention to many keys."""
    size, tokens = (8192, 8192) if ranks.device.type == "cuda" else (512, 512)
    matrix = torch.randn(size, size, device=ranks.device, dtype=ranks.dtype)
    query = torch.randn(1, 8, tokens, 128, device=ranks.device, dtype=ranks.dtype)
    product = 2.0 * size**3 / seconds_of(lambda: matrix @ matrix, ranks.device, repeats=3)
    attention = 4.0 * query.numel() * tokens
    attention /= seconds_of(lambda: F.scaled_dot_product_attention(query, query, query), ranks.device, repeats=3)
    slowest = min(ranks.gathered((product, attention)))
    found = f"{slowest[0] / 1e12:.3g} TFLOP/s in products, {slowest[1] / 1e12:.3g} in attention, on the slowest rank"
    figures = {"products": slowest[0], "attention": slowest[1]}
    try:
        known = device_named(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
    except ValueError:
        known = None
    if known is not None and slowest[0] < 0.6 * known.products * known.of_products:
        advice = f"a {known.name} reaches {known.products * known.of_products / 1e12:.0f} TFLOP/s: see its clocks, power limit and temperature."
        return Finding("device speed", found, CHANGE, advice), figures
    return Finding("device speed", found), figures


def host(ranks: Ranks) -> tuple[Finding, dict[str, Any]]:
    """Seconds until a launch returns: what eager code pays for each of its thousands."""
    x = torch.zeros(16, device=ranks.device)
    launch = max(ranks.gathered(seconds_of(lambda: x + 1, ranks.device, repeats=200)))
    found = f"{1e6 * launch:.1f} µs per launch, on the slowest rank"
    if launch > 15e-6:
        advice = "the host is slow, or busy: compile the transformer, and see that no other process uses its cores."
        return Finding("host", found, CHANGE, advice), {"launch": launch}
    return Finding("host", found), {"launch": launch}
