"""The meshes for one workload, ordered by predicted seconds, with reasons why they are slower than the best one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from para_core.distributed.mesh_shape import mesh_sizes
from para_core.option_values import TextEncoders
from para_core.planner.cost import Machine
from para_core.planner.prediction import (
    MeshPrediction,
    Workload,
    default_text_encoders,
    predict,
    shapes,
    with_most_resident,
)
from para_core.planner.traffic import MeshShape
from para_core.planner.verdict import Fit, duration, first_lines
from para_core.planner.weights import Choices, Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshPlan:
    """Predictions for all meshes of ``ranks`` ranks, the fastest first.

    Meshes that do not fit into memory come after those that do, and meshes that cannot run come last. To use the best
    mesh, call ``parallelize_pipe(pipe, mesh=plan.init_mesh(), **plan.best.options)``.

    Args:
        rows (`tuple[MeshPrediction, ...]`): One or more predictions per mesh, with different placements of weights.
        fewer (`Mapping[int, MeshPrediction]`): For smaller numbers of ranks, the fastest mesh, if one runs.
        more (`MeshPrediction`, *optional*): If no mesh of ``ranks`` ranks runs, the fastest mesh of the next larger
            number of ranks with which a mesh runs.
        larger (`Mapping[int, MeshPrediction]`): Of a plan for one rank: the fastest mesh of 2, 4 and 8 ranks that run.
        fit (`Fit`, *optional*): Whether one card holds everything, and what makes it fit.
    """

    work: Workload
    machine: Machine
    ranks: int
    rows: tuple[MeshPrediction, ...]
    fewer: Mapping[int, MeshPrediction]
    more: MeshPrediction | None = None
    larger: Mapping[int, MeshPrediction] = field(default_factory=dict)
    fit: Fit | None = None

    @property
    def verdict(self) -> list[str]:
        """The first lines of the plan: whether it fits and which seconds are normal, and what makes it fit."""
        return [] if self.fit is None else [*first_lines(self.fit, self.best, self.work, self.machine)]

    @property
    def best(self) -> MeshPrediction:
        return self.rows[0]

    @property
    def printed(self) -> tuple[MeshPrediction, ...]:
        """The rows that tables show: the first 14."""
        return self.rows[:14]

    @property
    def fastest(self) -> MeshPrediction:
        """The fastest prediction with ``ranks`` ranks or fewer."""
        return min([self.best, *self.fewer.values()], key=lambda row: row.seconds)

    @property
    def advice(self) -> str:
        """A sentence on whether using all ``ranks`` ranks is worthwhile or, if no mesh runs, on what could run."""
        fastest, best = self.fastest, self.best
        if not best.runs:
            return self._way_out()
        if fastest.shape.ranks < self.ranks:
            fewer = fastest.shape.ranks
            return (
                f"{self.ranks} ranks take {duration(best.seconds)}, {'one takes' if fewer == 1 else f'{fewer} take'} "
                f"{duration(fastest.seconds)}: use {fewer}, and the others for other prompts (the larger mesh "
                f"{_largest_loss(best, fastest)})."
            )
        if self.ranks == 1:
            larger = [f"{ranks} take {duration(row.seconds)} ({row})" for ranks, row in self.larger.items()]
            more = f" More ranks: {'; '.join(larger)}." if larger else ""
            return f"One rank takes {duration(best.seconds)} (predicted).{more}"
        if 1 not in self.fewer:
            return f"{self.ranks} ranks take {duration(best.seconds)}; one rank does not have the memory."
        alone = self.fewer[1].seconds
        speedup = f"{alone / best.seconds:.2f} times as fast"
        return f"{self.ranks} ranks take {duration(best.seconds)}, one takes {duration(alone)}: {speedup} (predicted)."

    def _way_out(self) -> str:
        """Return a sentence on what could run if no mesh does: more ranks, larger devices or a smaller result."""
        least = min(self.rows, key=lambda row: (row.problem is not None, row.memory))
        if least.problem is not None:
            needed, smaller = least.problem, ""
        else:
            needed = f"it needs at least {least.memory / 1e9:.0f} GB of {least.room / 1e9:.0f} on each ({least})"
            device = (least.memory + self.machine.device.memory - least.room) / 1e9
            smaller = f"devices of {device:.0f} GB, or {'fewer frames' if self.work.frames > 1 else 'a smaller image'}"
        more = "" if self.more is None else f"{self.more.shape.ranks} ranks ({self.more})"
        ways = "; or ".join(filter(None, [more, smaller])) or "another model"
        ranks = "One rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} cannot run it: {needed}. What runs it: {ways}."

    @property
    def title(self) -> str:
        """The title of tables and charts, which describes the generation and the machine."""
        device, topology = self.machine.device, self.machine.topology
        connected = topology.inside.name
        if self.ranks > topology.per_host:
            connected += f" within {topology.per_host} ranks of a host, {topology.between.name} between hosts"
        return f"{self.work.name}, {self.work.steps} steps, on {self.ranks} × {device.name} ({connected}), predicted"

    @property
    def notes(self) -> list[str]:
        """Sentences about the best mesh: whether it fits, the code that uses it, and how reliable the prediction is."""
        best, notes = self.best, []
        if best.runs:
            notes.append(f"In Python: {best.call}")
        if best.host_memory:
            notes.append(f"Each rank keeps {best.host_memory / 1e9:.0f} GB in host memory.")
        if best.placement.quantize is not None:
            notes.append(
                f"{best.placement.quantize} is not exact, and its speed is not predicted: these are the seconds of "
                "bfloat16."
            )
        if self.work.uncounted:
            notes.append(f"Not included in the seconds: {', '.join(self.work.uncounted)}.")
        if not self.machine.runtime.compiled:
            notes.append("The host bounds eager code: measure it (python -m para_core.doctor), or compile.")
        return notes

    def __str__(self) -> str:
        left = len(self.rows) - len(self.printed)
        more = [f"{left} more rows: plan.rows."] if left > 0 else []
        return "\n\n".join(
            ["\n".join([*self.verdict, "", self.title]), "\n".join(self.lines()), *more, *self.notes, self.advice]
        )

    def runs(self, row: MeshPrediction) -> bool:
        """Whether ``row`` can run and fits into device memory."""
        return row.runs

    def markdown(self) -> str:
        """Return the plan as Markdown, with a table that shows all parts of a step."""
        lines = [
            "| mesh | s | s per step | compute | exposed | host | text | VAE | GB sent per step | GB held | why not |",
            "| --- " * 11 + "|",
        ]
        for row in self.printed:
            step = row.step
            seconds = [row.seconds, step.total, step.compute, step.communication, step.host, row.encoder, row.decoder]
            cells = [str(row), *[f"{x:.3g}" for x in seconds], f"{row.sent / 1e9:.2f}", f"{row.memory / 1e9:.0f}"]
            lines.append("| " + " | ".join([*cells, row.problem or row.why]) + " |")
        return "\n\n".join([*self.verdict, self.title, "\n".join(lines), *self.notes, self.advice])

    def lines(self, width: int = 80) -> list[str]:
        """Return the lines of a text table of the first rows. A line has at most ``width`` characters."""
        lines = ["  seconds    step  compute  waits  GB  mesh, and why it loses"]
        for row in self.printed:
            step = row.step
            figures = (
                f"{duration(row.seconds):>9}{step.total:8.3f}{step.compute:9.3f}"
                f"{step.communication + step.host:7.3f}{row.memory / 1e9:4.0f}  "
            )
            text = f"{row}: {row.problem or row.why}" if row.problem or row.why else str(row)
            lines += textwrap.wrap(text, width, initial_indent=figures, subsequent_indent=" " * len(figures))
        return lines

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Create the best mesh over all ranks, of the accelerator of this machine or the CPU unless told otherwise."""
        # Imported here, because predictions need no torch.
        from para_core.distributed.create_mesh import init_context_parallel_mesh

        return init_context_parallel_mesh(device_type, **self.best.mesh_options)

    def plot(self, path: str | Path, *, rows: int = 8) -> None:
        """Save a bar chart to ``path``: seconds of the first ``rows`` meshes that run and fit, by their parts.

        The fastest mesh is marked, and the last bar is one rank, for comparison. See :mod:`~para_core.planner.chart`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from para_core.planner.chart import draw

        draw(self, path, rows)


def _largest_loss(row: MeshPrediction, best: MeshPrediction) -> str:
    """Return a phrase that says in which part of a step ``row`` loses most time compared with ``best``."""
    phrases = {
        "communication": "waits longer for communication",
        "host": "waits for the host",
        "products": "computes products longer",
        "attention": "attends longer",
        "other": "copies and merges more",
    }
    most, text = max((getattr(row.step, name) - getattr(best.step, name), text) for name, text in phrases.items())
    return f"{text}: {1e3 * most:+.3g} ms per step"


def make_plan(work: Workload, machine: Machine, ranks: int, choices: Choices | None = None) -> MeshPlan:
    """Predict all meshes of ``ranks`` ranks, a positive integer. Without ``choices`` the planner chooses everything."""
    require_positive("ranks", ranks)
    choices = choices or Choices()
    rows = _rows(work, machine, ranks, choices)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < ranks]
    smaller = {size: _rows(work, machine, size, choices)[0] for size in sizes}
    fewer = {size: row for size, row in smaller.items() if row.runs}
    more = None
    if not rows[0].runs:
        bigger = _best_rows(work, machine, choices, [size for size in (2, 4, 8, 16, 32, 64) if size > ranks])
        more = next((row for row in bigger if row.runs), None)
    larger = {}
    if ranks == 1:
        larger = {row.shape.ranks: row for row in _best_rows(work, machine, choices, (2, 4, 8)) if row.runs}
    return MeshPlan(work, machine, ranks, tuple(rows), fewer, more, larger, fit_of(work, machine, choices))


def _best_rows(work: Workload, machine: Machine, choices: Choices, sizes: Iterable[int]) -> Iterator[MeshPrediction]:
    """Yield the best row of each number of ranks in ``sizes``, except those that the demanded mesh does not have."""
    for size in sizes:
        try:
            yield _rows(work, machine, size, choices)[0]
        except ValueError:
            continue


def fit_of(work: Workload, machine: Machine, choices: Choices) -> Fit:
    """Predict one card that holds everything, and if that does not fit, what makes it fit."""
    usual = Placement(
        choices.text_encoders or "replicate",
        quantize=choices.quantize,
        vae=choices.vae_placement or "replicate",
        takes_turns=choices.offload == "model",
    )
    whole = predict(MeshShape(), work, machine, usual)
    if whole.fits:
        return Fit(whole)
    quantize = choices.quantize
    tried = [_fitting(work, machine, Choices((), quantize=quantize), (1,))]
    if quantize is None and work.weights.in_8_bits is not None:
        tried.append(_fitting(work, machine, Choices((), quantize="int8"), (1,)))
    if quantize in (None, "int8"):
        tried.append(_fitting(work, machine, Choices("tensor", offload=False, quantize=quantize), (2, 4, 8)))
        tried.append(_fitting(work, machine, Choices("fsdp", offload=False, quantize=quantize), (2, 4, 8)))
    return Fit(whole, tuple(row for rows in tried for row in rows))


def _fitting(work: Workload, machine: Machine, choices: Choices, sizes: Sequence[int]) -> list[MeshPrediction]:
    """Return the fastest row that fits, with the first of ``sizes`` ranks that has one; an empty list if none has.

    Other weights than those that ``choices`` state are not tried.
    """
    for size in sizes:
        placements = [choices] if choices.vae_placement else [choices, replace(choices, vae_placement="offload")]
        rows = [row for placed in placements for row in _placed_rows(work, machine, size, placed) if row.runs]
        if rows:
            return [min(rows, key=lambda row: row.seconds)]
    return []


def require_positive(name: str, value: Any) -> None:
    """Raise ``ValueError`` if ``value`` is not a positive integer; ``name`` is the argument's name in the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive integer.")


