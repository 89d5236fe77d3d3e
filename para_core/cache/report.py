"""An optional feature: the report of a cache's steps for the user: its rows, as text, as JSON and as a plot.

:mod:`para_core.cache.call_readings` collects the readings during a call; this file turns them into rows when
the user asks, and registers their observer. Users call ``cache_report(pipe)`` and :func:`model_cache_report`.
Mistakes show in ``tests/cache/test_report.py``, and in ``tests/cache/test_options.py``, which compares rows
with a second program.
"""

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
from para_core.cache.decision import DecisionOutcome, Verdict
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
            although others in the same call could have been skipped. Empty with a policy, which is asked
            about the largest difference only.
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


def model_cache_report(model: nn.Module) -> CacheReport:
    """Return a report of the model calls since the last :func:`reset_cache`, of at most ``MOST_READINGS`` calls.

    Raises:
        ValueError: The model has no cache.
    """
    return report_of([require_cache(model)])


def report_of(caches: Sequence[BlockCache]) -> CacheReport:
    """Return the report of all ``caches`` of one pipeline. The host may wait for the device."""
    observers = [observer for cache in caches for observer in cache.observers]
    readings = [observer for observer in observers if isinstance(observer, ReportedReadings)]
    options = [cache.options for cache in caches]
    # Transformers may have the same or different rules and forecasts, so list all, each once.
    rules = " and ".join(dict.fromkeys([each.rule_name for each in options]))
    forecasts = " and ".join(dict.fromkeys([each.chosen_forecast.name for each in options]))
    dropped = sum([each.dropped for each in readings])
    calls = [call for each in readings for call in each.calls]
    rows = [row for index, call in enumerate(calls) for row in _rows_of_call(call, index)]
    return CacheReport(rows, rules, forecasts, dropped)


def _rows_of_call(reading: CallReading, call: int) -> list[CachedStep]:
    """Return the rows of one model call, one per branch in its batch. ``call`` is the index of the call."""
    outcome = _outcome_as_numbers(reading.outcome)
    by_branch = _split_by_branch(reading, outcome)
    held_back_by: tuple[str, ...] = ()
    if outcome.verdict is Verdict.MISS and reading.threshold_decides:
        held_back_by = _names_above(by_branch, reading.threshold)
    num_used = 0
    if outcome.verdict.skips:
        num_used = min(int(outcome.computed), reading.room)
    seconds = reading.seconds
    return [
        CachedStep(
            step=reading.step,
            branch=branch,
            difference=_largest(differences),
            threshold=reading.threshold,
            verdict=outcome.verdict,
            seconds=seconds,
            call=call,
            samples=tuple(differences),
            held_back_by=held_back_by,
            forecast_from=num_used,
        )
        for branch, differences in by_branch.items()
    ]


def _outcome_as_numbers(outcome: DecisionOutcome) -> DecisionOutcome:
    """Return ``outcome`` with Python numbers, and without differences that did not decide: None for each sample."""
    numbers: list[Any] = [value.tolist() if isinstance(value, Tensor) else value for value in outcome[:3]]
    differences, verdict, computed = numbers[0], Verdict(int(numbers[1])), numbers[2]
    # A graph computes the differences in any case.
    if differences is None or verdict not in (Verdict.HIT, Verdict.MISS, Verdict.NOT_FINITE):
        differences = [None] * outcome.samples
    return DecisionOutcome(differences, verdict, computed, outcome.samples)


def _split_by_branch(reading: CallReading, outcome: DecisionOutcome) -> dict[str, list[float | None]]:
    """Return the differences of each branch in the call, by its name.

    The branches in a batch have equal parts of its samples, in order. If the samples of this rank do not
    divide so, they are listed under the name of the whole batch.
    """
    # A plan may give this rank only a part of the batch, so compute the number of branches in this part.
    num_branches = reading.num_branches
    if reading.batch != 0:
        num_branches = reading.num_branches * outcome.samples // reading.batch
    differences = outcome.differences
    if num_branches <= 1 or outcome.samples % num_branches != 0:
        return {reading.branch: differences}
    each = len(differences) // num_branches
    return {f"{reading.branch}/{i}": differences[i * each : (i + 1) * each] for i in range(num_branches)}


