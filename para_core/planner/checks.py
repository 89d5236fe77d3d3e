"""Checks of ``para_core.doctor`` on each rank by itself: versions, memory, backends, and speed of device and host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core.planner.hardware import Device, gpu_at_hand
from para_core.planner.report import BROKEN, CHANGE, Finding, Ranks
from para_core.triton_support import has_triton

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_PACKAGES = ("torch", "diffusers", "transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def versions(ranks: Ranks) -> Finding:
    """Check that all ranks have the same versions of Python, torch, diffusers, transformers, Triton and NCCL."""
    own = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            own[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {version}" for name, version in own.items())
    every = ranks.gathered(own)
    different = sorted({name for other in every for name in {*other, *own} if other.get(name) != own.get(name)})
    if different:
        rank = next(rank for rank, other in enumerate(every) if other != own)
        others = ", ".join(f"{name} {every[rank].get(name, 'none')}" for name in different)
        advice = f"install the same {', '.join(different)} on all hosts."
        return Finding("versions", f"{text}; rank {rank}: {others}", BROKEN, advice)
    return Finding("versions", text)


def memory(ranks: Ranks) -> Finding:
    """Check that all ranks have the same kind of device, and that a GPU has at least 80 % of its memory free."""
    name, free, total = f"CPU, {os.cpu_count()} cores", 0, 0
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        name = torch.cuda.get_device_name(ranks.device)
    elif hasattr(os, "sysconf"):
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    every = ranks.gathered((name, free, total))
    names = sorted({device for device, _, _ in every})
    rank = min(range(len(every)), key=lambda rank: every[rank][1])
    _, least, of = every[rank]
    text = f"{len(every)} × {' and '.join(names)}; {least / 1e9:.1f} of {of / 1e9:.1f} GB free on rank {rank}"
    if len(names) > 1:
        advice = "ranks compute equal shards, so the slowest device decides: use equal devices."
        return Finding("device", text, CHANGE, advice)
    if ranks.device.type == "cuda" and least < 0.8 * of:
        return Finding("device", text, CHANGE, f"another process holds memory on rank {rank}'s GPU: see nvidia-smi.")
    return Finding("device", text)


def backends(ranks: Ranks) -> Finding:
    """Return a finding that lists the SDPA backends that accept a plain call in the ranks' dtype.

    On a GPU, the finding gives advice if neither flash nor cuDNN is among them, or if Triton is not installed.
    """
    query = torch.randn(1, 4, 256, 64, device=ranks.device, dtype=ranks.dtype)
    accepted = []
    for name, backend in _BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(query, query, query)
        except RuntimeError:
            continue
        accepted.append(name)
    text = ", ".join(accepted) + f" ({str(ranks.dtype).removeprefix('torch.')})"
    if ranks.device.type != "cuda":
        return Finding("backends", text)
    if not {"flash", "cuDNN"} & set(accepted):
        advice = "neither flash nor cuDNN attention runs on this GPU: install a torch built for it."
        return Finding("backends", text, CHANGE, advice)
    if not has_triton():
        return Finding("backends", text, CHANGE, "install triton for the kernels that merge and pack.")
    return Finding("backends", text)


def seconds_of(work: Callable[[], Any], device: torch.device, *, repeats: int = 10, rounds: int = 5) -> float:
    """Return the seconds that one call ``work()`` takes: the median of ``rounds`` means of ``repeats`` calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    seconds = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        seconds.append((time.perf_counter() - start) / repeats)
    return statistics.median(seconds)


def speed(ranks: Ranks) -> tuple[Finding, dict[str, Any]]:
    """Measure the speed of a large matrix product and of an attention call on the slowest rank.

    Returns:
        The finding, and a dict with the keys ``"products"`` and ``"attention"``, in floating-point operations per
        second.
    """
    size, tokens = (8192, 8192) if ranks.device.type == "cuda" else (512, 512)
    matrix = torch.randn(size, size, device=ranks.device, dtype=ranks.dtype)
    query = torch.randn(1, 8, tokens, 128, device=ranks.device, dtype=ranks.dtype)
    product = 2.0 * size**3 / seconds_of(lambda: matrix @ matrix, ranks.device, repeats=3)
    attention = 4.0 * query.numel() * tokens
    attention /= seconds_of(lambda: F.scaled_dot_product_attention(query, query, query), ranks.device, repeats=3)
    slowest = min(ranks.gathered((product, attention)))
    text = f"{slowest[0] / 1e12:.3g} TFLOP/s in products, {slowest[1] / 1e12:.3g} in attention, on the slowest rank"
    figures = {"products": slowest[0], "attention": slowest[1]}
    device = device_of(ranks)
    if device is not None and slowest[0] < 0.6 * device.products * device.of_products:
        usual = f"{device.products * device.of_products / 1e12:.0f} TFLOP/s"
        advice = f"a {device.name} reaches {usual}: check its clocks, power limit and temperature."
        return Finding("device speed", text, CHANGE, advice), figures
    return Finding("device speed", text), figures


def device_of(ranks: Ranks) -> Device | None:
    """Return the planner's figures for this rank's GPU; None on a CPU, or for a GPU that the planner does not know."""
    try:
        return gpu_at_hand(ranks.device) if ranks.device.type == "cuda" else None
    except ValueError:
        return None


def host(ranks: Ranks) -> tuple[Finding, dict[str, Any]]:
    """Measure how long the host takes to launch one operator on the slowest rank.

    Returns:
        The finding, and the dict ``{"launch": seconds}``.
    """
    x = torch.zeros(16, device=ranks.device)
    launch = max(ranks.gathered(seconds_of(lambda: x + 1, ranks.device, repeats=200)))
    text = f"{1e6 * launch:.1f} µs per launch, on the slowest rank"
    if launch > 15e-6:
        advice = "the host is slow or busy: compile the transformer, and check that no other process uses its cores."
        return Finding("host", text, CHANGE, advice), {"launch": launch}
    return Finding("host", text), {"launch": launch}