def _rows(work: Workload, machine: Machine, ranks: int, choices: Choices) -> list[MeshPrediction]:
    """Return the predictions for all meshes in the order of :class:`MeshPlan`, each with the reason why it is slower.

    If no mesh runs with ``choices``, their fallbacks are tried until one does.
    """
    rows: list[MeshPrediction] = []
    for placed in choices.fallbacks(work.weights, ranks):
        # List meshes that cannot run only once, for the first of these choices.
        rows += [row for row in _placed_rows(work, machine, ranks, placed) if not rows or row.problem is None]
        if any(row.runs for row in rows):
            break

    def order(row: MeshPrediction) -> tuple[bool, bool, float, int, int]:
        # Of equally fast meshes, those with a small ring and tensor dim come first: they need fewer process groups.
        return row.problem is not None, not row.fits, round(row.seconds, 9), row.shape.ring, row.shape.tensor

    best, *others = sorted(rows, key=order)
    return [best, *[replace(row, why=_why(row, best)) for row in others]]


def _placed_rows(work: Workload, machine: Machine, ranks: int, choices: Choices) -> list[MeshPrediction]:
    """Return a prediction for each mesh, and if it does not fit also those with FSDP2 and with offloaded blocks.

    Only meshes that have what ``choices`` demand are returned.
    """
    rows = []
    for shape in _allowed_shapes(ranks, choices):
        shards = shape.sequence > 1 and shape.tensor == shape.pipe == 1
        if choices.demanded == "fsdp" and ranks > 1:
            rows += [_with_text_encoders(replace(shape, fsdp=True), work, machine, choices)] if shards else []
            continue
        row = _with_text_encoders(shape, work, machine, choices)
        if choices.offload == "blocks":
            rows.append(_with_blocks_offloaded(row, work, machine))
            continue
        rows.append(row)
        if row.fits or row.problem is not None or choices.offload == "model":
            continue
        if "fsdp" in choices.sharing and shards:
            rows.append(_with_text_encoders(replace(shape, fsdp=True), work, machine, choices))
        if choices.offload:
            placed = with_most_resident(row, work)
            rows += [] if placed is None else [predict(shape, work, machine, placed)]
    return rows


