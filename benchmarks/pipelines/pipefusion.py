"""Images and videos by PipeFusion, compared with First Block Cache at equal work.

    python -m benchmarks.pipelines.pipefusion

The FLUX and the Wan that were trained here, in one process, which computes what any number of stages does
(`tests/weights/test_pipefusion.py`). Held-out captions, the same noise for each way: how far the result is from the
exact one (PSNR), and whether a checker finds the same in both, and all that was asked for. On P stages PipeFusion takes
1 / P of the time of a step at best; a cache that computes half of the steps takes half of the time of one device.
Writes benchmarks/results/pipefusion_quality.json (docs/stages.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline

from benchmarks.cache.judged import decode, judge, scenes_of
from benchmarks.cache.video import psnr
from benchmarks.cache.ways import SIDE, TEXT_TOKENS, load
from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core import PipeFusion
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, remove_cache_from_pipe, unparallelize_pipe
from zoo.flux import grammar
from zoo.video import evaluate as video
from zoo.video.check import check as check_video
from zoo.video.grammar import caption as video_caption

VIDEO_PIPELINE = Path(video.__file__).with_name("pipeline")
GUIDANCE = 2.0
MOST_DECIBELS = 100.0  # of two that are equal
# (num_patches, warmup_steps, cooldown_steps) by number of steps.
IMAGE_SETTINGS = {
    10: [(2, 1, 0), (4, 1, 0), (8, 1, 0)],
    20: [(2, 1, 0), (4, 1, 0), (8, 1, 0), (4, 4, 0), (4, 1, 2), (4, 1, 4)],
    40: [(4, 1, 0), (8, 1, 0), (4, 1, 4)],
}
# The same for five frames of latents.
VIDEO_SETTINGS = {
    10: [(4, 1, 0)],
    20: [(2, 1, 0), (4, 1, 0), (5, 1, 0), (4, 4, 0), (4, 1, 2), (4, 1, 4)],
    40: [(4, 1, 0), (4, 1, 4)],
}

Put = Callable[[Any], Any]


def ways(steps: int, settings: list[tuple[int, int, int]]) -> dict[str, Put]:
    """Return for each way, by name, the function that applies it to a pipeline."""
    found: dict[str, Put] = {}
    for setting in settings:
        options = PipeFusion(*setting)
        found[f"PipeFusion{setting}"] = lambda pipe, options=options: parallelize_pipe(pipe, pipefusion=options)
    places = sorted({round(place * (steps - 1) / (steps // 2 - 1)) for place in range(steps // 2)})
    found[f"First Block Cache, {len(places)} of {steps} steps computed"] = lambda pipe: apply_cache_on_pipe(
        pipe, compute_steps=places
    )
    return found


def images(pipe: Any, steps: int, count: int) -> np.ndarray:
    """Return ``[count, 128, 128, 3]`` in 0 … 1."""
    captions = [grammar.caption(scene) for scene in scenes_of(count)]
    channels = pipe.transformer.config.in_channels // 4
    noise = [
        pipe.prepare_latents(
            1, channels, SIDE, SIDE, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(place)
        )
        for place in range(count)
    ]
    latents = pipe(
        captions,
        height=SIDE,
        width=SIDE,
        num_inference_steps=steps,
        max_sequence_length=TEXT_TOKENS,
        latents=torch.cat([latents for latents, _ in noise]),
        output_type="latent",
    ).images
    return decode(pipe, latents)


def judge_images(made: np.ndarray, exact: np.ndarray) -> dict[str, list[Any]]:
    found = judge(made, exact)
    return {"psnr": found["psnr"], "same": found["as without"], "right": found["right"]}


def load_video() -> WanPipeline:
    """Return the tiny Wan, unmodified."""
    pipe = WanPipeline.from_pretrained(VIDEO_PIPELINE, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def videos(pipe: Any, steps: int, count: int) -> np.ndarray:
    """Return ``[count, 17, 64, 64, 3]`` uint8."""
    captions = [video_caption(scene) for scene in video.held_out_scenes(0, count)]
    made = video.generate(pipe, captions, steps=steps, guidance=GUIDANCE, seed=0, batch=count)
    return np.stack([one for _, one in made])


def judge_videos(made: np.ndarray, exact: np.ndarray) -> dict[str, list[Any]]:
    scenes = video.held_out_scenes(0, len(made))
    verdicts = [check_video(x, scene) for x, scene in zip(made, scenes, strict=True)]
    expected = [check_video(x, scene) for x, scene in zip(exact, scenes, strict=True)]
    errors = [np.square(x.astype(float) - y) for x, y in zip(made, exact, strict=True)]
    return {
        "psnr": [psnr(error) if error.any() else MOST_DECIBELS for error in errors],
        "same": [x == y for x, y in zip(verdicts, expected, strict=True)],
        "right": [x.all_right for x in verdicts],
    }


def measure(
    pipe: Any,
    generated: Callable[[Any, int, int], np.ndarray],
    judged: Callable[[np.ndarray, np.ndarray], dict[str, list[Any]]],
    settings: dict[int, list[tuple[int, int, int]]],
    count: int,
) -> list[dict[str, Any]]:
    """Return a row for each number of steps and each way, over ``count`` captions. The first row of each number is the
    exact one.
    """
    rows: list[dict[str, Any]] = []
    for steps, of_steps in settings.items():
        exact = generated(pipe, steps, count)
        rows.append({"steps": steps, "way": "exact", "right": judged(exact, exact)["right"]})
        for name, put in ways(steps, of_steps).items():
            put(pipe)
            rows.append({"steps": steps, "way": name, **judged(generated(pipe, steps, count), exact)})
            remove_cache_from_pipe(unparallelize_pipe(pipe))
            print(steps, name, round(mean(rows[-1]["psnr"]), 1), min(rows[-1]["psnr"]), flush=True)
    return rows


# The number of steps of the JSON that the page shows.
SHOWN_STEPS = 20


def parts() -> dict[str, list[str]]:
    """Return the table of docs/stages.md on images and videos. The JSON has other numbers of steps, and verdicts."""
    results = read_results("pipefusion_quality")
    cells: dict[str, dict[str, str]] = {}
    for kind in ("images", "videos"):
        for row in results[kind]:
            if row["steps"] == SHOWN_STEPS and "psnr" in row:
                cells.setdefault(row["way"], {})[kind] = f"{mean(row['psnr']):.1f} ({min(row['psnr']):.1f})"
    rows = [[way, found.get("images", ""), found.get("videos", "")] for way, found in cells.items()]
    return {"quality": markdown_table(["", "images: PSNR, dB (worst)", "videos: PSNR, dB (worst)"], rows, right=(1, 2))}


def main() -> None:
    """Generate each way, judge and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=12, help="captions")
    count = parser.parse_args().count
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {
        "videos": measure(load_video(), videos, judge_videos, VIDEO_SETTINGS, count),
        "images": measure(load(), images, judge_images, IMAGE_SETTINGS, count),
    }
    print(
        write_results("pipefusion_quality", {"captions": count, "guidance of videos": GUIDANCE, **results}, "diffusers")
    )


if __name__ == "__main__":
    main()
