"""The doctor's checks of what connects ranks: exactness, host time and latency of an attention call, bandwidth of each mesh dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.distributed.mesh import guided_mesh
from para_core.modes.unified import UnifiedAttnMode
from para_core.planner.checks import seconds_of
from para_core.planner.hardware import LINKS, device_named
from para_core.planner.report import BROKEN, CHANGE, DoctorReport, Finding, Ranks


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


def links(ranks: Ranks, mesh: DeviceMesh, report: DoctorReport) -> None:
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
