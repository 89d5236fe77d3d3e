"""Checks of ``para_core.doctor`` on a mesh: exactness and host time of attention, and speed of each mesh dim."""

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
from para_core.planner.checks import device_of, seconds_of
from para_core.planner.hardware import LINKS
from para_core.planner.report import BROKEN, CHANGE, DoctorReport, Finding, Ranks


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def _attend(qkv: Sequence[Tensor]) -> Tensor:
    query, key, value = qkv
    return F.scaled_dot_product_attention(query, key, value)


def exactness(ranks: Ranks, mesh: DeviceMesh) -> Finding:
    """Check attention over all ranks against float64 on one device.

    The numbers of tokens and heads are not divisible by the number of ranks.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 64 * ranks.size + 1, ranks.size + 1
    exact_qkv = [torch.randn(1, heads, tokens, 64, generator=generator, dtype=torch.float64) for _ in range(3)]
    exact = _attend(exact_qkv)
    qkv = [x.to(ranks.device, ranks.dtype) for x in exact_qkv]
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        shards = [cp.shard(x, dim=2) for x in qkv]
        result = cp.gather(_attend(shards), dim=2)
    every = ranks.gathered((_error(result.cpu(), exact), _error(_attend(qkv).cpu(), exact)))
    worst, alone = max(meshed for meshed, _ in every), min(single for _, single in every)
    text = f"error {worst:.1e}, of one device {alone:.1e} (against float64; {heads} heads, {tokens} tokens)"
    slack = 1e-6 if ranks.dtype == torch.float32 else 1e-3
    if worst <= 2 * alone + slack:
        return Finding("attention over the mesh", text)
    advice = "results over these ranks are wrong. Compare torch and NCCL versions, and report this table."
    return Finding("attention over the mesh", text, BROKEN, advice)


def host_per_call(ranks: Ranks, mesh: DeviceMesh) -> tuple[Finding, dict[str, Any]]:
    """Measure an attention call over the mesh with so few tokens that only host time and latency count.

    Returns:
        The finding, and the dict ``{"call": seconds}``, both for the slowest rank.
    """
    query = torch.randn(1, ranks.size, 8, 64, device=ranks.device, dtype=ranks.dtype)
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True):
        call = seconds_of(lambda: F.scaled_dot_product_attention(query, query, query), ranks.device)
    seconds = max(ranks.gathered(call))
    text = f"{1e6 * seconds:.0f} µs, with the latency of its exchanges"
    return Finding("host per attention call", text), {"call": seconds}


def links(ranks: Ranks, mesh: DeviceMesh, report: DoctorReport) -> None:
    """Measure latency and bandwidth of each mesh dim, in an all-to-all and in a ring step.

    The findings and the figures are added to ``report``.
    """
    rows = []
    for dim in guided_mesh(mesh).dims:
        if dim.size == 1 or dim.group is None:
            continue
        large = 64 << 20 if ranks.device.type == "cuda" else 1 << 20
        ring_step = _exchange(ranks, dim.group, dim.size, dim.index, large, ring=True)
        all_to_all = _exchange(ranks, dim.group, dim.size, dim.index, large, ring=False)
        row = {
            "mesh dim": dim.name,
            "size": dim.size,
            "latency": all_to_all[0],
            "bytes per second": ring_step[1],
            "all-to-all bytes per second": all_to_all[1],
        }
        rows.append(row)
        text = (
            f"latency {1e6 * all_to_all[0]:.0f} µs; a rank sends {all_to_all[1] / 1e9:.3g} GB/s in an all-to-all, "
            f"{ring_step[1] / 1e9:.3g} GB/s in a ring ({dim.size} ranks)"
        )
        report.findings.append(_judge_bandwidth(f"mesh dim {dim.name}", text, all_to_all[1], ranks))
    report.figures["mesh dims"] = rows


def _judge_bandwidth(name: str, text: str, bandwidth: float, ranks: Ranks) -> Finding:
    device = device_of(ranks)
    if device is None:
        return Finding(name, text)
    link = LINKS[device.link]
    usual = link.all_to_all or link.bandwidth
    if bandwidth >= 0.5 * usual:
        return Finding(name, text)
    advice = (
        f"{link.name} between such devices reaches {usual / 1e9:.0f} GB/s: see nvidia-smi topo -m, and whether "
        "NCCL_P2P_DISABLE or NCCL_SHM_DISABLE is set. Between hosts use the mesh dim that sends least: batch, or "
        "ring; see plan_mesh."
    )
    return Finding(name, text, CHANGE, advice)


def _exchange(
    ranks: Ranks, group: ProcessGroup, size: int, index: int, large: int, *, ring: bool
) -> tuple[float, float]:
    """Return the seconds of a small exchange (the latency), and the bytes per second of a large exchange.

    Both are those of the slowest rank.

    Args:
        size: Number of ranks of ``group``.
        index: Index of this rank in ``group``.
        large: Bytes that each rank sends in the large exchange.
        ring: Whether the exchange is a ring step, in which each rank sends to the next rank only. Otherwise it is an
            all-to-all.
    """

    def timed(sent: int) -> float:
        size_per_peer = max(1, sent // (1 if ring else size - 1))
        outgoing = [0] * size
        incoming = [0] * size
        for peer in [(index + 1) % size] if ring else [x for x in range(size) if x != index]:
            outgoing[peer] = size_per_peer
        for peer in [(index - 1) % size] if ring else [x for x in range(size) if x != index]:
            incoming[peer] = size_per_peer
        data = torch.empty(sum(outgoing), dtype=torch.uint8, device=ranks.device)
        result = torch.empty(sum(incoming), dtype=torch.uint8, device=ranks.device)
        dist.barrier(group)
        return seconds_of(
            lambda: dist.all_to_all_single(result, data, incoming, outgoing, group=group), ranks.device, repeats=5
        )

    latency, seconds = (max(ranks.gathered(timed(sent))) for sent in (1024, large))
    # Subtract the latency only if it is clearly smaller than the measured time, because noise could otherwise make the
    # difference negative.
    return latency, large / (seconds - latency if seconds > 2 * latency else seconds)
