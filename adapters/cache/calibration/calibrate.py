"""Finding the threshold of a cache for a quality, or for a speed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from para_core.adapters.applied import mesh_of
from para_core.adapters.cache.calibration.image_metrics import load_metric
from para_core.adapters.cache.calibration.result import Calibration, CalibrationRow, Goal, Metric, require_target
from para_core.adapters.cache.calibration.trial import Trial
from para_core.adapters.cache.generation import caching_of
from para_core.adapters.cache.pipeline import apply_cache_on_pipe, remove_cache_from_pipe
from para_core.distributed.mesh import one_guided_rank
from para_core.instance_patching import original_class
from para_core.user_warnings import ThresholdWarning


def calibrate_cache(
    pipe: Any,
    prompts: str | Sequence[str | Mapping[str, Any]],
    *,
    target: float | None = None,
    metric: Metric = "psnr",
    computed_steps: float | None = None,
    thresholds: Sequence[float] | None = None,
    tries: int = 8,
    seed: int = 0,
    progress: bool = True,
    **call: Any,
) -> Calibration:
    """Find the threshold of this pipeline's cache that is as fast as a quality allows, or as good as a speed allows.

    Generates all prompts without the cache, then with each threshold that is tried, with the same random numbers.
    ``pipe`` is left with the cache at the threshold found; after an exception it is as it was. The cache's other
    options are those that ``apply_cache_on_pipe`` was given before, or its defaults. Another threshold compiles nothing
    anew. On several ranks each makes the same call, and all go by what the first one measured.

    Args:
        pipe: any pipeline that ``apply_cache_on_pipe`` takes.
        prompts: one or several; a dict has the arguments of one call (``prompt``, ``image``, …).
        target: ``"psnr"`` (dB) and ``"ssim"`` at least this, ``"lpips"`` at most: the largest threshold tried that
            keeps it is chosen. ``"speedup"`` at least this, whole generations against those without the cache, and
            ``"computed_steps"`` at most this, of one generation and branch, on average: the smallest.
        metric: of the images, or of a video's frames, as numbers in 0 … 1, against those without the cache.
        computed_steps: the same as ``metric="computed_steps"`` with this target. No clock decides, so on every machine
            the same threshold is found.
        thresholds: what is tried. Left out: found by bisection, between the smallest and the largest difference of
            steps.
        tries: at most so many are tried by bisection; each generates all prompts.
        seed: prompt i is generated with a generator of ``seed + i``, unless the call names a ``generator``.
        progress: show a progress bar.
        **call: arguments of every call of ``pipe``: ``num_inference_steps``, ``height``, …

    Raises:
        ValueError: nothing that skips a step reaches the target; the message names the best. Or an argument does not
            fit.
        ImportError, RuntimeError: what the metric needs is not there.
    """
    calls = _calls(prompts, call)
    if (target is None) == (computed_steps is None):
        raise ValueError(f"target is {target} and computed_steps is {computed_steps}; give one of them.")
    metric = metric if computed_steps is None else "computed_steps"
    target = float(target if computed_steps is None else computed_steps)  # type: ignore[arg-type]
    require_target(metric, target)
    if thresholds is not None and len(thresholds) == 0:
        raise ValueError("thresholds is empty; name at least one, or leave it out.")
    if tries < 1:
        raise ValueError(f"tries is {tries}; expected at least 1.")
    names: list[str] = [metric] if metric in ("ssim", "lpips") else []
    image_metrics = {name: load_metric(name) for name in ["psnr", *names]}
    goal = Goal(metric, target)
    uncached = caching_of(pipe) is None
    if uncached:
        apply_cache_on_pipe(pipe)
    caching = caching_of(pipe)
    if caching is None:
        raise RuntimeError("apply_cache_on_pipe left no cache.")
    before = caching.thresholds
    mesh = mesh_of(pipe) or one_guided_rank("cpu")
    rounds = 2 + (tries if thresholds is None else len(thresholds))
    with ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(len(calls) * rounds + 2, shown=progress and mesh.rank == 0))
        stack.enter_context(_quiet(pipe))
        trial = Trial(pipe, calls, seed, image_metrics, mesh, bar)

        def evaluate(threshold: float) -> CalibrationRow:
            caching.thresholds = dict.fromkeys(before, threshold)
            return trial.row(threshold)

        found = False
        try:
            with caching.paused():
                trial.generate_references()
            rows = [evaluate(0.0)]
            if thresholds is None:
                rows += _bisect(trial, evaluate, goal, rows[0], tries)
            else:
                rows += [evaluate(float(threshold)) for threshold in sorted(set(thresholds)) if threshold > 0]
            rows.sort(key=lambda row: row.threshold)
            chosen = goal.choose(rows)
            caching.thresholds = dict.fromkeys(before, chosen.threshold)
            found = True
        finally:
            if not found:
                caching.thresholds = before
                if uncached:
                    remove_cache_from_pipe(pipe)
        # Fewer may have been enough.
        bar.total = bar.n
        bar.refresh()
    return Calibration(chosen.threshold, metric, target, rows, trial.seconds)


def _bisect(
    trial: Trial,
    evaluate: Callable[[float], CalibrationRow],
    goal: Goal,
    nothing_skipped: CalibrationRow,
    tries: int,
) -> list[CalibrationRow]:
    """At most ``tries`` rows: rising until the goal is crossed, then halving the interval (of the logarithms).

    It begins with the differences that were seen where nothing was skipped. What is skipped changes by whole steps, so
    it ends where both ends of the interval differ by one.
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


def _calls(prompts: str | Sequence[str | Mapping[str, Any]], call: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    if not listed:
        raise ValueError("prompts is empty; name at least one.")
    calls = [{**call, **({"prompt": prompt} if isinstance(prompt, str) else prompt)} for prompt in listed]
    for name in ("output_type", "return_dict"):
        if any(name in arguments for arguments in calls):
            raise ValueError(f"{name} was given; calibrate_cache chooses it, to compare images. Leave it out.")
    return calls


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
            warnings.simplefilter("ignore", ThresholdWarning)
            yield
    finally:
        pipe.set_progress_bar_config(**(shown or {}))
