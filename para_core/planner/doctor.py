"""Check a machine in one minute: versions, backends, attention over the ranks, links, host and memory.

Rank 0 prints a table, and with --output writes a JSON file that :func:`plan_mesh` accepts as ``measured=``. A check
that raises is reported as broken, with its error, and the next check runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.planner import checks
from para_core.planner.checks import DoctorReport, Finding, Ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m para_core.doctor``, and return the exit code: 1 if a check is broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m para_core.doctor", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write, for plan_mesh(measured=)")
    parser.add_argument("--ring", type=int, help="size of the ring mesh dim; the remaining ranks go to ulysses")
    parser.add_argument("--cpu", action="store_true", help="use the CPU and gloo")
    options = parser.parse_args(arguments)
    # Reject a wrong path now, before the checks, which take a minute.
    if options.output is not None and not options.output.absolute().parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.absolute().parent}.")
    try:
        return examine_machine(options.output, ring=options.ring, cpu=options.cpu)
    except ValueError as error:
        parser.error(f"--{error}")


def examine_machine(out: Path | None = None, *, ring: int | None = None, cpu: bool = False) -> int:
    """Run all checks, print the table, and write the results as JSON to ``out``. Return 1 if a check is broken, else 0.

    Args:
        ring: Size of the ``ring`` mesh dim; the remaining ranks form ``ulysses``. Defaults to 2 for an even number of
            at least 4 ranks, else 1.
        cpu: Whether to use the CPU and gloo although there is a GPU.

    Raises:
        ValueError: ``ring`` is not positive.
    """
    if ring is not None and ring < 1:
        raise ValueError(f"ring is {ring}: expected a positive number of ranks.")
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    on_cpu, device = cpu or not torch.cuda.is_available(), torch.device("cpu")
    if not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if size > 1:
        # With this timeout a missing rank is reported instead of hanging the check.
        dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    ranks = Ranks(rank, size, device, torch.float32 if on_cpu else torch.bfloat16)
    try:
        report = examine(ranks, ring=ring)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if ranks.rank == 0:
        sys.stdout.write(report.table() + "\n")
        if out is not None:
            report.write(out)
    return int(report.broken)


def examine(ranks: Ranks, *, ring: int | None = None) -> DoctorReport:
    """Run all checks one after the other, and return the report. This is a collective call."""
    report = DoctorReport()
    _try(report, "versions", checks.versions, ranks, report)
    _try(report, "device", checks.memory, ranks, report)
    _try(report, "backends", checks.backends, ranks, report)
    _try(report, "device speed", checks.speed, ranks, report)
    _try(report, "host", checks.host, ranks, report)
    if ranks.size == 1:
        advice = "launch it with torchrun to measure what connects ranks"
        report.findings.append(Finding("mesh", "one rank", advice=advice))
        return report
    # With an even number of at least 4 ranks, a ring of 2 gives both mesh dims several ranks, so that both are
    # measured.
    default = 2 if ranks.size >= 4 and ranks.size % 2 == 0 else 1
    sizes = {"max_ring_dim_size": default if ring is None else ring}
    mesh = _try(report, "mesh", init_context_parallel_mesh, ranks.device.type, **sizes)
    if mesh is not None:
        report.add("mesh", f"batch × ring × ulysses = {' × '.join(map(str, mesh.mesh.shape))}")
        _try(report, "attention over the mesh", checks.exactness, ranks, report, mesh)
        _try(report, "host per attention call", checks.host_per_call, ranks, report, mesh)
        _try(report, "links", checks.links, ranks, report, mesh)
    return report


def _try(report: DoctorReport, name: str, check: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``check(*args, **kwargs)``. If it raises, add a broken finding to ``report``, and return None."""
    try:
        return check(*args, **kwargs)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        report.add(name, f"{type(error).__name__}: {first}", _advice(name, str(error)), broken=True)
        return None


def _advice(name: str, error: str) -> str:
    if "all have the current device" in error:
        return "give every rank a GPU of its own: torchrun --nproc_per_node with as many processes as there are GPUs."
    if "imed out" in error or "timeout" in error.lower():
        return "a rank is missing or its link is down: see other ranks' output, NCCL_DEBUG=INFO, docs/several_nodes.md."
    if "out of memory" in error:
        return "free device memory: nvidia-smi lists the processes that hold it."
    return f"{name} does not work on this machine: {error.strip()[:300]}"
