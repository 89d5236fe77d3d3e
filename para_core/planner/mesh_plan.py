"""Ranked meshes for one workload, and the reason why each one is slower than the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from para_core.planner.cost import Machine, MeshShape
from para_core.planner.prediction import SHARING, MeshPrediction, Sharing, Workload, predict, shapes
from para_core.weights.pipefusion import PipeFusion

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Bytes of device memory that the CUDA context and allocator fragmentation take.
RESERVED = 6e9
# Bytes of one NCCL communicator, mostly buffers. An assumption: it depends on the links and on NCCL's number of
# channels.
COMMUNICATOR = 0.2e9
_PRINTED_ROWS = 14


@dataclass(frozen=True)
class MeshPlan:
    """Meshes of ``ranks`` ranks: those that run, the fastest first, then those that do not fit, then others.

    ``parallelize_pipe(pipe, mesh=plan.init_mesh(), **plan.best.options)`` uses the first one.

    Args:
        rows (`tuple[MeshPrediction, ...]`): One row per mesh.
        fewer (`Mapping[int, MeshPrediction]`): For smaller numbers of ranks, the fastest mesh that runs.
    """

    work: Workload
    machine: Machine
    ranks: int
    rows: tuple[MeshPrediction, ...]
    fewer: Mapping[int, MeshPrediction]

    @property
    def best(self) -> MeshPrediction:
        return self.rows[0]

    @property
    def fastest(self) -> MeshPrediction:
        """The fastest mesh of any number of ranks up to ``ranks``."""
        return min([self.best, *self.fewer.values()], key=lambda row: row.seconds)

    @property
    def advice(self) -> str:
        """One sentence that says whether ``ranks`` ranks are worth it."""
        fastest, best = self.fastest, self.best
        if not _runs(best, self.machine):
            least = min(self.rows, key=lambda row: (row.problem is not None, row.memory))
            held = (
                f"{least.memory / 1e9:.0f} GB of {room_of(self.machine, least.shape) / 1e9:.0f} on each ({least.shape})"
            )
            return f"{_ranks(self.ranks)} cannot run it: {least.problem or f'it needs at least {held}'}."
        if fastest.shape.ranks < self.ranks:
            return (
                f"{self.ranks} ranks take {best.seconds:.3g} s, {_count(fastest.shape.ranks)} {fastest.seconds:.3g} s: "
                f"use {fastest.shape.ranks}, and the others for other prompts (the larger mesh "
                f"{_largest_loss(best, fastest)})."
            )
        if self.ranks == 1:
            return f"One rank takes {best.seconds:.3g} s."
        if 1 not in self.fewer:
            return f"{self.ranks} ranks take {best.seconds:.3g} s; one rank does not have the memory."
        one = self.fewer[1].seconds
        speedup = f"{one / best.seconds:.2f} times as fast"
        return f"{self.ranks} ranks take {best.seconds:.3g} s, one takes {one:.3g} s: {speedup}."

    def __str__(self) -> str:
        device, topology = self.machine.device, self.machine.topology
        connected = topology.inside.name
        if self.ranks > topology.per_host:
            connected += f" within {topology.per_host} ranks of a host, {topology.between.name} between hosts"
        head = f"{self.work.name}, {self.work.steps} steps, on {self.ranks} × {device.name} ({connected})"
        left = len(self.rows) - _PRINTED_ROWS
        more = ["", f"{left} more rows: plan.rows."] if left > 0 else []
        best = ["", f"The first row: {self.best.call}"] if _runs(self.best, self.machine) else []
        return "\n".join([head, "", *table(self.rows[:_PRINTED_ROWS]), *more, *best, "", self.advice])

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Make the first row's mesh over all ranks of the process group, by :func:`init_context_parallel_mesh`."""
        from para_core.distributed.create_mesh import init_context_parallel_mesh

        return init_context_parallel_mesh(device_type, **self.best.mesh_options)

    def plot(self, path: str | Path, *, rows: int = 8) -> None:
        """Save a bar chart of the milliseconds per step of the first ``rows`` meshes that can run. Needs matplotlib."""
        from matplotlib.figure import Figure

        shown = [row for row in self.rows if row.problem is None][:rows][::-1]
        figure = Figure(figsize=(9, 1.5 + 0.35 * len(shown)), layout="constrained")
        panel = figure.subplots()
        names, left = [str(row.shape) for row in shown], [0.0] * len(shown)
        for part in ("products", "attention", "other", "communication", "host"):
            widths = [1e3 * getattr(row.step, part) for row in shown]
            panel.barh(names, widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set(
            xlabel="ms per step", ylabel="batch × pipe × ring × ulysses × tensor", title=str(self).splitlines()[0]
        )
        panel.legend()
        figure.savefig(path)


def communicators(shape: MeshShape) -> int:
    """Return the largest number of NCCL communicators that a rank of ``shape`` holds.

    There is one for each mesh dim of several ranks and one for the group of FSDP2's weights. A stage has one for each
    edge from or to the last stage, which receives tokens from the stage before it and sends noise to all others.

    >>> communicators(MeshShape(ring=2, ulysses=4)), communicators(MeshShape(pipe=4, ulysses=2))
    (2, 6)
    """
    dims = (shape.batch, shape.pipe, shape.ring, shape.ulysses, shape.tensor)
    edges = shape.pipe if shape.pipe > 1 else 0
    return sum(size > 1 for size in dims) + edges + shape.fsdp


def room_of(machine: Machine, shape: MeshShape) -> float:
    """Return the bytes that a rank of ``shape`` may hold on its device."""
    return machine.device.memory - RESERVED - COMMUNICATOR * communicators(shape)


def _fits(row: MeshPrediction, machine: Machine) -> bool:
    return row.memory <= room_of(machine, row.shape)


def _runs(row: MeshPrediction, machine: Machine) -> bool:
    return row.problem is None and _fits(row, machine)


def _ranks(number: int) -> str:
    return "One rank" if number == 1 else f"{number} ranks"


def _count(ranks: int) -> str:
    return "one takes" if ranks == 1 else f"{ranks} take"


def table(rows: Sequence[MeshPrediction]) -> list[str]:
    """Return the lines of a Markdown table of ``rows``."""
    heads = [
        "batch × pipe × ring × ulysses × tensor",
        "s",
        "s per step",
        "compute",
        "exposed",
        "host",
        "text",
        "VAE",
        "GB sent per step",
        "GB held",
        "why not",
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads))]
    for row in rows:
        step = row.step
        seconds = [row.seconds, step.total, step.compute, step.communication, step.host, row.encoder, row.decoder]
        cells = [str(row.shape), *[f"{x:.3g}" for x in seconds], f"{row.sent / 1e9:.2f}", f"{row.memory / 1e9:.0f}"]
        lines.append("| " + " | ".join([*cells, row.problem or row.why]) + " |")
    return lines


