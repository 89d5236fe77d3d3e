"""Quality of the features that are not exact:  python -m benchmarks.pipelines.lossy

Generates held-out captions with the trained FLUX and Wan of zoo/, from the same noise, with the unmodified pipeline and
with each feature: quantized weights (docs/weights.md), attention in 8 bits in the middle steps
(docs/measured/cache_quality.md), PipeFusion next to First Block Cache (docs/stages.md), First Block Cache on videos
(zoo/video/README.md). PSNR and SSIM are relative to the unmodified pipeline. A checker finds the share of captions that
are right in everything. Writes lossy.json. It may be stopped at any time, because finished settings stay in
build/lossy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.cache.judged import SEED, THINGS, decode, scenes_of, ssim
from benchmarks.cache.ways import generate, load, load_wan
from benchmarks.harness import ROOT, markdown_table, measure_on_ranks, parser_of, read_results, write_results
from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import AttentionSchedule, apply_cache_on_pipe, cache_report, parallelize_pipe
from para_core.adapters.weights.quantize import quantize_transformers
from para_core.attention.backends.added import ADDED
from para_core.attention.backends.triton_backend import triton_backend
from para_core.kernels import attention_int8_reference
from para_core.weights.parameters import plain_tensors
from zoo import evaluate
from zoo.flux import scenes as grammar
from zoo.flux.check import check as check_image
from zoo.video import scenes as video_scenes

STEPS = {"FLUX": 28, "Wan": 20}
GUIDANCE = 2.0  # This is the guidance scale of Wan.
CAPTIONS, WORK = 64, ROOT / "build/lossy"
SCHEMES = ("exact", "int8", "fp8", "int8-dynamic")
# These numbers of first and last steps of a schedule are exact.
EXACT_STEPS = (0, 2, 4, 8)
# Each entry has num_patches, warmup_steps and cooldown_steps. Wan has five frames of latents.
PATCHES = {
    "FLUX": [(2, 1, 0), (4, 1, 0), (8, 1, 0), (4, 4, 0), (4, 1, 2), (4, 1, 4)],
    "Wan": [(2, 1, 0), (4, 1, 0), (5, 1, 0), (4, 4, 0), (4, 1, 2), (4, 1, 4)],
}
THRESHOLDS = (0.05, 0.1, 0.2, 0.3)


# -- The settings.


def settings_of(model: str) -> dict[str, Callable[[Any], Any]]:
    """Return, by name, the function that applies each setting to a pipeline of ``model``. The first one is the
    unmodified pipeline.
    """
    settings: dict[str, Callable[[Any], Any]] = {"alone, exact": lambda pipe: pipe}
    for scheme in SCHEMES:
        settings[f"alone, {scheme}"] = partial(_quantize, scheme=scheme)
        settings[f"cached, {scheme}"] = partial(_quantize, scheme=scheme, cached=True)
        settings[f"two ranks, {scheme}"] = partial(_quantize, scheme=scheme, parallel=True)
    for exact in EXACT_STEPS:
        schedule = AttentionSchedule("triton-int8", first=exact, last=exact)
        settings[f"schedule, {exact}"] = partial(parallelize_pipe, backend=schedule)
    for patches in PATCHES[model]:
        settings[f"PipeFusion{patches}"] = partial(parallelize_pipe, pipefusion=PipeFusion(*patches))
    half = STEPS[model] // 2
    steps = sorted({round(index * (STEPS[model] - 1) / (half - 1)) for index in range(half)})
    settings["half of the steps"] = partial(apply_cache_on_pipe, compute_steps=steps)
    if model == "Wan":
        for order in (0, 1):
            for threshold in THRESHOLDS:
                settings[f"cache, {threshold}, {order}"] = partial(
                    apply_cache_on_pipe, residual_diff_threshold=threshold, forecast_order=order
                )
    return settings


def _quantize(pipe: Any, *, scheme: str, cached: bool = False, parallel: bool = False) -> None:
    if scheme != "exact":
        quantize_transformers(pipe, scheme)  # type: ignore[arg-type]
    if parallel:
        parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu"))
    if cached:
        apply_cache_on_pipe(pipe)


@contextmanager
def int8_by_reference() -> Iterator[None]:
    """Compute ``backend="triton-int8"`` by the reference of its kernel in this context, since a CPU runs no Triton
    kernel.
    """
    by_reference = triton_backend(lambda: attention_int8_reference.attention, {}, launches={})
    unchecked = replace(by_reference, check=lambda *_, **__: None)
    with mock.patch.dict(ADDED, {"triton-int8": unchecked}):  # type: ignore[dict-item]
        yield


# -- Generations.


def path_of(model: str, name: str) -> Path:
    """Return the file of one setting."""
    return WORK / f"{model}, {name}, {CAPTIONS}.npz"


def generate_setting(model: str, name: str) -> None:
    """Write the outputs of all captions, one call each, the computed steps and the bytes of the transformer. Every rank
    calls this function, and the first one writes.
    """
    pipe = load() if model == "FLUX" else load_wan()
    settings_of(model)[name](pipe)
    size = sum(part.nbytes for x in pipe.transformer.parameters() for part in plain_tensors(x.detach()))
    outputs, computed = [], []
    with torch.no_grad(), int8_by_reference():
        for output in (_images if model == "FLUX" else _videos)(pipe):
            outputs.append(output)
            if name.startswith("cache, "):
                report = cache_report(pipe)
                # There are two branches in each step.
                computed.append(STEPS[model] * report.computed / len(report.rows))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        path = path_of(model, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_suffix(".partial.npz")
        np.savez_compressed(partial_path, outputs=np.stack(outputs), computed=np.array(computed), bytes=size)
        partial_path.rename(path)


def _images(pipe: Any) -> Iterator[np.ndarray]:
    """Yield images ``[128, 128, 3]`` uint8."""
    for index, scene in enumerate(scenes_of(CAPTIONS), (SEED + THINGS) * 100_000):
        latents = generate(pipe, grammar.caption(scene), steps=STEPS["FLUX"], seed=index)
        yield (decode(pipe, latents)[0] * 255).round().astype(np.uint8)


def _videos(pipe: Any) -> Iterator[np.ndarray]:
    """Yield videos ``[17, 64, 64, 3]`` uint8."""
    captions = [video_scenes.caption(scene) for scene in evaluate.held_out_videos(0, CAPTIONS)]
    options = {"guidance_scale": GUIDANCE, "negative_prompt": ""}
    for _, output in evaluate.generate(pipe, captions, steps=STEPS["Wan"], seed=0, batch=1, **options):
        yield output


# -- Judgement.


def row_of(model: str, name: str) -> dict[str, Any]:
    """Return the figures of one setting."""
    with np.load(path_of(model, name)) as file:
        outputs, computed, size = file["outputs"], file["computed"], int(file["bytes"])
    with np.load(path_of(model, "alone, exact")) as file:
        expected = file["outputs"]
    row = {"model": model, "setting": name, "right": right(model, outputs), "bytes": size}
    if len(computed):
        row["computed steps"] = round(float(computed.mean()), 2)
    errors = np.square(outputs.astype(float) - expected).reshape(CAPTIONS, -1).mean(axis=1)
    # Equal outputs have no PSNR.
    if errors.any():
        row |= {"psnr": _psnr(errors.mean()), "least psnr": _psnr(errors.max())}
    frames = [x.reshape(-1, *x.shape[-3:]) / np.float32(255) for x in (outputs, expected)]
    row["ssim"] = round(float(np.mean([ssim(x, y) for x, y in zip(*frames, strict=True)])), 5)
    return row


def _psnr(error: float) -> float:
    """Return the PSNR in dB of a mean squared error in grey levels."""
    return round(float(10 * np.log10(255**2 / error)), 1)


def right(model: str, outputs: np.ndarray) -> float:
    """Return the share of outputs in which the checker finds everything that the caption says."""
    if model == "FLUX":
        verdicts = [check_image(x, y).all_right for x, y in zip(outputs, scenes_of(len(outputs)), strict=True)]
        return round(float(np.mean(verdicts)), 4)
    scenes = evaluate.held_out_videos(0, len(outputs))
    return evaluate.tally([video_scenes.check(x, y) for x, y in zip(outputs, scenes, strict=True)])["all"]


# -- Tables.


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/weights.md, docs/measured/cache_quality.md, docs/stages.md and zoo/video/README.md."""
    rows = {(row["model"], row["setting"]): row for row in read_results("lossy")["rows"]}
    return {
        "quantized": _quantized(rows),
        "attention steps": _schedules(rows),
        "quality": _pipefusion(rows),
        "caches": _video_caches(rows),
    }


