"""The predictions of all meshes for one workload, and the text that says whether it fits and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from para_core.adapters.planner.choose import EQUALLY_FAST, Choices, rank_meshes
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.predict import Machine, predict
from para_core.adapters.planner.prediction import Prediction
from para_core.adapters.planner.weights import Placement
from para_core.adapters.planner.work import Workload, require_positive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Published seconds of other software, divided by the predicted seconds: the smallest and the largest ratio of
# compiled transformers, of eager ones on one device, and of eager ones on several. See
# benchmarks/results/planner_check.json.
PUBLISHED_RATIOS = {"compiled": (1.06, 1.81), "eager": (0.69, 4.8), "eager, one device": (0.63, 1.57)}
# Numbers of ranks that are compared with the one that the user names.
_OTHER_RANKS = (1, 2, 4, 8, 16, 32, 64)
# Rows of a printed table.
_PRINTED = 10


@dataclass(frozen=True)
class Predictions:
    """Predictions for all meshes of ``ranks`` ranks, the chosen one first, then by seconds.

    Meshes that do not fit into memory come after those that do, and meshes that cannot run come last. To use
    the best mesh, call ``parallelize_pipe(pipe, mesh=predictions.init_mesh(), **predictions.best.options)``.

    Args:
        rows (`tuple[Prediction, ...]`): The prediction of each mesh, with the placement of weights that it
            needs.
        on_one (`Prediction`): One device that holds everything, in the placement that the user has chosen.
        others (`Mapping[int, Prediction]`): The best mesh of other numbers of ranks with which one runs.
    """

    work: Workload
    machine: Machine
    rows: tuple[Prediction, ...]
    on_one: Prediction
    others: Mapping[int, Prediction] = field(default_factory=dict)

    @property
    def best(self) -> Prediction:
        return self.rows[0]

    @property
    def ranks(self) -> int:
        return self.best.shape.ranks

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Create the best mesh over all ranks, of the accelerator of this machine or the CPU unless told otherwise."""
        # Imported here, because predictions need no torch.
        from para_core.distributed.create_mesh import init_context_parallel_mesh

        return init_context_parallel_mesh(device_type, **self.best.mesh_options)

    def seconds_of(self, row: Prediction) -> tuple[float, float]:
        """Return the range of seconds that published runs of this kind lead to expect on the mesh of ``row``."""
        kind = "compiled"
        if not self.machine.compiled:
            kind = "eager"
            if row.shape.ranks == 1:
                kind = "eager, one device"
        least, most = PUBLISHED_RATIOS[kind]
        return least * row.seconds, most * row.seconds

    def __str__(self) -> str:
        """Return whether the generation fits, a table of meshes, the line of code of the best one, and advice."""
        parts = [self.verdict]
        if not self.work.uncounted:
            parts.append("\n".join(self._table()))
        if self.best.runs and not self.work.uncounted:
            parts.append(f"In Python: {self.best.code}")
        if self.best.host_memory:
            parts.append(f"Each rank keeps {gigabytes(self.best.host_memory)} GB in host memory.")
        if self.best.placement.quantize is not None:
            parts.append(f"{self.best.placement.quantize} is not exact; its seconds are those of 16 bits.")
        return "\n\n".join(part for part in [*parts, self.advice] if part)

    @property
    def verdict(self) -> str:
        """Whether the generation fits these devices, and the range of seconds."""
        best, devices = self.best, f"{self.ranks} × {self.machine.device.name}"
        least, most = map(duration, self.seconds_of(best))
        name, ending = f"{self.work.name}, {self.work.steps} steps", f"It takes {least} to {most}."
        if self.work.uncounted:
            name = f"{self.work.name}, weights alone"
            ending = f"Activations and seconds are not predicted: {self.work.uncounted}"
        elif not best.runs:
            ending = ""
        return f"{name}: {self._fit(devices)}. {ending}".strip()

    def _fit(self, devices: str) -> str:
        """Return whether ``devices`` hold what the best mesh needs, as a part of a sentence."""
        best, on_one = self.best, gigabytes(self.on_one.memory)
        if best.problem:
            return f"cannot run on {devices}: {best.problem}"
        needed, room = gigabytes(best.memory), gigabytes(best.room)
        if not best.fits:
            return (
                f"does not fit {devices}: a rank needs at least {needed} GB ({best}), and may hold {room} GB"
            )
        used = f"{needed} of the {room} GB that a rank may hold"
        if self.work.uncounted:
            # Which mesh is best is not known, but how the weights fit.
            best = replace(best, shape=replace(best.shape, ring=1, ulysses=1, batch=1, pipe=1))
        if str(best) == str(self.on_one):
            return f"fits {devices}: {used}"
        description = str(best).removeprefix("one rank, ")
        if self.on_one.fits:
            return f"fits {devices} with {description}: {used} (one device holds all of it, {on_one} GB)"
        return f"fits {devices} only with {description}: {used} (all of it needs {on_one} GB)"

    @property
    def advice(self) -> str:
        """Whether using all ranks is worthwhile or, if no mesh runs, how many ranks could run it."""
        larger = [ranks for ranks in self.others if ranks > self.ranks]
        if not self.best.runs:
            if larger:
                return f"It runs on {larger[0]} ranks: {self.others[larger[0]]}."
            return ""
        if self.work.uncounted:
            return ""
        for ranks, row in self.others.items():
            if ranks < self.ranks and row.seconds <= EQUALLY_FAST * self.best.seconds:
                return f"{ranks} of these {self.ranks} ranks are as fast: use the others for other prompts."
        times = [
            f"{ranks}: {row.seconds / self.best.seconds:.2g} × ({row})" for ranks, row in self.others.items()
        ]
        if times:
            return f"Seconds of other numbers of ranks, relative to these: {'; '.join(times)}."
        return ""

    def _table(self) -> list[str]:
        """Return the lines of a Markdown table of the first meshes."""
        machine, links = self.machine, self.machine.inside.name
        if self.ranks > machine.per_host:
            links += f" in hosts of {machine.per_host}, {machine.between.name} between them"
        lines = [
            f"Predicted for {self.ranks} × {machine.device.name} ({links}):",
            "",
            "| mesh | seconds | GB | why another is chosen |",
            "| --- | --- | ---: | --- |",
        ]
        for row in self.rows[:_PRINTED]:
            least, most = self.seconds_of(row)
            seconds = f"{duration(least)} to {duration(most)}"
            lines.append(f"| {row} | {seconds} | {gigabytes(row.memory)} | {row.problem or row.why} |")
        more = len(self.rows) - _PRINTED
        if more > 0:
            return [*lines, "", f"{more} more meshes: --json, or rows in Python."]
        return lines