def _largest_loss(row: MeshPrediction, best: MeshPrediction) -> str:
    """Return the part of a step by which ``row`` loses most time to ``best``, in words."""
    parts: list[tuple[float, str]] = [
        (getattr(row.step, name) - getattr(best.step, name), text)
        for name, text in (
            ("communication", "waits longer for communication"),
            ("host", "waits for the host"),
            ("products", "computes products longer"),
            ("attention", "attends longer"),
            ("other", "copies and merges more"),
        )
    ]
    most, text = max(parts)
    return f"{text}: {1e3 * most:+.3g} ms per step"


def make_plan(
    work: Workload,
    machine: Machine,
    ranks: int,
    *,
    sharing: Sequence[Sharing] = SHARING,
    pipefusion: PipeFusion | None = None,
) -> MeshPlan:
    """Predict all meshes of ``ranks`` ranks.

    Args:
        sharing (`Sequence[Sharing]`): Ways to shard weights. ``"fsdp"`` is tried if they do not fit otherwise.
        pipefusion (`PipeFusion`, *optional*): Include meshes whose stages work on patches, which approximates. Defaults
            to exact meshes only.

    Raises:
        ValueError: If ``ranks`` is not a positive integer, or ``sharing`` holds another value.
        TypeError: If ``pipefusion`` has another type.
    """
    require_ranks(ranks)
    if isinstance(sharing, str) or not set(sharing) <= set(SHARING):
        raise ValueError(f"weights is {sharing!r}; expected some of {SHARING}, or () to replicate them.")
    if pipefusion is not None and not isinstance(pipefusion, PipeFusion):
        raise TypeError(
            f"pipefusion is {pipefusion!r}; expected a PipeFusion of para_core, or None for exact meshes alone."
        )
    rows = _rows(work, machine, ranks, sharing, pipefusion)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < ranks]
    smaller = {size: _rows(work, machine, size, sharing, pipefusion)[0] for size in sizes}
    fewer = {size: row for size, row in smaller.items() if _runs(row, machine)}
    return MeshPlan(work, machine, ranks, tuple(rows), fewer)


def require_ranks(ranks: Any) -> None:
    """Raise ValueError if ``ranks`` is not a positive integer."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; expected a positive integer, the number of devices.")


def _rows(
    work: Workload, machine: Machine, ranks: int, sharing: Sequence[Sharing], pipefusion: PipeFusion | None
) -> list[MeshPrediction]:
    """Return the predicted meshes: those that run first, by seconds, each with the reason why it loses."""
    rows = [predict(shape, work, machine) for shape in shapes(ranks, sharing=sharing, pipefusion=pipefusion)]
    if "fsdp" in sharing:
        rows += [
            predict(replace(row.shape, fsdp=True), work, machine)
            for row in rows
            if not _fits(row, machine) and row.shape.sequence > 1 and row.shape.tensor == row.shape.pipe == 1
        ]
    # Of two equally fast meshes, the one that needs fewer kinds of process groups comes first.
    order = sorted(
        rows,
        key=lambda row: (
            row.problem is not None,
            not _fits(row, machine),
            round(row.seconds, 9),
            row.shape.ring,
            row.shape.tensor,
        ),
    )
    best = order[0]
    return [best, *[replace(row, why=_why(row, best, machine)) for row in order[1:]]]


def _why(row: MeshPrediction, best: MeshPrediction, machine: Machine) -> str:
    if not _fits(row, machine):
        return f"{row.memory / 1e9:.0f} GB do not fit into {room_of(machine, row.shape) / 1e9:.0f}"
    if row.shape.pipe > 1 and row.shape.pipefusion is None:
        longer = 1e3 * (row.step.total - best.step.total)
        return f"its stages compute one after the other: {longer:+.3g} ms per step"
    return _largest_loss(row, best)