def _figures(row: dict[str, Any]) -> list[str]:
    psnr = f"{row['psnr']:.1f} ({row['least psnr']:.1f})" if "psnr" in row else "equal"
    return [psnr, f"{row['ssim']:.4f}", f"{row['right']:.0%}"]


FIGURES = ["PSNR, dB (least)", "SSIM", "all right"]


def _quantized(rows: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    runs = ("alone", "cached", "two ranks")
    cells = []
    for model in STEPS:
        for scheme in SCHEMES:
            of_scheme = [rows[model, f"{run}, {scheme}"] for run in runs]
            figures = [", ".join(_figures(row)) for row in of_scheme]
            cells.append([model, scheme, f"{of_scheme[0]['bytes'] / 1e6:.1f}", *figures])
    return markdown_table(["model", "weights", "MB", *runs], cells, right=(2,))


def _schedules(rows: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    cells = [
        [model, f"{exact} and {exact}", f"{STEPS[model] - 2 * exact} of {STEPS[model]}", *_figures(row)]
        for model in STEPS
        for exact in EXACT_STEPS
        for row in [rows[model, f"schedule, {exact}"]]
    ]
    heads = ["model", "exact first and last steps", "steps in 8 bits", *FIGURES]
    return markdown_table(heads, cells, right=range(3, 6))


def _pipefusion(rows: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(f"PipeFusion{patches}" for model in STEPS for patches in PATCHES[model]))
    cells = [
        [name, *(_figures(rows[model, name])[0] if (model, name) in rows else "" for model in STEPS)]
        for name in [*names, "half of the steps"]
    ]
    cells[-1][0] = "First Block Cache, half of the steps computed"
    heads = ["", "images: PSNR, dB (least)", "videos: PSNR, dB (least)"]
    return markdown_table(heads, cells, right=(1, 2))


def _video_caches(rows: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    cells = [["none", "20.0 of 20", "", "", f"{rows['Wan', 'alone, exact']['right']:.0%}"]]
    for order in (0, 1):
        for threshold in THRESHOLDS:
            row = rows["Wan", f"cache, {threshold}, {order}"]
            name = f"threshold {threshold}, `forecast_order={order}`"
            cells.append([name, f"{row['computed steps']:.1f} of {STEPS['Wan']}", *_figures(row)])
    return markdown_table(["cache", "computed steps", *FIGURES], cells, right=range(1, 5))


def main() -> None:
    """Generate the missing outputs, judge them, and write the results."""
    parser_of(__doc__).parse_args()
    rows = []
    for model in STEPS:
        for name in settings_of(model):
            if not path_of(model, name).exists():
                measure_on_ranks(generate_setting, 2 if name.startswith("two ranks") else 1, model, name)
            rows.append(row_of(model, name))
            print(rows[-1], flush=True)
    results = {"captions": CAPTIONS, "steps": STEPS, "guidance of Wan": GUIDANCE, "rows": rows}
    print(write_results("lossy", results, "diffusers", "torchao", "scikit-image"))


if __name__ == "__main__":
    main()