def _allowed_shapes(ranks: int, choices: Choices) -> list[MeshShape]:
    """Return the shapes of meshes of ``ranks`` ranks that ``choices`` allow. Raise ValueError if there are none."""
    allowed = list(shapes(ranks, sharing=choices.sharing, pipefusion=choices.pipefusion))
    if choices.mesh and ranks > 1:
        sizes = {"tensor": 1, "pipe": 1, **mesh_sizes(ranks, choices.mesh)}
        allowed = [x for x in allowed if all(getattr(x, name) == size for name, size in sizes.items())]
    if choices.demanded == "tensor" and ranks > 1:
        allowed = [x for x in allowed if x.tensor > 1]
    if choices.demanded == "fsdp" and ranks > 1:
        allowed = [x for x in allowed if x.sequence > 1 and x.tensor == x.pipe == 1]
    if not allowed:
        demanded = "" if choices.demanded is None else f" and weights {choices.demanded!r}"
        limits = ", ".join(f"{name}={size}" for name, size in choices.mesh.items())
        raise ValueError(
            f"mesh is {limits!r}{demanded}: no mesh of {ranks} ranks has both. Use other sizes, or leave one out."
        )
    return allowed


def _with_blocks_offloaded(row: MeshPrediction, work: Workload, machine: Machine) -> MeshPrediction:
    """Return the prediction of ``row`` with blocks in host memory, as many as needed; a problem if none can wait."""
    placed = with_most_resident(row, work)
    if placed is not None:
        return predict(row.shape, work, machine, placed)
    if row.problem is not None:
        return row
    if not work.weights.blocks or row.shape.tensor > 1 or row.shape.pipe > 1:
        return replace(row, problem="its blocks cannot wait in host memory")
    # Not even one block fits: predict what remains on the device, so that the plan says what is missing.
    return predict(row.shape, work, machine, replace(row.placement, resident=0))


