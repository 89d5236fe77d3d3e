"""A minute on a user's machine: versions, backends, one attention call over the ranks, links, host, memory; and what to change.

A table on rank 0, and a JSON whose figures :func:`plan_mesh` takes (``measured=``). Each check stands alone: one that raises is reported as
broken, with what it raised, and the next one runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core.make_mesh import init_context_parallel_mesh
from para_core.mesh import guided_mesh
from para_core.modes.unified import UnifiedAttnMode
from para_core.planner.hardware import LINKS, device_named

OK, CHANGE, BROKEN = "ok", "change", "broken"
# A rank that does not come is waited for so long, in seconds.
_PATIENCE = 60.0
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_PACKAGES = ("torch", "diffusers", "transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Args:
        verdict: ``"ok"``, ``"change"`` (it runs, and could do better), or ``"broken"``.
        advice: what to do; empty where all is well.
    """

    name: str
    found: str
    verdict: str = OK
    advice: str = ""


@dataclass
class Report:
    """What was found, and the figures for :func:`para_core.adapters.plan_mesh`."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return any(finding.verdict == BROKEN for finding in self.findings)

    def table(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = [f"{finding.verdict:<7}{finding.name:<{width + 2}}{finding.found}" for finding in self.findings]
        advice = [f"- {finding.name}: {finding.advice}" for finding in self.findings if finding.advice]
        return "\n".join([*lines, "", "What to change:" if advice else "Nothing to change.", *advice])

    def write(self, path: Path) -> None:
        found = {
            "date": time.strftime("%Y-%m-%d"),
            "doctor": self.figures,
            "findings": [asdict(x) for x in self.findings],
        }
        path.write_text(json.dumps(found, indent=2) + "\n")


@dataclass(frozen=True)
class Ranks:
    """This process among those that were launched."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def gathered(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, write; 1 if something is broken."""
    parser = argparse.ArgumentParser(prog="python -m para_core.doctor", description=__doc__)
    parser.add_argument("--output", type=Path, help="write a JSON, which plan_mesh(measured=) takes")
    parser.add_argument("--ring", type=int, help="size of the mesh dim ring; all other ranks are ulysses")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, over gloo")
    options = parser.parse_args(arguments)
    ranks = _join(on_cpu=options.cpu or not torch.cuda.is_available())
    try:
        report = examine(ranks, ring=options.ring)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if ranks.rank == 0:
        sys.stdout.write(report.table() + "\n")
        if options.output is not None:
            report.write(options.output)
    return int(report.broken)


def _join(*, on_cpu: bool) -> Ranks:
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if size > 1:
        backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=_PATIENCE))
    return Ranks(rank, size, device, torch.float32 if on_cpu else torch.bfloat16)


def examine(ranks: Ranks, *, ring: int | None = None) -> Report:
    """Every check, one after the other; all ranks call it alike."""
    report = Report()
    _try(report, "versions", lambda: report.findings.append(versions(ranks)))
    _try(report, "device", lambda: report.findings.append(memory(ranks)))
    _try(report, "backends", lambda: report.findings.append(backends(ranks)))
    _try(report, "device speed", lambda: _note(report, speed(ranks)))
    _try(report, "host", lambda: _note(report, host(ranks)))
    if ranks.size == 1:
        report.findings.append(
            Finding("mesh", "one rank", OK, "launch it with torchrun to measure what connects ranks")
        )
        return report
    meshes: list[DeviceMesh] = []
    sizes = {"max_ring_dim_size": ring if ring is not None else _inner_divisor(ranks.size)}
    _try(report, "mesh", lambda: meshes.append(init_context_parallel_mesh(ranks.device.type, **sizes)))
    for mesh in meshes:
        report.findings.append(Finding("mesh", "batch × ring × ulysses = " + " × ".join(map(str, mesh.mesh.shape))))
        _examine_mesh(ranks, mesh, report)
    return report


def _examine_mesh(ranks: Ranks, mesh: DeviceMesh, report: Report) -> None:
    _try(report, "attention over the mesh", lambda: report.findings.append(exactness(ranks, mesh)))
    _try(report, "host per attention call", lambda: _note(report, host_per_call(ranks, mesh)))
    _try(report, "links", lambda: links(ranks, mesh, report))


def _inner_divisor(number: int) -> int:
    """Of which the ring has as many ranks, so that both dims are measured: 2 if that leaves two or more."""
    return 2 if number >= 4 and number % 2 == 0 else 1


def _try(report: Report, name: str, check: Callable[[], Any]) -> None:
    try:
        check()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        report.findings.append(Finding(name, f"{type(error).__name__}: {first}", BROKEN, _way_out(name, str(error))))


def _way_out(name: str, error: str) -> str:
    if "all have the current device" in error:
        return "give every rank a GPU of its own: torchrun --nproc_per_node with as many processes as there are GPUs."
    if "imed out" in error or "timeout" in error.lower():
        return "a rank did not come, or its link is down: see the other ranks' messages, NCCL_DEBUG=INFO, and docs/time_outs.md."
    if "out of memory" in error:
        return "free the device: nvidia-smi lists what holds its memory."
    return f"{name} does not work on this machine: {error.strip()[:300]}"