def predict_meshes(
    work: Workload, machine: Machine, ranks: int, choices: Choices | None = None
) -> Predictions:
    """Predict all meshes of ``ranks`` ranks, a positive integer. Without ``choices`` the planner chooses
    everything.

    Raises:
        ValueError: ``ranks`` is no positive integer, or ``choices`` allow no mesh of this number of ranks.
    """
    require_positive("ranks", ranks)
    choices = choices or Choices()
    rows = rank_meshes(work, machine, ranks, choices)
    usual = Placement(quantize=choices.quantize, takes_turns=choices.offload == "model")
    on_one = predict(MeshShape(), work, machine, usual)
    others: dict[int, Prediction] = {}
    for other in _OTHER_RANKS:
        # More than 8 ranks are tried only if so many are given, or if nothing else runs.
        if other == ranks or (
            other > max(8, ranks) and (rows[0].runs or any(size > ranks for size in others))
        ):
            continue
        try:
            row = rank_meshes(work, machine, other, choices)[0]
        except ValueError:
            # The mesh that the user demands has no such number of ranks.
            continue
        if row.runs:
            others[other] = row
    return Predictions(work, machine, tuple(rows), on_one, others)


def gigabytes(size: float) -> str:
    """Return bytes as gigabytes, with two digits or all before the decimal point."""
    if size >= 9.95e9:
        return f"{size / 1e9:.0f}"
    return f"{size / 1e9:.2g}"


def duration(seconds: float) -> str:
    """Return a duration as text: seconds with two digits if it is below two minutes, else minutes and hours."""
    if seconds < 120:
        if seconds < 99.5:
            return f"{seconds:.2g} s"
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
