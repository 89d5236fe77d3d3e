"""An optional feature: the readings of the calls of a model with a cache, and the report for the user."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from para_core.cache.apply import require_cache
from para_core.cache.call_readings import CallReading, CallReadings
from para_core.cache.decision import Verdict
from para_core.cache.registry import register_observer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from para_core.cache.block_cache import BlockCache


@dataclass(frozen=True)
class CachedStep:
    """A row of a :class:`CacheReport`: one step of one CFG branch.

    Args:
        step: Index of the step in the schedule.
        branch: The name of the branch.
        difference: The difference that was compared with the threshold, the largest of all samples; None if
            the decision did not depend on it.
        threshold: The threshold during the call, which the user may change between calls.
        verdict: The reason why the step was skipped or computed.
        seconds: Duration of the model call, which may have contained several branches.
        call: Index of the model call. Branches that ran in one call have the same index.
        samples: The difference of each sample of this branch.
        held_back_by: Names of the branches and samples whose differences caused the call to be computed,
            although others in the same call could have been skipped.
        forecast_from: Number of computed steps from which the residual of a skipped step was forecast; 0 for
            a computed step.
    """

    step: int
    branch: str
    difference: float | None
    threshold: float
    verdict: Verdict
    seconds: float
    call: int
    samples: tuple[float | None, ...] = ()
    held_back_by: tuple[str, ...] = ()
    forecast_from: int = 0

    @property
    def hit(self) -> bool:
        """Whether the step was skipped."""
        return self.verdict.skips


class ReportedReadings(CallReadings):
    """The observer of the calls of one cache, which describes them by their report."""

    def summarize(self, caches: Sequence[BlockCache]) -> str:
        """Return the report of ``caches`` as a text."""
        return str(report_of(caches))


def readings_of(cache: BlockCache) -> ReportedReadings:
    """Return the readings of the calls of ``cache``."""
    return next(observer for observer in cache.observers if isinstance(observer, ReportedReadings))


def model_cache_report(model: nn.Module) -> CacheReport:
    """Return a report of the model calls since the last :func:`reset_cache`, of at most the last 4096 calls.

    Raises:
        ValueError: The model has no cache.
    """
    return report_of([require_cache(model)])


def report_of(caches: Sequence[BlockCache]) -> CacheReport:
    """Return the report of all ``caches`` of one pipeline."""
    readings = [readings_of(cache) for cache in caches]
    options = [cache.options for cache in caches]
    # Transformers may have the same or different rules and forecasts, so list all, each once.
    rules = " and ".join(dict.fromkeys([each.rule_name for each in options]))
    forecasts = " and ".join(dict.fromkeys([each.chosen_forecast.name for each in options]))
    dropped = sum([each.dropped for each in readings])
    return CacheReport(
        _convert_to_rows([call for each in readings for call in each.calls]), rules, forecasts, dropped
    )


def _convert_to_rows(readings: Iterable[CallReading]) -> list[CachedStep]:
    """Convert the readings of model calls to rows, one per call and branch. The host may wait for the device."""
    return [row for call, reading in enumerate(readings) for row in _rows_of_call(reading, call)]


def _rows_of_call(reading: CallReading, call: int) -> list[CachedStep]:
    """Return the rows of one model call, one per branch in its batch. ``call`` is the index of the call."""
    outcome: list[Any] = list(reading.outcome)
    for index, value in enumerate(outcome):
        if isinstance(value, Tensor):
            outcome[index] = value.tolist()
    differences, verdict, computed, samples = outcome
    verdict = Verdict(int(verdict))
    if differences is None or verdict not in (Verdict.HIT, Verdict.MISS, Verdict.NOT_FINITE):
        # The differences did not decide this step, but a graph computes them anyway. Leave them out of the
        # report.
        differences = [None] * samples
    # The branches in the batch have equal parts of the samples, in order. A plan may give this rank only a
    # part of the batch, so compute the number of branches in this part.
    num_branches = reading.num_branches
    if reading.batch != 0:
        num_branches = reading.num_branches * samples // reading.batch
    by_branch = {reading.branch: differences}
    if num_branches > 1 and samples % num_branches == 0:
        each = len(differences) // num_branches
        by_branch = {
            f"{reading.branch}/{i}": differences[i * each : (i + 1) * each] for i in range(num_branches)
        }
    held_back_by: tuple[str, ...] = ()
    if verdict is Verdict.MISS:
        held_back_by = _names_above(by_branch, reading.threshold)
    num_used = 0
    if verdict.skips:
        num_used = min(int(computed), reading.room)
    seconds = reading.seconds
    rows = []
    for name, branch_differences in by_branch.items():
        measured = [x for x in branch_differences if x is not None]
        # max() ignores a NaN that is not the first item.
        largest = next((x for x in measured if math.isnan(x)), max(measured, default=None))
        row = CachedStep(
            step=reading.step,
            branch=name,
            difference=largest,
            threshold=reading.threshold,
            verdict=verdict,
            seconds=seconds,
            call=call,
            samples=tuple(branch_differences),
            held_back_by=held_back_by,
            forecast_from=num_used,
        )
        rows.append(row)
    return rows


def _names_above(by_branch: Mapping[str, Sequence[float]], threshold: float) -> tuple[str, ...]:
    """Return the names of the branches and samples whose differences reach ``threshold``; none if all of them do."""
    count = 0
    names = []
    for branch, differences in by_branch.items():
        for index, difference in enumerate(differences):
            count += 1
            if difference >= threshold:
                names.append(_name_of_sample(branch, index, len(differences)))
    if len(names) == count:
        return ()
    return tuple(names)


def _name_of_sample(branch: str, index: int, num_samples: int) -> str:
    if num_samples == 1:
        return branch
    return f"{branch} sample {index}"


@dataclass(frozen=True)
class CacheReport:
    """The report of a cache's last generation. ``print(report)`` shows a table.

    Args:
        rows: One row per step and CFG branch.
        rule, forecast: The names of the rule that compares steps, and of the forecast.
        dropped: Number of earlier model calls without a row: only the last 4096 calls are kept.
    """

    rows: Sequence[CachedStep]
    rule: str
    forecast: str = "taylor 0"
    dropped: int = 0

    @property
    def hits(self) -> int:
        return sum(row.hit for row in self.rows)

    @property
    def computed(self) -> int:
        return len(self.rows) - self.hits

    @property
    def seconds(self) -> float:
        """The total duration of all model calls, in seconds."""
        return sum({row.call: row.seconds for row in self.rows}.values())

    def differences(self) -> list[float]:
        """Return the differences of all rows, without those that are None or not finite."""
        return [
            row.difference
            for row in self.rows
            if row.difference is not None and math.isfinite(row.difference)
        ]

    def __str__(self) -> str:
        if not self.rows:
            return "no steps yet: call the pipeline first"
        lines = [f"{'step':>4}  {'branch':<14} {'difference':>10}  {'threshold':>9}  {'':<10} {'seconds':>8}"]
        for row in self.rows:
            difference = ""
            if row.difference is not None:
                difference = f"{row.difference:.4f}"
            verdict = row.verdict.name.lower().replace("_", " ")
            line = (
                f"{row.step:>4}  {row.branch:<14} {difference:>10}  {row.threshold:>9.4f}  {verdict:<10} "
                f"{row.seconds:>8.4f}"
            )
            if row.held_back_by:
                line += f"  held back by {', '.join(row.held_back_by)}"
            if row.forecast_from > 1:
                line += f"  forecast from {row.forecast_from} computed steps"
            lines.append(line)
        lines.append(
            f"{self.computed} of {len(self.rows)} computed, {self.hits} skipped ({self.hits / len(self.rows):.0%}), "
            f"{self.seconds:.3f} s in the model; forecast {self.forecast}, rule {self.rule}"
        )
        if self.dropped:
            lines[-1] += (
                f"; {self.dropped} earlier calls are not listed: call reset_cache(model) before each generation"
            )
        return "\n".join(lines)

    def to_json(self, path: str | Path) -> None:
        """Write all rows and the totals to a JSON file."""
        rows = []
        for row in self.rows:
            # Write null for infinity, which JSON does not have.
            values = {
                "difference": _finite(row.difference),
                "threshold": _finite(row.threshold),
                "verdict": row.verdict.name.lower(),
                "samples": list(map(_finite, row.samples)),
            }
            rows.append({**asdict(row), **values})
        report: dict[str, Any] = {"rule": self.rule, "forecast": self.forecast, "computed": self.computed}
        report |= {"hits": self.hits, "seconds": self.seconds, "dropped": self.dropped, "rows": rows}
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Plot the differences of each branch over the steps, and the threshold, to an image file.

        Raises:
            ValueError: The report has no rows.
            ImportError: matplotlib is not installed.
        """
        if not self.rows:
            raise ValueError(f"there are no steps to plot in {path} yet: call the pipeline first.")
        self._figure().savefig(path)

    def _figure(self) -> Figure:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        branches = sorted({row.branch for row in self.rows})
        figure = Figure(figsize=(8, 0.5 + 2.5 * len(branches)), layout="constrained")
        FigureCanvasAgg(figure)
        shown: dict[str, Any] = {}
        for index, branch in enumerate(branches):
            axes = figure.add_subplot(len(branches), 1, index + 1)
            rows = [row for row in self.rows if row.branch == branch]
            finite = [(row.step, _finite(row.difference), row.hit) for row in rows]
            measured = [(step, y, hit) for step, y, hit in finite if y is not None]
            axes.plot([step for step, _, _ in measured], [y for _, y, _ in measured], color="0.6", zorder=1)
            for hit, color, label in ((True, "tab:green", "skipped"), (False, "tab:red", "computed")):
                chosen = [(step, y) for step, y, was_hit in measured if was_hit is hit]
                axes.scatter([step for step, _ in chosen], [y for _, y in chosen], color=color, label=label)
            others = [row.step for row in rows if row.difference is None]
            axes.scatter(
                others, [0] * len(others), color="tab:blue", marker="x", label="computed without comparison"
            )
            if rows and math.isfinite(rows[0].threshold):
                axes.axhline(rows[0].threshold, color="0.3", linestyle="--", label="threshold")
            axes.set(
                title=f"Branch {branch!r}: change since the last computed step",
                xlabel="step",
                ylabel=self.rule,
            )
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            handles, labels = axes.get_legend_handles_labels()
            shown.update(zip(labels, handles, strict=True))
        # Place the legend below all plots, because inside a plot it would hide points.
        figure.legend(
            list(shown.values()), list(shown), loc="outside lower center", ncols=len(shown), fontsize="small"
        )
        return figure


def _finite(x: float | None) -> float | None:
    if x is None or not math.isfinite(x):
        return None
    return x


register_observer(ReportedReadings)
