"""Generate the prompts of a calibration and measure quality and time at one threshold."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from para_core.adapters.cache.calibration.image_metrics import ImageMetric, as_images
from para_core.adapters.cache.calibration.result import CalibrationRow
from para_core.adapters.cache.pipeline import cache_report
from para_core.cache.decision import Verdict
from para_core.cache.report import CachedStep
from para_core.distributed.consistency import exchange
from para_core.distributed.mesh import GuidedMesh


class Trial:
    """Generates the prompts of a calibration, without the cache and then with each threshold, and measures the results.

    Prompt ``i``, of which ``calls`` has the arguments, is generated with ``seed + i``, unless its call has a
    ``generator``. ``bar`` is a ``tqdm`` progress bar, advanced by 1 after each generation.
    """

    def __init__(
        self,
        pipe: Any,
        calls: Sequence[Mapping[str, Any]],
        seed: int,
        image_metrics: Mapping[str, ImageMetric],
        mesh: GuidedMesh,
        bar: Any,
    ) -> None:
        self._pipe, self._seed, self._metrics, self._mesh, self._bar = pipe, seed, image_metrics, mesh, bar
        self._calls = [(call, _states(call)) for call in calls]
        self._references: list[Tensor] = []
        self._warm = False
        self.seconds = 0.0
        # Smallest and largest finite difference that the cache has compared with a threshold so far, over all ranks.
        self.differences = (math.inf, 0.0)
        # Whether, at the last threshold, some step was computed only because its difference exceeded the threshold.
        self.could_skip_more = True

    def generate_references(self) -> None:
        """Generate all prompts without the cache, and keep the images as references and the first rank's mean seconds.

        The caller must have paused the cache.
        """
        # The first generation is not measured, because it may compile and allocate memory.
        self._generate(0)
        generated = [self._generate(index) for index in range(len(self._calls))]
        self._references = [images for images, _ in generated]
        self.seconds = float(exchange({"seconds": fmean([t for _, t in generated])}, self._mesh)[0]["seconds"])

    def row(self, threshold: float) -> CalibrationRow:
        """Generate all prompts with the pipeline's cache and return the first rank's measurements.

        The caller must first call :meth:`generate_references` and set ``threshold`` on the cache.
        """
        if not self._warm:
            self._generate(0)
            self._warm = True
        images, seconds = [], []
        rows: list[CachedStep] = []
        # Pairs (prompt index, CFG branch). Their number is the divisor of the mean ``computed_steps``.
        streams: set[tuple[int, str]] = set()
        for index in range(len(self._calls)):
            generated, taken = self._generate(index)
            images.append(generated)
            seconds.append(taken)
            rows_of_prompt = cache_report(self._pipe).rows
            rows += rows_of_prompt
            streams |= {(index, row.branch) for row in rows_of_prompt}
        values = {name: metric(images, self._references) for name, metric in self._metrics.items()}
        differences = [row.difference for row in rows if row.difference is not None and math.isfinite(row.difference)]
        # Ranks along the batch dim may compute different CFG branches, so combine the differences and misses of all
        # ranks.
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
            self._mesh,
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
        call, states = self._calls[index]
        seed = self._seed + index
        for generator, state in states:
            generator.set_state(state)
        generators = {} if states else {"generator": torch.Generator().manual_seed(seed)}
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            # Some pipelines ignore the passed generator in places and draw from the default one, so seed that one too.
            torch.manual_seed(seed)
            start = time.perf_counter()
            output = _output(self._pipe, {**call, **generators, "output_type": "np"})
            seconds = time.perf_counter() - start
        self._bar.update()
        return as_images(output), seconds


def _output(pipe: Any, call: Mapping[str, Any]) -> Any:
    """Call ``pipe`` and return its images or videos. A modular pipeline must be asked for these by name."""
    from diffusers import ModularPipeline

    if not isinstance(pipe, ModularPipeline):
        return pipe(**call, return_dict=False)[0]
    outputs = {output.name for output in pipe.blocks.outputs}
    return pipe(**call, output="videos" if "videos" in outputs else "images")


def _states(call: Mapping[str, Any]) -> list[tuple[torch.Generator, Tensor]]:
    generators = call.get("generator") or []
    listed = generators if isinstance(generators, (list, tuple)) else [generators]
    return [(generator, generator.get_state()) for generator in listed]
