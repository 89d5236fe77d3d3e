"""Finding the threshold of a cache for a quality, or for a speed."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from para_core.adapters.caching.picture_metrics import PictureMetric, as_pictures, load_metric
from para_core.adapters.caching.pipe import apply_cache_on_pipe, cache_report, caching_of, remove_cache_from_pipe
from para_core.adapters.parallel import mesh_of
from para_core.agreement import exchange
from para_core.cache.report import Row, Verdict
from para_core.instance import original_class
from para_core.mesh import GuidedMesh, one_guided_rank

Metric = Literal["psnr", "ssim", "lpips", "speedup"]

_UNITS = {"psnr": " dB", "speedup": " ×"}


@dataclass(frozen=True)
class CalibrationRow:
    """What one threshold gives, over all prompts.

    Args:
        metrics: by name; ``psnr`` and ``speedup`` always.
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
        """Of the steps that were computed."""
        return self.computed / max(self.steps, 1)


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate_cache` found. ``print`` shows it.

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
        """What the threshold gives."""
        return next(row for row in self.rows if row.threshold == self.threshold)

    def __str__(self) -> str:
        names = list(self.chosen.metrics)
        lines = [f"  {'threshold':>9}  {'computed':>15}  {'seconds':>8}  " + "  ".join(f"{name:>8}" for name in names)]
        for row in self.rows:
            values = "  ".join(f"{row.metrics[name]:>8.4g}" for name in names)
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
        """Draw the metric and the share of computed steps over the thresholds, as a picture. Needs matplotlib."""
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
        axes.set(xlabel="residual_diff_threshold", ylabel=self.metric + _UNITS.get(self.metric, ""))
        beside = axes.twinx()
        shares = [row.share for row in self.rows]
        beside.plot([row.threshold for row in self.rows], shares, "s-", color="0.6", label="computed steps", zorder=0)
        beside.set(ylabel="share of steps that were computed", ylim=(0, 1.05))
        handles = [*axes.get_legend_handles_labels()[0], *beside.get_legend_handles_labels()[0]]
        axes.legend(handles=handles, fontsize="small", loc="lower left")
        figure.savefig(path)


def calibrate_cache(
    pipe: Any,
    prompts: str | Sequence[str | Mapping[str, Any]],
    *,
    target: float,
    metric: Metric = "psnr",
    thresholds: Sequence[float] | None = None,
    tries: int = 8,
    seed: int = 0,
    progress: bool = True,
    **call: Any,
) -> Calibration:
    """Find the threshold of this pipeline's cache that is as fast as a quality allows, or as good as a speed allows.

    Draws all prompts without the cache, then with each threshold that is tried, with the same random numbers. ``pipe`` is
    left with the cache at the threshold found; after an exception it is as it was. The cache's other options are those
    that ``apply_cache_on_pipe`` was given before, or its defaults. Another threshold compiles nothing anew. On several
    ranks each makes the same call, and all go by what the first one measured.

    Args:
        pipe: any pipeline that ``apply_cache_on_pipe`` takes.
        prompts: one or several; a dict has the arguments of one call (``prompt``, ``image``, …).
        target: ``"psnr"`` (dB) and ``"ssim"`` at least this, ``"lpips"`` at most: the largest threshold tried that keeps it
            is chosen. ``"speedup"`` at least this, whole generations against those without the cache: the smallest.
        metric: of the pictures, or of a film's frames, as numbers in 0 … 1, against those that are drawn without the cache.
        thresholds: what is tried. Left out: found by bisection, between the smallest and the largest difference of steps.
        tries: at most so many are tried by bisection; each draws all prompts.
        seed: prompt i is drawn with a generator of ``seed + i``, unless the call names a ``generator``.
        progress: show a progress bar.
        **call: arguments of every call of ``pipe``: ``num_inference_steps``, ``height``, …

    Raises:
        ValueError: nothing that skips a step reaches the target; the message names the best. Or an argument does not fit.
        ImportError, RuntimeError: what the metric needs is not there.
    """
    calls = _calls(prompts, call)
    _require_target(metric, target)
    if thresholds is not None and len(thresholds) == 0:
        raise ValueError("thresholds is empty; name at least one, or leave it out.")
    if tries < 1:
        raise ValueError(f"tries is {tries}; expected at least 1.")
    names: list[str] = [metric] if metric in ("ssim", "lpips") else []
    picture_metrics = {name: load_metric(name) for name in ["psnr", *names]}
    goal = _Goal(metric, target)
    uncached = caching_of(pipe) is None
    if uncached:
        apply_cache_on_pipe(pipe)
    caching = caching_of(pipe)
    if caching is None:
        raise RuntimeError("apply_cache_on_pipe left no cache.")
    before = caching.caches
    mesh = mesh_of(pipe) or one_guided_rank("cpu")
    rounds = 2 + (tries if thresholds is None else len(thresholds))
    with ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(len(calls) * rounds + 2, shown=progress and mesh.rank == 0))
        stack.enter_context(_quiet(pipe))
        trial = _Trial(pipe, calls, seed, picture_metrics, mesh, bar)

        def evaluate(threshold: float) -> CalibrationRow:
            caching.set_threshold(threshold)
            return trial.row(threshold)

        try:
            with caching.taken_off(pipe):
                trial.draw_references()
            rows = [evaluate(0.0)]
            if thresholds is None:
                rows += _bisect(trial, evaluate, goal, rows[0], tries)
            else:
                rows += [evaluate(float(threshold)) for threshold in sorted(set(thresholds)) if threshold > 0]
            rows.sort(key=lambda row: row.threshold)
            chosen = goal.choose(rows)
            caching.set_threshold(chosen.threshold)
        except BaseException:
            caching.put_back(before)
            if uncached:
                remove_cache_from_pipe(pipe)
            raise
        # Fewer may have been enough.
        bar.total = bar.n
        bar.refresh()
    return Calibration(chosen.threshold, metric, target, rows, trial.seconds)


@dataclass(frozen=True)
class _Goal:
    metric: Metric
    target: float

    def reached(self, row: CalibrationRow) -> bool:
        value = row.metrics[self.metric]
        return value <= self.target if self.metric == "lpips" else value >= self.target

    def may_rise(self, row: CalibrationRow) -> bool:
        """Whether a larger threshold is to be tried."""
        return self.reached(row) != (self.metric == "speedup")

    def choose(self, rows: Sequence[CalibrationRow]) -> CalibrationRow:
        """Of rows from the smallest threshold to the largest; those that skip nothing are no choice."""
        skipping = [row for row in rows if row.computed < row.steps]
        good = [row for row in skipping if self.reached(row)]
        if good:
            return good[0] if self.metric == "speedup" else good[-1]
        wanted = _wanted(self.metric, self.target)
        if not skipping:
            raise ValueError(
                f"no threshold up to {rows[-1].threshold:.4g} skipped a step, so none gives {wanted}. Try larger thresholds, "
                "more steps, or fewer warmup_steps."
            )
        best = (min if self.metric == "lpips" else max)(skipping, key=lambda row: row.metrics[self.metric])
        raise ValueError(
            f"no threshold gives {wanted}: the best was {best.metrics[self.metric]:.4g} at {best.threshold:.4g}, with "
            f"{best.computed} of {best.steps} steps computed. "
            + (
                "Skip more (max_consecutive_hits, warmup_steps, start, end), or ask for less."
                if self.metric == "speedup"
                else "Skip less (warmup_steps, start, end, max_consecutive_hits), or ask for less."
            )
        )


def _bisect(
    trial: _Trial,
    evaluate: Callable[[float], CalibrationRow],
    goal: _Goal,
    nothing_skipped: CalibrationRow,
    tries: int,
) -> list[CalibrationRow]:
    """At most ``tries`` rows: rising until the goal is crossed, then halving the interval (of the logarithms).

    It begins with the differences that were seen where nothing was skipped. What is skipped changes by whole steps, so it
    ends where both ends of the interval differ by one.
    """
    low, high = trial.differences
    if high <= 0.0:
        return []
    rows: list[CalibrationRow] = []
    below = nothing_skipped
    # Only what is smaller is skipped.
    threshold = 1.01 * high
    while True:
        rows.append(evaluate(threshold))
        if not goal.may_rise(rows[-1]):
            break
        if len(rows) == tries or not trial.could_skip_more:
            return rows
        below, low, threshold = rows[-1], threshold, 2 * threshold
    above, high = rows[-1], threshold
    while len(rows) < tries and below.computed - above.computed > 1 and low < high:
        threshold = math.sqrt(low * high) if low > 0.0 else high / 2
        rows.append(evaluate(threshold))
        if goal.may_rise(rows[-1]):
            below, low = rows[-1], threshold
        else:
            above, high = rows[-1], threshold
    return rows


class _Trial:
    """The generations of a calibration: without the cache, then with one threshold after the other."""

    def __init__(
        self,
        pipe: Any,
        calls: Sequence[Mapping[str, Any]],
        seed: int,
        picture_metrics: Mapping[str, PictureMetric],
        mesh: GuidedMesh,
        bar: Any,
    ) -> None:
        self._pipe, self._seed, self._metrics, self._mesh, self._bar = pipe, seed, picture_metrics, mesh, bar
        self._calls = [(call, _states(call)) for call in calls]
        self._references: list[Tensor] = []
        self._warm = False
        self.seconds = 0.0
        # Of all steps that were compared so far, on all ranks.
        self.differences = (math.inf, 0.0)
        # Whether the last threshold had a step computed that a larger one would skip.
        self.could_skip_more = True

    def draw_references(self) -> None:
        """Of a pipe without a cache."""
        # Once more: it may compile, and allocate memory.
        self._draw(0)
        drawn = [self._draw(index) for index in range(len(self._calls))]
        self._references = [pictures for pictures, _ in drawn]
        self.seconds = float(exchange({"seconds": _mean([t for _, t in drawn])}, self._mesh)[0]["seconds"])

    def row(self, threshold: float) -> CalibrationRow:
        """All prompts with the cache that the pipe has."""
        if not self._warm:
            self._draw(0)
            self._warm = True
        pictures, seconds = [], []
        rows: list[Row] = []
        for index in range(len(self._calls)):
            drawn, taken = self._draw(index)
            pictures.append(drawn)
            seconds.append(taken)
            rows += cache_report(self._pipe).rows
        values = {name: metric(pictures, self._references) for name, metric in self._metrics.items()}
        seen = [row.difference for row in rows if row.difference is not None and math.isfinite(row.difference)]
        # On other ranks of guidance other branches may be computed.
        records = exchange(
            {
                "values": values,
                "seconds": _mean(seconds),
                "steps": len(rows),
                "computed": sum(not row.hit for row in rows),
                "missed": sum(row.verdict is Verdict.MISS for row in rows),
                "seen": [min(seen, default=math.inf), max(seen, default=0.0)],
            },
            self._mesh,
        )
        lows, highs = zip(self.differences, *[record["seen"] for record in records], strict=True)
        self.differences = min(lows), max(highs)
        self.could_skip_more = any(record["missed"] for record in records)
        first = records[0]
        metrics = {**first["values"], "speedup": self.seconds / first["seconds"]}
        return CalibrationRow(threshold, metrics, first["computed"], first["steps"], first["seconds"])

    def _draw(self, index: int) -> tuple[Tensor, float]:
        """Pictures of one prompt, and the seconds."""
        call, states = self._calls[index]
        seed = self._seed + index
        for generator, state in states:
            generator.set_state(state)
        generators = {} if states else {"generator": torch.Generator().manual_seed(seed)}
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            # Some pipelines draw from the default generator, too.
            torch.manual_seed(seed)
            start = time.perf_counter()
            output = self._pipe(**call, **generators, output_type="np", return_dict=False)[0]
            seconds = time.perf_counter() - start
        self._bar.update()
        return as_pictures(output), seconds


def _calls(prompts: str | Sequence[str | Mapping[str, Any]], call: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    if not listed:
        raise ValueError("prompts is empty; name at least one.")
    calls = [{**call, **({"prompt": prompt} if isinstance(prompt, str) else prompt)} for prompt in listed]
    for name in ("output_type", "return_dict"):
        if any(name in arguments for arguments in calls):
            raise ValueError(f"{name} was given; calibrate_cache chooses it, to compare pictures. Leave it out.")
    return calls


def _states(call: Mapping[str, Any]) -> list[tuple[torch.Generator, Tensor]]:
    given = call.get("generator")
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [(generator, generator.get_state()) for generator in listed]


def _require_target(metric: str, target: float) -> None:
    ranges = {"psnr": (0.0, math.inf), "ssim": (0.0, 1.0), "lpips": (0.0, math.inf), "speedup": (0.0, math.inf)}
    if metric not in ranges:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(map(repr, ranges))}.")
    low, high = ranges[metric]
    if not low <= target <= high:
        raise ValueError(f"target is {target}; expected {low:g} to {high:g} for metric={metric!r}.")


def _wanted(metric: str, target: float) -> str:
    return f"{metric} {'≤' if metric == 'lpips' else '≥'} {target:g}{_UNITS.get(metric, '')}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _progress_bar(total: int, *, shown: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="calibrating", disable=not shown)


@contextmanager
def _quiet(pipe: Any) -> Iterator[None]:
    """Without the pipe's own progress bars, and without warnings about thresholds that are tried."""
    if not hasattr(pipe, "set_progress_bar_config"):
        raise TypeError(f"{original_class(pipe).__name__} is no diffusers pipeline: it has no set_progress_bar_config.")
    shown = getattr(pipe, "_progress_bar_config", None)
    pipe.set_progress_bar_config(**{**(shown or {}), "disable": True})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the cache of the .* skipped")
            yield
    finally:
        pipe.set_progress_bar_config(**(shown or {}))
