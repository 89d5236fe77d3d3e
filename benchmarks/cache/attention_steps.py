"""Attention by a schedule: images and videos, against those of exact attention in all steps.

    python -m benchmarks.cache.attention_steps  # may be stopped at any time, and continues there

Generates held-out captions with the tiny trained FLUX and the tiny trained Wan, each alone, with exact attention in the
first and last N steps and 8 bits in between. A CPU has no SageAttention and runs no Triton kernel, so the middle steps
are computed by ``para_core.kernels.attention_int8_reference``, the contract of ``backend="triton-int8"``. Writes
benchmarks/results/attention_steps.json (docs/measured/cache_quality.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers import WanPipeline
from skimage.metrics import structural_similarity
from torch import Tensor
from tqdm import tqdm

from benchmarks.cache import judged, ways
from benchmarks.cache.video import psnr
from benchmarks.harness import ROOT, markdown_table, parser_of, read_results, write_results
from para_core.adapters import AttentionSchedule, parallelize_pipe
from para_core.attention import backend_selection, local
from para_core.kernels import attention_int8_reference
from zoo.flux import grammar as flux_grammar
from zoo.flux.check import check as check_image
from zoo.video import PIPELINE as WAN
from zoo.video import grammar as video_grammar
from zoo.video.check import check as check_video
from zoo.video.evaluate import generate as generate_videos
from zoo.video.evaluate import held_out_scenes, tally

CAPTIONS = 64
STEPS = {"FLUX": 28, "Wan": 20}
WAN_GUIDANCE = 2.0
# Exact first and last steps; None for exact attention in all steps.
EXACT_STEPS = (None, 0, 2, 4, 8)

Generate = Callable[[int], np.ndarray]


def _attend_by_reference(backend: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return attention_int8_reference.attention(query, key, value, **options)


@contextmanager
def int8_by_reference() -> Iterator[None]:
    """Compute ``backend="triton-int8"`` by its reference, for float32 on the CPU as well."""
    with (
        mock.patch.object(local, "_triton", _attend_by_reference),
        mock.patch.object(backend_selection, "_require_triton", lambda *_: None),
    ):
        yield


def _scheduled(pipe: Any, exact: int | None) -> Any:
    if exact is None:
        return pipe
    return parallelize_pipe(pipe, backend=AttentionSchedule("triton-int8", first=exact, last=exact))


def flux(exact: int | None, count: int) -> Generate:
    """Return a function that generates the image of a caption, ``[128, 128, 3]`` uint8."""
    pipe, scenes = _scheduled(ways.load(), exact), judged.scenes_of(count)

    def generate(index: int) -> np.ndarray:
        caption, seed = flux_grammar.caption(scenes[index]), (judged.SEED + judged.THINGS) * 100_000 + index
        latents = ways.generate(pipe, caption, steps=STEPS["FLUX"], seed=seed)
        return np.asarray((judged.decode(pipe, latents)[0] * 255).round().astype(np.uint8))

    return generate


def wan(exact: int | None, count: int) -> Generate:
    """Return a function that generates the video of a caption, ``[17, 64, 64, 3]`` uint8."""
    pipe = WanPipeline.from_pretrained(WAN, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    pipe, scenes = _scheduled(pipe, exact), held_out_scenes(0, count)

    def generate(index: int) -> np.ndarray:
        caption = video_grammar.caption(scenes[index])
        options = {"steps": STEPS["Wan"], "guidance": WAN_GUIDANCE, "seed": index, "batch": 1}
        return next(generate_videos(pipe, [caption], **options))[1]  # type: ignore[arg-type]

    return generate


MODELS: dict[str, Callable[[int | None, int], Generate]] = {"FLUX": flux, "Wan": wan}


def generate_missing(model: str, count: int, folder: Path) -> None:
    """Generate the captions that ``folder`` does not hold yet, one caption after the other with each schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[int | None, Generate] = {}
    for index in tqdm(range(count), desc=model, mininterval=5.0):
        for exact in EXACT_STEPS:
            path = _path(folder, model, exact, index)
            if path.exists():
                continue
            makers[exact] = makers.get(exact) or MODELS[model](exact, CAPTIONS)
            with path.with_suffix(".partial").open("wb") as file, torch.no_grad(), int8_by_reference():
                np.save(file, makers[exact](index))
            path.with_suffix(".partial").rename(path)


def _path(folder: Path, model: str, exact: int | None, index: int) -> Path:
    return folder / f"{model}_{'all' if exact is None else exact}_{index}.npy"


def judge(model: str, outputs: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return PSNR of the mean error and of the worst output, mean SSIM, and the share of right captions."""
    errors = np.square(outputs.astype(float) - expected).reshape(len(outputs), -1).mean(axis=1)
    frames = [x.reshape(-1, *x.shape[-3:]) for x in (outputs, expected)]
    ssim = [structural_similarity(y, x, channel_axis=-1) for x, y in zip(*frames, strict=True)]
    if model == "FLUX":
        scenes = judged.scenes_of(len(outputs))
        right = float(np.mean([check_image(x, y).all_right for x, y in zip(outputs, scenes, strict=True)]))
    else:
        videos = held_out_scenes(0, len(outputs))
        right = tally([check_video(x, y) for x, y in zip(outputs, videos, strict=True)])["all"]
    far = {"psnr": psnr(errors), "least psnr": psnr(errors.max())} if errors.any() else {}
    return {**far, "ssim": round(float(np.mean(ssim)), 5), "right": round(right, 4)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of all models."""
    cells = []
    for row in rows:
        exact, steps = row["exact"], row["steps"]
        far = f"{row['psnr']:.1f} ({row['least psnr']:.1f})" if "psnr" in row else ""
        name = f"all {steps}" if exact is None else f"{exact} and {exact} of {steps}"
        cells.append([row["model"], name, far, f"{row['ssim']:.4f}", f"{row['right']:.1%}"])
    return markdown_table(["model", "exact first and last steps", "PSNR, dB (least)", "SSIM", "all right"], cells)


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/cache_quality.md."""
    results = read_results("attention_steps")
    return {"attention steps": [*table(results["rows"]), "", f"{results['captions']} held-out captions for each row."]}


def main() -> None:
    """Measure what is missing, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--captions", type=int, default=CAPTIONS)
    parser.add_argument("--models", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "attention_steps", help="what was generated so far"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in args.models:
        steps = STEPS[model]
        generate_missing(model, args.captions, args.work)
        outputs = {
            exact: np.stack([np.load(_path(args.work, model, exact, index)) for index in range(args.captions)])
            for exact in EXACT_STEPS
        }
        for exact, found in outputs.items():
            rows.append({"model": model, "exact": exact, "steps": steps, **judge(model, found, outputs[None])})
    print("\n".join(table(rows)))
    results = {"captions": args.captions, "rows": rows}
    print(write_results("attention_steps", results, "diffusers", "scikit-image"))


if __name__ == "__main__":
    main()
