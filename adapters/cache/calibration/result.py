"""Result of a calibration: the measurements at each threshold, and the chosen threshold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from para_core.option_values import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# _AT_MOST: metrics whose target is a maximum. _SMALLEST: metrics for which the smallest threshold that reaches the
# target is chosen; for the others it is the largest.
_AT_MOST, _SMALLEST = ("lpips", "computed_steps"), ("speedup", "computed_steps")

_UNITS = {"psnr": " dB", "speedup": " ×"}


@dataclass(frozen=True)
class CalibrationRow:
    """The results of one threshold over all prompts.

    Args:
        threshold (`float`): The threshold of the cache, ``residual_diff_threshold``.
        metrics (`Mapping[str, float]`): Results by name of the metric. Always contains ``psnr`` in dB, ``speedup``, and
            ``computed_steps``, the mean per generation and CFG branch; also the metric of the target.
        computed (`int`): Number of computed steps, summed over branches and prompts, on the first rank.
        steps (`int`): Number of steps, computed or skipped, summed over branches and prompts, on the first rank.
        seconds (`float`): Mean seconds of a generation on the first rank, including text encoders and decoder.
    """

    threshold: float
    metrics: Mapping[str, float]
    computed: int
    steps: int
    seconds: float

    @property
    def share(self) -> float:
        """Share of the steps that were computed, in 0 … 1."""
        return self.computed / max(self.steps, 1)


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate_cache`. ``print`` shows it as a table.

    Args:
        threshold (`float`): The chosen threshold.
        metric (`str`): The metric of the target.
        target (`float`): The value that the metric had to reach.
        rows (`Sequence[CalibrationRow]`): The results of all thresholds, from the smallest to the largest.
        seconds (`float`): Mean seconds of a generation without the cache.
    """

    threshold: float
    metric: Metric
    target: float
    rows: Sequence[CalibrationRow]
    seconds: float

    @property
    def chosen(self) -> CalibrationRow:
        """The row of the chosen threshold."""
        return next(row for row in self.rows if row.threshold == self.threshold)

    def __str__(self) -> str:
        names = list(self.chosen.metrics)
        lines = [
            f"  {'threshold':>9}  {'computed':>15}  {'seconds':>8}  "
            + "  ".join(f"{name:>{max(8, len(name))}}" for name in names)
        ]
        for row in self.rows:
            values = "  ".join(f"{row.metrics[name]:>{max(8, len(name))}.4g}" for name in names)
            computed = f"{row.computed} of {row.steps}"
            mark = "→" if row.threshold == self.threshold else " "
            lines.append(f"{mark} {row.threshold:>9.4g}  {computed:>15}  {row.seconds:>8.3f}  {values}")
        lines.append(
            f"residual_diff_threshold={self.threshold:.4g} for {_wanted(self.metric, self.target)}; without the cache "
            f"{self.seconds:.3f} s"
        )
        return "\n".join(lines)

    def to_json(self, path: str | Path) -> None:
        """Write the chosen threshold, the target and all rows to ``path``."""
        rows = [
            {
                "threshold": row.threshold,
                # The PSNR of equal images is infinite, which JSON cannot hold, so write null.
                **{name: value if math.isfinite(value) else None for name, value in row.metrics.items()},
                "computed": row.computed,
                "steps": row.steps,
                "seconds": row.seconds,
            }
            for row in self.rows
        ]
        chosen = {"threshold": self.threshold, "metric": self.metric, "target": self.target}
        text = json.dumps({**chosen, "seconds without the cache": self.seconds, "rows": rows}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Plot the metric and the share of computed steps over the thresholds into ``path``. Needs matplotlib."""
        self._figure().savefig(path)

    def _figure(self) -> Figure:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        finite = [row for row in self.rows if math.isfinite(row.metrics[self.metric])]
        thresholds = [row.threshold for row in finite]
        values = [row.metrics[self.metric] for row in finite]
        axes.plot(thresholds, values, "o-", color="tab:blue", label=self.metric)
        axes.axhline(self.target, color="tab:blue", linestyle=":", label=f"target: {_wanted(self.metric, self.target)}")
        axes.axvline(self.threshold, color="0.3", linestyle="--", label=f"chosen: {self.threshold:.4g}")
        axes.set(
            title=f"{self.metric} and computed steps at each threshold",
            xlabel="residual_diff_threshold",
            ylabel=self.metric + _UNITS.get(self.metric, ""),
        )
        beside = axes.twinx()
        shares = [row.share for row in self.rows]
        beside.plot([row.threshold for row in self.rows], shares, "s-", color="0.6", label="computed steps", zorder=0)
        beside.set(ylabel="share of steps that were computed", ylim=(0, 1.05))
        handles = [*axes.get_legend_handles_labels()[0], *beside.get_legend_handles_labels()[0]]
        # The legend is outside the axes, where it cannot hide points.
        figure.legend(handles=handles, fontsize="small", loc="outside lower center", ncols=len(handles))
        return figure


@dataclass(frozen=True)
class Goal:
    """A metric and the target that it must reach."""

    metric: Metric
    target: float

    def reached(self, row: CalibrationRow) -> bool:
        value = row.metrics[self.metric]
        return value <= self.target if self.metric in _AT_MOST else value >= self.target

    def may_rise(self, row: CalibrationRow) -> bool:
        """Whether the search continues with a larger threshold than that of ``row``; otherwise with a smaller one.

        For quality metrics a larger threshold is tried as long as the target is reached, for speed metrics as long as
        it is not.
        """
        return self.reached(row) != (self.metric in _SMALLEST)

    def choose(self, rows: Sequence[CalibrationRow]) -> CalibrationRow:
        """Return the row with the best threshold among ``rows``, which are sorted by threshold.

        Raises:
            ValueError: No row that skipped a step reaches the target.
        """
        skipping = [row for row in rows if row.computed < row.steps]
        good = [row for row in skipping if self.reached(row)]
        if good:
            return good[0] if self.metric in _SMALLEST else good[-1]
        wanted = _wanted(self.metric, self.target)
        if not skipping:
            raise ValueError(
                f"no threshold up to {rows[-1].threshold:.4g} skipped a step, so none gives {wanted}. Try larger "
                "thresholds, more steps, or fewer warmup_steps."
            )
        best = (min if self.metric in _AT_MOST else max)(skipping, key=lambda row: row.metrics[self.metric])
        raise ValueError(
            f"no threshold gives {wanted}: the best was {best.metrics[self.metric]:.4g} at {best.threshold:.4g}, with "
            f"{best.computed} of {best.steps} steps computed. "
            + (
                "Skip more (max_consecutive_hits, warmup_steps, start, end), or ask for less."
                if self.metric in _SMALLEST
                else "Skip less (warmup_steps, start, end, max_consecutive_hits), or ask for less."
            )
        )


def require_target(metric: str, target: float) -> None:
    """Raise ``ValueError`` if the metric is unknown or ``target`` is outside its range."""
    ranges = {name: (0.0, 1.0 if name == "ssim" else math.inf) for name in get_args(Metric)}
    if metric not in ranges:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(map(repr, ranges))}.")
    low, high = ranges[metric]
    if not low <= target <= high:
        raise ValueError(f"target is {target}; expected {low:g} to {high:g} for metric={metric!r}.")


def _wanted(metric: str, target: float) -> str:
    return f"{metric} {'≤' if metric in _AT_MOST else '≥'} {target:g}{_UNITS.get(metric, '')}"