def _with_text_encoders(shape: MeshShape, work: Workload, machine: Machine, choices: Choices) -> MeshPrediction:
    """Return the prediction for a mesh, with the text encoders in host memory if the weights do not fit otherwise."""
    usual = Placement(
        choices.text_encoders or _default_text_encoders(shape, choices),
        quantize=choices.quantize,
        vae=choices.vae_placement or "replicate",
        takes_turns=choices.offload == "model",
    )
    row = predict(shape, work, machine, usual)
    if usual.takes_turns:
        return row
    # Keep the usual placement if the user has chosen it, or if moving text encoders does not help: the mesh cannot run,
    # or fits already, or the pipeline has no text encoders.
    if choices.text_encoders is not None or row.problem or row.fits or not work.weights.encoders.total:
        return row
    return predict(shape, work, machine, replace(usual, text_encoders="first" if shape.ranks > 1 else "offload"))


def _default_text_encoders(shape: MeshShape, choices: Choices) -> TextEncoders:
    """Return where text encoders are unless the user says it: with offloaded blocks in host memory, too."""
    return "offload" if choices.offload == "blocks" else default_text_encoders(shape)


def _why(row: MeshPrediction, best: MeshPrediction) -> str:
    if not row.fits:
        return f"{row.memory / 1e9:.0f} GB do not fit into {row.room / 1e9:.0f}"
    if row.shape.pipe > 1 and row.shape.pipefusion is None:
        longer = 1e3 * (row.step.total - best.step.total)
        return f"its stages compute one after the other: {longer:+.3g} ms per step"
    return _largest_loss(row, best)