def _note(report: Report, found: tuple[Finding, dict[str, Any]]) -> None:
    report.findings.append(found[0])
    report.figures.update(found[1])


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


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def _attend(qkv: Sequence[Tensor]) -> Tensor:
    query, key, value = qkv
    return F.scaled_dot_product_attention(query, key, value)


def exactness(ranks: Ranks, mesh: DeviceMesh) -> Finding:
    """One attention call over all ranks, with a number of tokens and heads that they do not divide, beside float64 on one device."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 64 * ranks.size + 1, ranks.size + 1
    exact_qkv = [torch.randn(1, heads, tokens, 64, generator=generator, dtype=torch.float64) for _ in range(3)]
    exact = _attend(exact_qkv)
    qkv = [x.to(ranks.device, ranks.dtype) for x in exact_qkv]
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        shards = [cp.shard(x, dim=2) for x in qkv]
        result = cp.gather(_attend(shards), dim=2)
    every = ranks.gathered((_error(result.cpu(), exact), _error(_attend(qkv).cpu(), exact)))
    worst, alone = max(one[0] for one in every), min(one[1] for one in every)
    found = f"error {worst:.1e}, of one device {alone:.1e} (against float64; {heads} heads, {tokens} tokens)"
    slack = 1e-6 if ranks.dtype == torch.float32 else 1e-3
    if worst <= 2 * alone + slack:
        return Finding("attention over the mesh", found)
    advice = (
        "results over these ranks are wrong: do not use them; compare torch and NCCL versions, and report this table."
    )
    return Finding("attention over the mesh", found, BROKEN, advice)


def host_per_call(ranks: Ranks, mesh: DeviceMesh) -> tuple[Finding, dict[str, Any]]:
    """Seconds of one intercepted attention call of so few tokens that nothing but the host and latency takes time."""
    query = torch.randn(1, ranks.size, 8, 64, device=ranks.device, dtype=ranks.dtype)
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True):
        call = seconds_of(lambda: F.scaled_dot_product_attention(query, query, query), ranks.device)
    seconds = max(ranks.gathered(call))
    return Finding("host per attention call", f"{1e6 * seconds:.0f} µs, with the latency of its exchanges"), {
        "call": seconds
    }


def links(ranks: Ranks, mesh: DeviceMesh, report: Report) -> None:
    """Latency and bandwidth of each mesh dim: of an all-to-all, and of a step around a ring."""
    rows = []
    for dim in guided_mesh(mesh).dims:
        if dim.size == 1 or dim.group is None:
            continue
        large = 64 << 20 if ranks.device.type == "cuda" else 1 << 20
        around = _exchange(ranks, dim.group, dim.size, dim.index, large, ring=True)
        all_to_all = _exchange(ranks, dim.group, dim.size, dim.index, large, ring=False)
        row = {
            "mesh dim": dim.name,
            "size": dim.size,
            "latency": all_to_all[0],
            "bytes per second": around[1],
            "all-to-all bytes per second": all_to_all[1],
        }
        rows.append(row)
        found = (
            f"latency {1e6 * all_to_all[0]:.0f} µs; all-to-all {all_to_all[1] / 1e9:.3g} GB/s, around a ring {around[1] / 1e9:.3g} GB/s "
            f"that a rank sends ({dim.size} ranks)"
        )
        report.findings.append(_judged(f"mesh dim {dim.name}", found, all_to_all[1], ranks))
    report.figures["mesh dims"] = rows


def _judged(name: str, found: str, bandwidth: float, ranks: Ranks) -> Finding:
    try:
        known = device_named(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
    except ValueError:
        known = None
    if known is None:
        return Finding(name, found)
    link = LINKS[known.link]
    usual = link.all_to_all or link.bandwidth
    if bandwidth >= 0.5 * usual:
        return Finding(name, found)
    advice = (
        f"{link.name} between such devices reaches {usual / 1e9:.0f} GB/s: see nvidia-smi topo -m, and whether NCCL_P2P_DISABLE or "
        "NCCL_SHM_DISABLE is set. Between hosts this dim belongs to what sends least: batch, or the ring; see plan_mesh."
    )
    return Finding(name, found, CHANGE, advice)


def _exchange(
    ranks: Ranks, group: ProcessGroup, size: int, index: int, large: int, *, ring: bool
) -> tuple[float, float]:
    """Seconds of a small exchange, and bytes per second that a rank sends in a large one; of the slowest rank."""

    def timed(sent: int) -> float:
        each = max(1, sent // (1 if ring else size - 1))
        outgoing = [0] * size
        incoming = [0] * size
        for peer in [(index + 1) % size] if ring else [x for x in range(size) if x != index]:
            outgoing[peer] = each
        for peer in [(index - 1) % size] if ring else [x for x in range(size) if x != index]:
            incoming[peer] = each
        data = torch.empty(sum(outgoing), dtype=torch.uint8, device=ranks.device)
        result = torch.empty(sum(incoming), dtype=torch.uint8, device=ranks.device)
        dist.barrier(group)
        return seconds_of(
            lambda: dist.all_to_all_single(result, data, incoming, outgoing, group=group), ranks.device, repeats=5
        )

    latency, slow = timed(1024), timed(large)
    latency, slow = max(ranks.gathered(latency)), max(ranks.gathered(slow))
    # Where noise is larger than the exchange, all of it counts.
    return latency, large / (slow - latency if slow > 2 * latency else slow)
