"""Meshes for one workload, the fastest first, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from para_core.planner.cost import Machine, MeshShape
from para_core.planner.rows import SHARING, Row, Sharing, Workload, predict, shapes
from para_core.weights.pipefusion import PipeFusion

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Bytes of a device that CUDA and fragments of its allocator take.
RESERVED = 6e9
# Bytes of one communicator of NCCL, mostly buffers: assumed, because it depends on the links and on NCCL's number of channels.
COMMUNICATOR = 0.2e9
# Rows of a printed table.
_SHOWN = 14


@dataclass(frozen=True)
class MeshPlan:
    """Meshes of ``ranks`` ranks, the fastest first; what does not fit stands behind, and then what cannot run, with its reason.

    ``parallelize_pipe(pipe, mesh=plan.init_mesh(), **plan.best.options)`` runs the first one.

    Args:
        fewer: the fastest meshes of fewer ranks that fit, by their number.
    """

    work: Workload
    machine: Machine
    ranks: int
    rows: tuple[Row, ...]
    fewer: Mapping[int, Row]

    @property
    def best(self) -> Row:
        return self.rows[0]

    @property
    def fastest(self) -> Row:
        """Of all numbers of ranks up to ``ranks``."""
        return min([self.best, *self.fewer.values()], key=lambda row: row.seconds)

    @property
    def advice(self) -> str:
        """Whether so many ranks are worth it, in one sentence."""
        fastest, best = self.fastest, self.best
        if not _runs(best, self.machine):
            least = min(self.rows, key=lambda row: (row.problem is not None, row.memory))
            held = (
                f"{least.memory / 1e9:.0f} GB of {room_of(self.machine, least.shape) / 1e9:.0f} on each ({least.shape})"
            )
            return f"{_ranks(self.ranks)} cannot run it: {least.problem or f'at least it needs {held}'}."
        if fastest.shape.ranks < self.ranks:
            return (
                f"{self.ranks} ranks take {best.seconds:.3g} s, {_count(fastest.shape.ranks)} {fastest.seconds:.3g} s: use "
                f"{fastest.shape.ranks}, and the others for other prompts ({_weight_of(best, fastest)})."
            )
        if self.ranks == 1:
            return f"One rank takes {best.seconds:.3g} s."
        if 1 not in self.fewer:
            return f"{self.ranks} ranks take {best.seconds:.3g} s; one does not hold it."
        one = self.fewer[1].seconds
        return f"{self.ranks} ranks take {best.seconds:.3g} s, one takes {one:.3g} s: {one / best.seconds:.2f} times as fast."

    def __str__(self) -> str:
        device, topology = self.machine.device, self.machine.topology
        connected = topology.inside.name
        if self.ranks > topology.per_host:
            connected += f" within {topology.per_host} ranks of a host, {topology.between.name} between hosts"
        head = f"{self.work.name}, {self.work.steps} steps, on {self.ranks} × {device.name} ({connected})"
        left = len(self.rows) - _SHOWN
        more = ["", f"{left} more rows: plan.rows."] if left > 0 else []
        best = ["", f"The first row: {self.best.call}"] if _runs(self.best, self.machine) else []
        return "\n".join([head, "", *table(self.rows[:_SHOWN]), *more, *best, "", self.advice])

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The mesh of the first row, over all ranks of this process group; see :func:`para_core.init_context_parallel_mesh`."""
        from para_core.distributed.create_mesh import init_context_parallel_mesh

        return init_context_parallel_mesh(device_type, **self.best.mesh_options)

    def plot(self, path: str | Path, *, rows: int = 8) -> None:
        """Plot milliseconds per step of the first ``rows`` meshes that can run, by what takes them. Needs matplotlib."""
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
    """Return how many communicators of NCCL a rank of ``shape`` holds, at most.

    One for each mesh dim of several ranks, one for the group of FSDP2's weights, and one for each edge from or to the last stage: it
    receives tokens from the stage before and sends each other stage its noise.

    >>> communicators(MeshShape(ring=2, ulysses=4)), communicators(MeshShape(pipe=4, ulysses=2)), communicators(MeshShape())
    (2, 6, 0)
    """
    dims = (shape.batch, shape.pipe, shape.ring, shape.ulysses, shape.tensor)
    edges = shape.pipe if shape.pipe > 1 else 0
    return sum(size > 1 for size in dims) + edges + shape.fsdp


