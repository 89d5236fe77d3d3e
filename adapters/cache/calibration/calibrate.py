"""Search for the threshold of a cache that reaches a given quality or speed."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from para_core.adapters.cache.calibration.image_metrics import ImageMetric, as_images, load_metric
from para_core.adapters.cache.calibration.result import Calibration, CalibrationRow, Goal, require_target
from para_core.adapters.cache.generation import caching_of
from para_core.adapters.cache.pipeline import apply_cache_on_pipe, cache_report, remove_cache_from_pipe
from para_core.adapters.registry import mesh_of
from para_core.cache.decision import Verdict
from para_core.cache.report import CachedStep
from para_core.distributed.agree import exchange
from para_core.distributed.mesh import GuidedMesh, one_guided_rank
from para_core.instance.private_class import original_class
from para_core.option_values import Metric
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
        TypeError: The pipeline is not supported, or an argument has a wrong type.
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
    target = target if computed_steps is None else computed_steps
    if isinstance(target, bool) or not isinstance(target, Real):
        raise TypeError(f"target or computed_steps is {target!r}; expected a number.")
    target = float(target)
    require_target(metric, target)
    if thresholds is not None:
        _require_thresholds(thresholds)
    for name, value in (("tries", tries), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {value!r}; expected an integer.")
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

    def restore(failure: type[BaseException] | None, *_: Any) -> None:
        if failure is not None:
            caching.thresholds = before
            if uncached:
                remove_cache_from_pipe(pipe)

    with ExitStack() as stack:
        stack.push(restore)
        hidden = not progress or mesh.rank != 0
        bar = stack.enter_context(tqdm(total=len(calls) * rounds + 2, desc="calibrating", disable=hidden))
        stack.enter_context(_quiet(pipe))
        trial = _Trial(pipe, calls, seed, image_metrics, mesh, bar)

        def evaluate(threshold: float) -> CalibrationRow:
            caching.thresholds = dict.fromkeys(before, threshold)
            return trial.row(threshold)

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
        # The bar's total was the maximum number of generations. The search may have needed fewer, so end the bar here.
        bar.total = bar.n
        bar.refresh()
    return Calibration(chosen.threshold, metric, target, rows, trial.seconds)


def _bisect(
    trial: _Trial,
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


def _require_thresholds(thresholds: object) -> None:
    expected = "expected a sequence of numbers that are at least 0, or None to search"
    if isinstance(thresholds, str) or not isinstance(thresholds, Collection):
        raise TypeError(f"thresholds is {thresholds!r}; {expected}.")
    if len(thresholds) == 0:
        raise ValueError(f"thresholds is empty; {expected}.")
    for threshold in thresholds:
        if isinstance(threshold, bool) or not isinstance(threshold, Real):
            raise TypeError(f"thresholds has {threshold!r}; {expected}.")
        # Not a number is neither smaller nor larger than any other number.
        if not float(threshold) >= 0:
            raise ValueError(f"thresholds has {threshold}; {expected}.")


def _calls(prompts: str | Sequence[str | Mapping[str, Any]], call: Mapping[str, Any]) -> list[dict[str, Any]]:
    expected = "expected a prompt, or a sequence of prompts and of dicts with the arguments of a call"
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {prompts!r}; {expected}.")
    listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    for prompt in listed:
        if not isinstance(prompt, (str, Mapping)):
            raise TypeError(f"prompts has {prompt!r}; {expected}.")
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


@dataclass(eq=False)
class _Trial:
    """Generates the prompts of a calibration, without the cache and then with each threshold, and measures the results.

    ``calls`` holds the arguments for each prompt. Prompt ``i`` is generated with ``seed + i``, unless its arguments
    have a ``generator``. ``bar`` is a ``tqdm`` progress bar, advanced by 1 after each generation.
    """

    pipe: Any
    calls: Sequence[Mapping[str, Any]]
    seed: int
    image_metrics: Mapping[str, ImageMetric]
    mesh: GuidedMesh
    bar: Any
    references: Sequence[Tensor] = ()
    is_warm: bool = False
    seconds: float = 0.0
    # Smallest and largest finite difference that the cache has compared with a threshold so far, over all ranks.
    differences: tuple[float, float] = (math.inf, 0.0)
    # Whether, at the last threshold, some step was computed only because its difference exceeded the threshold.
    could_skip_more: bool = True

    def __post_init__(self) -> None:
        # The states of the generators that calls were given, to draw the same noise again.
        listed = [call.get("generator") or [] for call in self.calls]
        generators = [x if isinstance(x, (list, tuple)) else [x] for x in listed]
        self.states = [[(generator, generator.get_state()) for generator in of_call] for of_call in generators]

    def generate_references(self) -> None:
        """Generate all prompts while the cache is paused. Keep the images and the first rank's mean seconds."""
        # The first generation is not measured, because it may compile and allocate memory.
        self._generate(0)
        generated = [self._generate(index) for index in range(len(self.calls))]
        self.references = [images for images, _ in generated]
        self.seconds = float(exchange({"seconds": fmean([t for _, t in generated])}, self.mesh)[0]["seconds"])

    def row(self, threshold: float) -> CalibrationRow:
        """Generate all prompts with ``threshold``, set by the caller, and return the measurements of the first rank."""
        if not self.is_warm:
            self._generate(0)
            self.is_warm = True
        images, seconds = [], []
        rows: list[CachedStep] = []
        # Pairs (prompt index, CFG branch). Their number is the divisor of the mean ``computed_steps``.
        streams: set[tuple[int, str]] = set()
        for index in range(len(self.calls)):
            generated, taken = self._generate(index)
            images.append(generated)
            seconds.append(taken)
            rows_of_prompt = cache_report(self.pipe).rows
            rows += rows_of_prompt
            streams |= {(index, row.branch) for row in rows_of_prompt}
        values = {name: metric(images, self.references) for name, metric in self.image_metrics.items()}
        differences = [row.difference for row in rows if row.difference is not None and math.isfinite(row.difference)]
        # Ranks along the batch dim may compute other CFG branches, so combine what all ranks measured.
        records = exchange(
            {
                "values": values,
                "seconds": fmean(seconds),
                "steps": len(rows),
                "streams": len(streams),
                "computed": sum(not row.hit for row in rows),
                "missed": sum(row.verdict is Verdict.MISS for row in rows),
                "differences": [min(differences, default=math.inf), max(differences, default=0.0)],
            },
            self.mesh,
        )
        lows, highs = zip(self.differences, *[record["differences"] for record in records], strict=True)
        self.differences = min(lows), max(highs)
        self.could_skip_more = any(record["missed"] for record in records)
        first = records[0]
        metrics = {**first["values"], "speedup": self.seconds / first["seconds"]}
        metrics["computed_steps"] = first["computed"] / max(first["streams"], 1)
        return CalibrationRow(threshold, metrics, first["computed"], first["steps"], first["seconds"])

    def _generate(self, index: int) -> tuple[Tensor, float]:
        """Return the images of the prompt ``index``, and the seconds that its generation took."""
        call, states, seed = self.calls[index], self.states[index], self.seed + index
        for generator, state in states:
            generator.set_state(state)
        generators = {} if states else {"generator": torch.Generator().manual_seed(seed)}
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            # Some pipelines ignore the passed generator in places and draw from the default one, so seed that one too.
            torch.manual_seed(seed)
            start = time.perf_counter()
            output = _output(self.pipe, {**call, **generators, "output_type": "np"})
            seconds = time.perf_counter() - start
        self.bar.update()
        return as_images(output), seconds


def _output(pipe: Any, call: Mapping[str, Any]) -> Any:
    """Call ``pipe`` and return its images or videos. A modular pipeline must be asked for these by name."""
    from diffusers import ModularPipeline

    if not isinstance(pipe, ModularPipeline):
        return pipe(**call, return_dict=False)[0]
    outputs = {output.name for output in pipe.blocks.outputs}
    return pipe(**call, output="videos" if "videos" in outputs else "images")