def _largest(differences: Iterable[float | None]) -> float | None:
    """Return the largest difference, NaN if one is NaN, and None if none was compared."""
    measured = [x for x in differences if x is not None]
    # max() ignores a NaN that is not the first item.
    return next((x for x in measured if math.isnan(x)), max(measured, default=None))


def _names_above(by_branch: Mapping[str, Sequence[float | None]], threshold: float) -> tuple[str, ...]:
    """Return the names of the branches and samples whose differences reach ``threshold``; none if all of them do."""
    count = 0
    names = []
    for branch, differences in by_branch.items():
        for index, difference in enumerate(differences):
            count += 1
            if difference is not None and difference >= threshold:
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
        rows: One row per step and CFG branch; with several cached transformers, those of one after those of another.
        rule, forecast: The names of the rule that compares steps, and of the forecast.
        dropped: Number of earlier model calls without a row: only the last ``MOST_READINGS`` calls are kept.
    """

    rows: Sequence[CachedStep]
    rule: str
    forecast: str
    dropped: int

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
            return "no steps yet: call the pipeline or the model first"
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
            raise ValueError(
                f"there are no steps to plot in {path} yet: call the pipeline or the model first."
            )
        self._figure().savefig(path)

    def _figure(self) -> Figure:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        branches = sorted({row.branch for row in self.rows})
        figure = Figure(figsize=(8, 0.5 + 2.5 * len(branches)), layout="constrained")
        FigureCanvasAgg(figure)
        shown: dict[str, Any] = {}
        for index, branch in enumerate(branches):
            axes = figure.add_subplot(len(branches), 1, index + 1)
            _plot_rows(axes, [row for row in self.rows if row.branch == branch])
            axes.set(title=f"Branch {branch!r}: change since the last computed step", ylabel=self.rule)
            handles, labels = axes.get_legend_handles_labels()
            shown.update(zip(labels, handles, strict=True))
        # Place the legend below all plots, because inside a plot it would hide points.
        figure.legend(
            list(shown.values()), list(shown), loc="outside lower center", ncols=len(shown), fontsize="small"
        )
        return figure


def _plot_rows(axes: Any, rows: Sequence[CachedStep]) -> None:
    """Plot the differences and thresholds of one branch. A step without a finite difference is a cross at 0."""
    from matplotlib.ticker import MaxNLocator

    measured = [row for row in rows if _finite(row.difference) is not None]
    axes.plot([row.step for row in measured], [row.difference for row in measured], color="0.6", zorder=1)
    for hit, color, label in ((True, "tab:green", "skipped"), (False, "tab:red", "computed")):
        chosen = [row for row in measured if row.hit is hit]
        axes.scatter(
            [row.step for row in chosen], [row.difference for row in chosen], color=color, label=label
        )
    others = [row for row in rows if row.difference is None]
    # Not by the verdict, which is that of the whole batch: the difference of another branch may be the one.
    not_finite = [row for row in rows if row.difference is not None and not math.isfinite(row.difference)]
    crosses = (
        ("computed without comparison", "tab:blue", [row.step for row in others if not row.hit]),
        ("skipped without comparison", "tab:green", [row.step for row in others if row.hit]),
        ("computed: not finite", "tab:red", [row.step for row in not_finite]),
    )
    for label, color, steps in crosses:
        if steps:
            axes.scatter(steps, [0] * len(steps), color=color, marker="x", label=label)
    thresholds = [row.threshold for row in rows]
    if any(map(math.isfinite, thresholds)):
        axes.step(
            [row.step for row in rows],
            thresholds,
            where="mid",
            color="0.3",
            linestyle="--",
            label="threshold",
        )
    axes.set(xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _finite(x: float | None) -> float | None:
    """Return ``x``, or None if it is no finite number."""
    if x is None or not math.isfinite(x):
        return None
    return x


register_observer(ReportedReadings)
