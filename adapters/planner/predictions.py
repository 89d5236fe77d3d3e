"""The predictions of all meshes for one workload, and the text that says whether it fits and how long it takes.

``plan_mesh.py`` returns them, and ``cli/plan.py`` prints them. Tests: tests/planner/test_predict.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from para_core.adapters.planner.choose import EQUALLY_FAST, Choices, rank_meshes
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.predict import Machine, Prediction, predict
from para_core.adapters.planner.weights import Placement
from para_core.adapters.planner.work import Workload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Published seconds of other software, divided by the predicted seconds: the smallest and the largest ratio of three
# kinds of transformers. "eager" is on several devices. See benchmarks/results/planner_check.json.
PUBLISHED_RATIOS = {"compiled": (1.06, 1.81), "eager": (0.69, 4.8), "eager, one device": (0.63, 1.57)}
# Numbers of ranks that are compared with the one that the user names: fewer if it runs, else more.
_OTHER_RANKS = (1, 2, 4, 8, 16, 32, 64)
_PRINTED_ROWS = 10


@dataclass(frozen=True)
class Predictions:
    """Predictions for all meshes of ``ranks`` ranks, the chosen one first, then by seconds.

    Meshes that do not fit into memory come after those that do, and meshes that cannot run come last. To use
    the best mesh, call ``parallelize_pipe(pipe, mesh=predictions.init_mesh(), **predictions.best.options)``.

    Args:
        rows (`tuple[Prediction, ...]`): The prediction of each mesh, with the placement that it needs.
        on_one (`Prediction`): One device that holds everything, in the placement that the user has chosen.
        other (`Prediction`, *optional*): The mesh of the fewest ranks that are as fast as the chosen mesh, or
            that run if it does not, among 1, 2, 4, ... 64 ranks. None if there is none with another number.
    """

    work: Workload
    machine: Machine
    rows: tuple[Prediction, ...]
    on_one: Prediction
    other: Prediction | None = None

    @property
    def best(self) -> Prediction:
        return self.rows[0]

    @property
    def ranks(self) -> int:
        return self.best.shape.ranks

    def init_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Create the best mesh over all ranks, even one that cannot run. ``device_type`` defaults to this machine's."""
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
        name, ending = f"{self.work.name}, {self.work.steps} steps", ""
        if self.work.uncounted:
            name = f"{self.work.name}, weights alone"
            ending = f" Activations and seconds are not predicted: {self.work.uncounted}"
        elif self.best.runs:
            least, most = map(duration, self.seconds_of(self.best))
            ending = f" It takes {least} to {most}."
        return f"{name}: {self._fit()}.{ending}"

    def _fit(self) -> str:
        """Return whether the devices hold what the best mesh needs, as a part of a sentence."""
        best, devices = self.best, f"{self.ranks} × {self.machine.device.name}"
        if best.problem:
            return f"cannot run on {devices}: {best.problem}"
        needed, room, on_one = map(gigabytes, (best.memory, best.room, self.on_one.memory))
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
        condition = "only with"
        if self.on_one.fits:
            condition = "with"
        description = str(best).removeprefix("one rank, ")
        return f"fits {devices} {condition} {description}: {used} (one device needs {on_one} GB)"

    @property
    def advice(self) -> str:
        """The smaller number of ranks that is as fast or, if no mesh runs, the one that could run it."""
        if self.other is None:
            return ""
        fewest = self.other.shape.ranks
        if self.best.runs:
            return f"It is as fast on {fewest} of these {self.ranks} ranks: use the others for other prompts."
        return f"It runs on {fewest} ranks: {self.other}."

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
        for row in self.rows[:_PRINTED_ROWS]:
            least, most = self.seconds_of(row)
            seconds = f"{duration(least)} to {duration(most)}"
            lines.append(f"| {row} | {seconds} | {gigabytes(row.memory)} | {row.problem or row.why} |")
        if len(self.rows) > _PRINTED_ROWS:
            lines += ["", f"{len(self.rows) - _PRINTED_ROWS} more meshes: --json, or rows in Python."]
        return lines


def predict_meshes(
    work: Workload, machine: Machine, ranks: int, choices: Choices | None = None
) -> Predictions:
    """Predict all meshes of ``ranks`` ranks. Without ``choices`` the planner chooses everything.

    Raises:
        ValueError: ``choices`` allow no mesh of this number of ranks.
    """
    choices = choices or Choices()
    rows = rank_meshes(work, machine, ranks, choices)
    usual = Placement(quantize=choices.quantize, takes_turns=choices.offload == "model")
    on_one = predict(MeshShape(), work, machine, usual)
    return Predictions(work, machine, tuple(rows), on_one, _find_other(work, machine, rows[0], choices))


def _find_other(work: Workload, machine: Machine, best: Prediction, choices: Choices) -> Prediction | None:
    """Return the field ``other`` of :class:`Predictions` whose chosen mesh is ``best``."""
    if work.uncounted and best.runs:
        return None
    for ranks in _OTHER_RANKS:
        if ranks == best.shape.ranks or (ranks < best.shape.ranks) != best.runs:
            continue
        try:
            row = rank_meshes(work, machine, ranks, choices)[0]
        except ValueError:
            # The mesh that the user demands has no such number of ranks.
            continue
        if row.runs and (not best.runs or row.seconds <= EQUALLY_FAST * best.seconds):
            return row
    return None


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
