"""Check a machine: versions, backends, attention over the ranks, links, host and memory.

Run it as ``python -m para_core.doctor``, or on several ranks as ``torchrun --nproc_per_node=4 -m
para_core.doctor``. Rank 0 prints a table, and with --output writes it as JSON. A check that raises is
reported as broken, with its error, and the next check runs. Each check is a collective call.
"""

# ``para_core doctor`` (cli/doctor.py) calls examine_machine. The docstring above is the text of --help. The
# report is in doctor_report.py. Tests: tests/test_doctor.py.

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core.devices import LINKS, Device
from para_core.distributed.create_mesh import SHARED_GPU, init_context_parallel_mesh
from para_core.distributed.mesh import MeshDim, guided_mesh
from para_core.doctor_report import DoctorReport, ExaminedRanks, FailedElsewhereError, Finding
from para_core.foreign_errors import is_lost_connection
from para_core.modes.unified import UnifiedAttnMode
from para_core.triton_support import has_triton

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# Where advice begins. All are assumed: far enough from what is usual that noise alone gives no advice.
_FREE_MEMORY = 0.8  # share of a GPU's memory
_PRODUCT_SPEED = 0.6  # share of the speed that large products reach (Device.product_speed)
_LINK_SPEED = 0.5  # share of what such a link reaches
_LAUNCH = 15e-6  # seconds of one operator on the host; the planner takes 5.7e-6 (LAUNCH in predict.py)
_PACKAGES = ("torch", "diffusers", "transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def check_versions(ranks: ExaminedRanks, report: DoctorReport) -> None:
    """Check that all ranks have the same versions of Python, torch, diffusers, transformers, Triton and NCCL."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {version}" for name, version in installed.items())
    every = ranks.gather(installed)
    different = sorted(
        {name for other in every for name in {*other, *installed} if other.get(name) != installed.get(name)}
    )
    if not different:
        return report.add("versions", text)
    rank = next(rank for rank, other in enumerate(every) if other != installed)
    others = ", ".join(f"{name} {every[rank].get(name, 'none')}" for name in different)
    advice = f"install the same {', '.join(different)} on all hosts."
    return report.add("versions", f"{text}; rank {rank}: {others}", advice, broken=True)


def check_devices(ranks: ExaminedRanks, report: DoctorReport) -> None:
    """Check that all ranks have the same kind of device, and that a GPU has at least 80 % of its memory free."""
    name, free, total = f"CPU, {os.cpu_count()} cores", 0, 0
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        name = torch.cuda.get_device_name(ranks.device)
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    every = ranks.gather((name, free, total))
    names = sorted({device for device, _, _ in every})
    rank = min(range(len(every)), key=lambda rank: every[rank][1])
    _, least, of = every[rank]
    advice = ""
    if len(names) > 1:
        advice = "ranks compute equal shards, so the slowest device decides: use equal devices."
    elif ranks.device.type == "cuda" and least < _FREE_MEMORY * of:
        advice = f"another process holds memory on rank {rank}'s GPU: see nvidia-smi."
    text = f"{len(every)} × {' and '.join(names)}"
    if of > 0:  # macOS and Windows do not say how much memory of the host is free.
        text += f"; {least / 1e9:.1f} of {of / 1e9:.1f} GB free on rank {rank}"
    report.add("device", text, advice)


def list_backends(ranks: ExaminedRanks, report: DoctorReport) -> None:
    """List the SDPA backends that accept a plain call in the ranks' dtype.

    On a GPU, give advice if neither flash nor cuDNN is among them, or if Triton is not installed.
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
    # Nothing is compared, but the ranks meet here as in each check (ExaminedRanks).
    ranks.gather(accepted)
    advice = ""
    if ranks.device.type == "cuda" and not {"flash", "cuDNN"} & set(accepted):
        advice = "neither flash nor cuDNN attention runs on this GPU: install a torch built for it."
    elif ranks.device.type == "cuda" and not has_triton():
        advice = "install triton for the kernels that merge and pack."
    report.add("backends", ", ".join(accepted) + f" ({str(ranks.dtype).removeprefix('torch.')})", advice)


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


def measure_speed(ranks: ExaminedRanks, report: DoctorReport) -> None:
    """Measure operations per second in a large matrix product and in attention, each on the rank that is slowest."""
    size, tokens = 512, 512
    if ranks.device.type == "cuda":
        size, tokens = 8192, 8192
    matrix = torch.randn(size, size, device=ranks.device, dtype=ranks.dtype)
    query = torch.randn(1, 8, tokens, 128, device=ranks.device, dtype=ranks.dtype)
    products = 2.0 * size**3 / seconds_of(lambda: matrix @ matrix, ranks.device, repeats=3)
    attention = 4.0 * query.numel() * tokens
    attention /= seconds_of(
        lambda: F.scaled_dot_product_attention(query, query, query), ranks.device, repeats=3
    )
    products, attention = (min(speeds) for speeds in zip(*ranks.gather((products, attention)), strict=True))
    text = (
        f"{products / 1e12:.3g} TFLOP/s in products, {attention / 1e12:.3g} in attention, on the slowest rank"
    )
    device, advice = ranks.known_device(), ""
    if device is not None and products < _PRODUCT_SPEED * device.product_speed:
        usual = f"{device.product_speed / 1e12:.0f} TFLOP/s"
        advice = f"a {device.name} reaches {usual}: check its clocks, power limit and temperature."
    report.add("device speed", text, advice)
    report.figures.update(products=products, attention=attention)


def measure_host(ranks: ExaminedRanks, report: DoctorReport) -> None:
    """Measure how long the host takes to launch one operator, in seconds on the slowest rank."""
    x = torch.zeros(16, device=ranks.device)
    launch = max(ranks.gather(seconds_of(lambda: x + 1, ranks.device, repeats=200)))
    advice = ""
    if launch > _LAUNCH:
        advice = "the host is slow or busy: compile the transformer, and check that no other process uses its cores."
    report.add("host", f"{1e6 * launch:.1f} µs per launch, on the slowest rank", advice)
    report.figures["launch"] = launch


def _attend(qkv: Sequence[Tensor]) -> Tensor:
    query, key, value = qkv
    return F.scaled_dot_product_attention(query, key, value)


def make_mesh(ranks: ExaminedRanks, report: DoctorReport, ring: int) -> DeviceMesh:
    """Return a new mesh of all ranks, at most ``ring`` of them along the ring, and report its shape."""
    mesh = init_context_parallel_mesh(ranks.device.type, max_ring_dim_size=ring)
    ranks.gather(None)
    report.add("mesh", f"batch × ring × ulysses = {' × '.join(map(str, mesh.mesh.shape))}")
    return mesh


def check_exactness(ranks: ExaminedRanks, report: DoctorReport, mesh: DeviceMesh) -> None:
    """Check attention over all ranks, which divide neither tokens nor heads, against float64 on one device."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 64 * ranks.size + 1, ranks.size + 1
    exact_qkv = [
        torch.randn(1, heads, tokens, 64, generator=generator, dtype=torch.float64) for _ in range(3)
    ]
    exact = _attend(exact_qkv)
    qkv = [x.to(ranks.device, ranks.dtype) for x in exact_qkv]
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        result = cp.gather(_attend([cp.shard(x, dim=2) for x in qkv]), dim=2)
    errors = [float((out.cpu().double() - exact).norm() / exact.norm()) for out in (result, _attend(qkv))]
    meshed, single = zip(*ranks.gather(errors), strict=True)
    # An error that is NaN is wrong, too. max() of Python passes over a NaN of a later rank, that of torch does not.
    on_mesh, on_one_device = float(torch.tensor(meshed, dtype=torch.float64).max()), min(single)
    text = f"error {on_mesh:.1e}, of one device {on_one_device:.1e} (against float64; {heads} heads, {tokens} tokens)"
    rounding = 1e-3
    if ranks.dtype == torch.float32:
        rounding = 1e-6
    advice = ""
    wrong = not on_mesh <= 2 * on_one_device + rounding
    if wrong:
        advice = "results over these ranks are wrong. Compare torch and NCCL versions, and report this table."
    report.add("attention over the mesh", text, advice, broken=wrong)


def measure_attention_call(ranks: ExaminedRanks, report: DoctorReport, mesh: DeviceMesh) -> None:
    """Measure an attention call with so few tokens that only host time and latency count, on the slowest rank."""
    query = torch.randn(1, ranks.size, 8, 64, device=ranks.device, dtype=ranks.dtype)
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True):
        call = seconds_of(lambda: F.scaled_dot_product_attention(query, query, query), ranks.device)
    seconds = max(ranks.gather(call))
    report.add("host per attention call", f"{1e6 * seconds:.0f} µs, with the latency of its exchanges")
    report.figures["call"] = seconds


def measure_links(ranks: ExaminedRanks, report: DoctorReport, mesh: DeviceMesh) -> None:
    """Measure latency and bandwidth of each mesh dim, in an all-to-all and in a ring step."""
    rows = report.figures["mesh dims"] = []
    for dim in guided_mesh(mesh).dims:
        if dim.size == 1 or dim.group is None:
            continue
        _, in_ring = _time_exchange(ranks, dim, ring=True)
        latency, bandwidth = _time_exchange(ranks, dim, ring=False)
        rows.append(
            {
                "mesh dim": dim.name,
                "size": dim.size,
                "latency": latency,
                "bytes per second": in_ring,
                "all-to-all bytes per second": bandwidth,
            }
        )
        text = (
            f"latency {1e6 * latency:.0f} µs; a rank sends {bandwidth / 1e9:.3g} GB/s in an all-to-all, "
            f"{in_ring / 1e9:.3g} GB/s in a ring ({dim.size} ranks)"
        )
        report.add(f"mesh dim {dim.name}", text, advice_on_bandwidth(bandwidth, ranks.known_device()))


def advice_on_bandwidth(bandwidth: float, device: Device | None) -> str:
    """Return advice if ``bandwidth`` is below half of what links between such devices reach; else ``""``."""
    link = None
    if device is not None:
        link = LINKS[device.link]
    usual = 0.0
    if link is not None:
        usual = link.all_to_all or link.bandwidth
    if link is None or bandwidth >= _LINK_SPEED * usual:
        return ""
    return (
        f"{link.name} between such devices reaches {usual / 1e9:.0f} GB/s: see nvidia-smi topo -m, and whether "
        "NCCL_P2P_DISABLE or NCCL_SHM_DISABLE is set. Between hosts use the mesh dim that sends least: batch, or "
        "ring."
    )


def _time_exchange(ranks: ExaminedRanks, dim: MeshDim, *, ring: bool) -> tuple[float, float]:
    """Return the latency (seconds of a small exchange) and the bytes per second of a large one, on the
    slowest rank. Collective.

    In a ring step each rank sends to the next rank only. Otherwise the exchange is an all-to-all.
    """
    distances = range(1, dim.size)
    if ring:
        distances = range(1, 2)

    def time_exchange(sent: int) -> float:
        outgoing, incoming = [0] * dim.size, [0] * dim.size
        for distance in distances:
            outgoing[(dim.index + distance) % dim.size] = max(1, sent // len(distances))
            incoming[(dim.index - distance) % dim.size] = max(1, sent // len(distances))
        data = torch.empty(sum(outgoing), dtype=torch.uint8, device=ranks.device)
        result = torch.empty(sum(incoming), dtype=torch.uint8, device=ranks.device)
        dist.barrier(dim.group)
        return seconds_of(
            lambda: dist.all_to_all_single(result, data, incoming, outgoing, group=dim.group),
            ranks.device,
            repeats=5,
        )

    large = 1 << 20
    if ranks.device.type == "cuda":
        large = 64 << 20
    latency, seconds = (max(ranks.gather(time_exchange(sent))) for sent in (1024, large))
    # Subtract the latency only if it is clearly smaller than the measured time, because noise could otherwise
    # make the difference negative.
    if seconds > 2 * latency:
        seconds -= latency
    return latency, large / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m para_core.doctor``, and return the exit code: 1 if a check is broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m para_core.doctor", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument(
        "--ring", type=int, help="maximum size of the ring mesh dim; the remaining ranks go to ulysses"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU and gloo")
    options = parser.parse_args(arguments)
    # Reject a wrong path now, before the checks, which take a while.
    if options.output is not None and not options.output.absolute().parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.absolute().parent}.")
    if options.output is not None and options.output.is_dir():
        parser.error(f"--output {options.output}: this is a folder; expected a file.")
    try:
        check_ring(options.ring)
    except ValueError as error:
        parser.error(f"--{error}")
    return examine_machine(options.output, ring=options.ring, cpu=options.cpu)


def check_ring(ring: int | None) -> None:
    """Raise ``ValueError`` if ``ring``, the maximum size of a mesh dim, is not positive."""
    if ring is not None and ring < 1:
        raise ValueError(f"ring is {ring}: expected a positive number of ranks.")


def examine_machine(out: Path | None = None, *, ring: int | None = None, cpu: bool = False) -> int:
    """Run all checks, print the table, and write the results as JSON to ``out``. Return 1 if a check is
    broken, else 0.

    Args:
        ring: Maximum size of the ``ring`` mesh dim, which gets the largest divisor of the number of ranks up
            to this; the remaining ranks form ``ulysses``. Defaults to 2 for an even number of at least 4
            ranks, else 1.
        cpu: Whether to use the CPU and gloo although there is a GPU.

    Raises:
        ValueError: ``ring`` is not positive.
    """
    check_ring(ring)
    size, rank = 1, 0
    # A cluster may set one of them: without the other this process is no rank.
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device, dtype, backend = torch.device("cpu"), torch.float32, "gloo"
    if not cpu and torch.cuda.is_available():
        dtype, backend = torch.bfloat16, "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if size > 1:
        # With this timeout a missing rank is reported instead of hanging the check.
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
    ranks = ExaminedRanks(rank, size, device, dtype)
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


def examine(ranks: ExaminedRanks, *, ring: int | None = None) -> DoctorReport:
    """Run all checks one after the other, and return the report. Collective."""
    report = DoctorReport()
    _try_check("versions", check_versions, ranks, report)
    _try_check("device", check_devices, ranks, report)
    _try_check("backends", list_backends, ranks, report)
    _try_check("device speed", measure_speed, ranks, report)
    _try_check("host", measure_host, ranks, report)
    if ranks.size == 1:
        advice = "launch it with torchrun to measure what connects ranks"
        report.findings.append(Finding("mesh", "one rank", advice=advice))
        return report
    # With an even number of at least 4 ranks, a ring of 2 gives both mesh dims several ranks, so that both
    # are measured.
    if ring is None:
        ring = 1
        if ranks.size >= 4 and ranks.size % 2 == 0:
            ring = 2
    mesh = _try_check("mesh", make_mesh, ranks, report, ring)
    if mesh is not None:
        _try_check("attention over the mesh", check_exactness, ranks, report, mesh)
        _try_check("host per attention call", measure_attention_call, ranks, report, mesh)
        _try_check("links", measure_links, ranks, report, mesh)
    return report


def _try_check(
    name: str, check: Callable[..., Any], ranks: ExaminedRanks, report: DoctorReport, *args: Any
) -> Any:
    """Return ``check(ranks, report, *args)``. If it raises, add a broken finding to ``report``, and return None."""
    try:
        return check(ranks, report, *args)
    except FailedElsewhereError as error:
        report.add(name, _first_line(str(error)), _advise_on_error(name, str(error)), broken=True)
    except Exception as error:
        if not is_lost_connection(error):
            # The other ranks may be lost as well: that is a finding of the next check.
            with suppress(Exception):
                ranks.share_failure(error)
        text = f"{type(error).__name__}: {_first_line(str(error))}"
        report.add(name, text, _advise_on_error(name, str(error)), broken=True)
    return None


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]


def _advise_on_error(name: str, error: str) -> str:
    """Return advice for the message of an exception in the check ``name``; else the message itself."""
    if SHARED_GPU in error:
        return "give every rank a GPU of its own: torchrun --nproc_per_node with as many processes as there are GPUs."
    if "imed out" in error or "timeout" in error.lower():
        return "a rank is missing or its link is down: see other ranks' output, NCCL_DEBUG=INFO, docs/several_nodes.md."
    if "out of memory" in error:
        return "free device memory: nvidia-smi lists the processes that hold it."
    return f"{name} does not work on this machine: {error.strip()[:300]}"


if __name__ == "__main__":
    raise SystemExit(main())