def room_of(machine: Machine, shape: MeshShape) -> float:
    """Return the bytes that a rank of ``shape`` may hold on its device."""
    return machine.device.memory - RESERVED - COMMUNICATOR * communicators(shape)


def _fits(row: Row, machine: Machine) -> bool:
    return row.memory <= room_of(machine, row.shape)


def _runs(row: Row, machine: Machine) -> bool:
    return row.problem is None and _fits(row, machine)


def _ranks(number: int) -> str:
    return "One rank" if number == 1 else f"{number} ranks"


def _count(ranks: int) -> str:
    return "one takes" if ranks == 1 else f"{ranks} take"


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
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


def _weight_of(row: Row, best: Row) -> str:
    """By which part of a step ``row`` loses most."""
    parts: list[tuple[float, str]] = [
        (getattr(row.step, name) - getattr(best.step, name), text)
        for name, text in (
            ("communication", "waits for what travels"),
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
    """All meshes of ``ranks`` ranks, those that fit in order of their seconds.

    Args:
        sharing: how ranks may shard weights. ``"fsdp"``: where they do not fit otherwise.
        pipefusion: also meshes whose stages work on patches so, which approximates; None: exact ones alone.

    Raises:
        TypeError, ValueError: ``ranks`` is no positive integer, ``sharing`` or ``pipefusion`` is something else.
    """
    require_ranks(ranks)
    if isinstance(sharing, str) or not set(sharing) <= set(SHARING):
        raise ValueError(f"weights is {sharing!r}; expected some of {SHARING}, or () to replicate them.")
    if pipefusion is not None and not isinstance(pipefusion, PipeFusion):
        raise TypeError(
            f"pipefusion is {pipefusion!r}; expected a PipeFusion of para_core, or None for exact meshes alone."
        )
    found = _rows(work, machine, ranks, sharing, pipefusion)
    smaller = {size: _rows(work, machine, size, sharing, pipefusion)[0] for size in _smaller(ranks)}
    fewer = {size: row for size, row in smaller.items() if _runs(row, machine)}
    return MeshPlan(work, machine, ranks, tuple(found), fewer)


def require_ranks(ranks: Any) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; expected a positive integer: how many devices there are.")


def _smaller(ranks: int) -> list[int]:
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size < ranks]


def _rows(
    work: Workload, machine: Machine, ranks: int, sharing: Sequence[Sharing], pipefusion: PipeFusion | None
) -> list[Row]:
    """Those that can run first, of these those that fit into memory, then by seconds; with what each loses by."""
    rows = [predict(shape, work, machine) for shape in shapes(ranks, sharing=sharing, pipefusion=pipefusion)]
    if "fsdp" in sharing:
        rows += [
            predict(replace(row.shape, fsdp=True), work, machine)
            for row in rows
            if not _fits(row, machine) and row.shape.sequence > 1 and row.shape.tensor == row.shape.pipe == 1
        ]
    # A tie is decided by what needs fewer kinds of groups.
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


def _why(row: Row, best: Row, machine: Machine) -> str:
    if not _fits(row, machine):
        return f"{row.memory / 1e9:.0f} GB do not fit into {room_of(machine, row.shape) / 1e9:.0f}"
    if row.shape.pipe > 1 and row.shape.pipefusion is None:
        longer = 1e3 * (row.step.total - best.step.total)
        return f"its stages compute one after the other: {longer:+.3g} ms per step"
    return _weight_of(row, best)
