"""First Block Cache on videos:  python -m benchmarks.cache.video

The same held-out captions from the same noise without a cache and with one, at several thresholds, with and without a
forecast: how many steps were computed, how far the videos are from those without (PSNR of the mean error, and of the
worst video), and what the checker finds in them. Writes
benchmarks/results/tiny_video_caches.json and prints the table of zoo/video/README.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline

from benchmarks.harness import parser_of, write_results
from para_core.adapters import apply_cache_on_pipe, cache_report, remove_cache_from_pipe
from zoo.video import PIPELINE, grammar
from zoo.video.check import check
from zoo.video.evaluate import generate, held_out_scenes, tally

STEPS, GUIDANCE = 20, 2.0
SETTINGS: list[dict[str, Any]] = [
    {},
    *[{"residual_diff_threshold": x, "forecast_order": order} for order in (0, 1) for x in (0.05, 0.1, 0.2, 0.3)],
]


def psnr(errors: np.ndarray) -> float:
    """Return the PSNR in dB of the mean of squared errors in grey levels. Equal videos have no PSNR of their own."""
    return round(float(10 * np.log10(255**2 / errors.mean())), 1)


def videos_with(pipe: WanPipeline, captions: list[str], setting: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Return videos ``[captions, 17, 64, 64, 3]`` uint8, each generated alone, and the mean number of
    computed steps.
    """
    if setting:
        apply_cache_on_pipe(pipe, **setting)
    videos, computed = [], []
    for i, caption in enumerate(captions):
        videos += [video for _, video in generate(pipe, [caption], steps=STEPS, guidance=GUIDANCE, seed=i, batch=1)]
        if setting:
            report = cache_report(pipe)
            computed.append(STEPS * report.computed / len(report.rows))  # two branches a step
    if setting:
        remove_cache_from_pipe(pipe)
    return np.stack(videos), float(np.mean(computed)) if computed else STEPS


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=60, help="captions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipe = WanPipeline.from_pretrained(PIPELINE, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    scenes = held_out_scenes(0, args.count)
    captions = [grammar.caption(scene) for scene in scenes]
    rows, reference = [], None
    print(
        "| cache | computed steps | PSNR, dB (least) | colour | shape | direction | all right |\n| --- |" + " --- |" * 6
    )
    for setting in SETTINGS:
        videos, computed = videos_with(pipe, captions, setting)
        reference = videos if reference is None else reference
        verdicts = tally([check(video, scene) for video, scene in zip(videos, scenes, strict=True)])
        errors = np.square(videos.astype(float) - reference).reshape(len(videos), -1).mean(axis=1)
        row = {**setting, "computed steps": round(computed, 2), **verdicts}
        if setting:
            row |= {"psnr": psnr(errors), "least psnr": psnr(errors.max())}
        rows.append(row)
        name = ", ".join(f"{key}={value}" for key, value in setting.items()) or "none"
        far = f"{row['psnr']} ({row['least psnr']})" if setting else ""
        shares = " | ".join(f"{100 * verdicts[key]:.0f} %" for key in ("colour", "shape", "direction", "all"))
        print(f"| {name} | {computed:.1f} of {STEPS} | {far} | {shares} |", flush=True)
    print(
        write_results("tiny_video_caches", {"steps": STEPS, "guidance": GUIDANCE, "captions": args.count, "rows": rows})
    )


if __name__ == "__main__":
    main()
