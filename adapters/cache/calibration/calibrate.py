"""Search for the threshold of a cache that reaches a given quality or speed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from para_core.adapters.cache.calibration.image_metrics import load_metric
from para_core.adapters.cache.calibration.result import Calibration, CalibrationRow, Goal, Metric, require_target
from para_core.adapters.cache.calibration.trial import Trial
from para_core.adapters.cache.generation import caching_of
from para_core.adapters.cache.pipeline import apply_cache_on_pipe, remove_cache_from_pipe
from para_core.adapters.registry import mesh_of
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
    """Find the threshold of a pipeline's cache that is fastest at a given quality, or most exact at a given speed.

    All prompts are generated without the cache, then with each threshold, from the same random numbers. Afterwards
    ``pipe`` has the cache with the chosen threshold; after an error it is as before. The other cache options are those
    of the cache that ``pipe`` already has; without one, the defaults. A new threshold does not recompile the
    transformer.

    On a parallel pipeline every rank must make the same call. The measurements of the first rank decide.

    Args:
        pipe (`DiffusionPipeline`): A pipeline that :func:`apply_cache_on_pipe` accepts, with or without a cache.
        prompts (`str`, or a sequence of `str` and `dict`): The prompts. A dict holds the arguments of one call of the
            pipeline (``prompt``, ``image``, …).
        target (`float`, *optional*): The value that the metric must reach. For ``"psnr"`` and ``"ssim"`` it is a
            minimum and for ``"lpips"`` a maximum, and the largest threshold that reaches it is chosen. For
            ``"speedup"`` it is a minimum and for ``"computed_steps"`` a maximum, and the smallest threshold that
            reaches it is chosen. Required unless ``computed_steps`` is passed.
        metric (`"psnr"`, `"ssim"`, `"lpips"`, `"speedup"` or `"computed_steps"`, defaults to `"psnr"`): The metric of
            ``target``. The first three compare images or video frames, with values in 0 … 1, with those generated
            without the cache; PSNR is in dB. ``"speedup"`` is the time of a generation without the cache divided by the
            time with it. ``"computed_steps"`` is the mean number of computed steps per generation and CFG branch.
        computed_steps (`float`, *optional*): Short for ``metric="computed_steps", target=computed_steps``. This choice
            does not depend on measured times.
        thresholds (`Sequence[float]`, *optional*): The thresholds to try. Defaults to a search: the threshold is
            doubled, starting just above the largest difference between steps, until the target is crossed, then
            bisected.
        tries (`int`, defaults to `8`): Maximum number of thresholds that the search tries. For each of them all prompts
            are generated.
        seed (`int`, defaults to `0`): Prompt ``i`` is generated with the seed ``seed + i``, unless its call has a
            ``generator``.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.
        **call: Arguments of every call of ``pipe``: ``num_inference_steps``, ``height``, …

    Returns:
        A `Calibration` with the chosen threshold and the results of all thresholds.

    Raises:
        TypeError: The pipeline is not supported.
        ValueError: No threshold that skips a step reaches the target (the message names the best one), or an argument
            is invalid.
        ImportError: A package that the metric needs is not installed.
        RuntimeError: The weights that ``"lpips"`` needs cannot be loaded.
    """
    from tqdm.auto import tqdm

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
        hidden = not progress or mesh.rank != 0
        bar = stack.enter_context(tqdm(total=len(calls) * rounds + 2, desc="calibrating", disable=hidden))
        stack.enter_context(_quiet(pipe))
        trial = Trial(pipe, calls, seed, image_metrics, mesh, bar)

        def evaluate(threshold: float) -> CalibrationRow:
            caching.thresholds = dict.fromkeys(before, threshold)
            return trial.row(threshold)

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
        except BaseException:
            caching.thresholds = before
            if uncached:
                remove_cache_from_pipe(pipe)
            raise
        # The bar's total was the maximum number of generations. The search may have needed fewer, so end the bar here.
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
    """Evaluate at most ``tries`` thresholds: double the threshold until the goal is crossed, then bisect the interval.

    The first threshold is just above the largest difference that was measured with threshold 0, at which the results
    are ``nothing_skipped``. The interval is halved on a logarithmic scale. The search ends when the numbers of computed
    steps at its two ends differ by at most one. Returns the results in the order of evaluation; empty if no step
    differed from the one before.
    """
    low, high = trial.differences
    if high <= 0.0:
        return []
    rows: list[CalibrationRow] = []
    below = nothing_skipped
    # A step is skipped only if its difference is below the threshold, so begin just above the largest difference.
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


@contextmanager
def _quiet(pipe: Any) -> Iterator[None]:
    """Hide the progress bars of ``pipe`` and the warnings about thresholds inside the ``with`` block."""
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
