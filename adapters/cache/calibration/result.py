"""The result of a calibration: the curve of thresholds, and the chosen one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = Literal["psnr", "ssim", "lpips", "speedup", "computed_steps"]
# Of which less is wanted; and those for which the smallest threshold that reaches the target is best.
_AT_MOST, _SMALLEST = ("lpips", "computed_steps"), ("speedup", "computed_steps")

_UNITS = {"psnr": " dB", "speedup": " ×"}


@dataclass(frozen=True)
class CalibrationRow:
    """The results of one threshold over all prompts.

    Args:
        metrics: by name; ``psnr``, ``speedup`` and ``computed_steps`` (of one generation and branch, on average)
            always.
        computed, steps: steps of all branches and prompts, on the first rank: those that were computed, and all.
        seconds: of a generation, on average: text encoders and decoder, too.
    """

    threshold: float
    metrics: Mapping[str, float]
    computed: int
    steps: int
    seconds: float

    @property
    def share(self) -> float:
        """The share of steps that were computed."""
        return self.computed / max(self.steps, 1)


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate_cache`. ``print`` shows it.

    Args:
        threshold: the one that was chosen.
        rows: of all that were tried, from the smallest to the largest.
        seconds: of a generation without the cache, on average.
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
        """Write what was chosen, and the whole curve."""
        rows = [
            {
                "threshold": row.threshold,
                # JSON knows no infinity.
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
        """Plot the metric and the share of computed steps over the thresholds. Needs matplotlib."""
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
        # Below the plot: inside it would hide points.
        figure.legend(handles=handles, fontsize="small", loc="outside lower center", ncols=len(handles))
        return figure


@dataclass(frozen=True)
class Goal:
    """The target of a calibration."""

    metric: Metric
    target: float

    def reached(self, row: CalibrationRow) -> bool:
        value = row.metrics[self.metric]
        return value <= self.target if self.metric in _AT_MOST else value >= self.target

    def may_rise(self, row: CalibrationRow) -> bool:
        """Whether a larger threshold is to be tried."""
        return self.reached(row) != (self.metric in _SMALLEST)

    def choose(self, rows: Sequence[CalibrationRow]) -> CalibrationRow:
        """Choose a row, from the smallest threshold to the largest. Rows that skip nothing are not eligible."""
        skipping = [row for row in rows if row.computed < row.steps]
        good = [row for row in skipping if self.reached(row)]
        if good:
            return good[0] if self.metric in _SMALLEST else good[-1]
        wanted = _wanted(self.metric, self.target)
        if not skipping:
            raise ValueError(
                f"no threshold up to {rows[-1].threshold:.4g} skipped a step, so none gives {wanted}. Try larger "
                "thresholds, "
                "more steps, or fewer warmup_steps."
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
    ranges = {name: (0.0, 1.0 if name == "ssim" else math.inf) for name in get_args(Metric)}
    if metric not in ranges:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(map(repr, ranges))}.")
    low, high = ranges[metric]
    if not low <= target <= high:
        raise ValueError(f"target is {target}; expected {low:g} to {high:g} for metric={metric!r}.")


def _wanted(metric: str, target: float) -> str:
    return f"{metric} {'≤' if metric in _AT_MOST else '≥'} {target:g}{_UNITS.get(metric, '')}"
