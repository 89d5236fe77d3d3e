"""What the examples share: options, a tiny pipeline where no checkpoint is named, generating without and with the cache."""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import export_to_video
from PIL import Image

from para_core.adapters import apply_cache_on_pipe, cache_report

# What a result may be called.
ALLOWED = {"image": (".png", ".jpg", ".jpeg", ".webp"), "video": (".gif", ".mp4")}
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def parse_options(description: str | None, **defaults: object) -> argparse.Namespace:
    """Parse the command line; ``defaults`` are the example's own (model, prompt, steps, height, width, output, …)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's name on the hub, or a folder")
    parser.add_argument("--prompt")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--height", type=int, help="pixels")
    parser.add_argument("--width", type=int, help="pixels")
    if "frames" in defaults:
        parser.add_argument("--frames", type=int)
        parser.add_argument("--fps", type=int, default=16, help="frames per second of the video")
    parser.add_argument("--max-sequence-length", type=int, help="text tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threshold", type=float, help="larger is faster; left out: the default of the model's family")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
    parser.add_argument("--runs", type=int, default=3, help="times are the median of so many, each way")
    parser.add_argument("--output", help="where the result with the cache goes; the others get its name and a suffix")
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    check(options, parser)
    return options


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End in a sentence what cannot run, before anything is loaded."""
    for name in ("steps", "height", "width", "frames", "fps", "max_sequence_length", "runs"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
    if options.threshold is not None and not options.threshold >= 0:
        parser.error(f"--threshold is {options.threshold:g}; expected 0 (skips nothing) or more")
    folder = Path(options.output).absolute().parent
    if not folder.is_dir():
        parser.error(f"--output is {options.output}; there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        parser.error(f"--output is {options.output}; {folder} cannot be written to")
    written = ALLOWED["video" if hasattr(options, "fps") else "image"]
    if Path(options.output).suffix.lower() not in written:
        parser.error(f"--output is {options.output}; expected a name that ends in {' or '.join(written)}")
    if options.output.endswith(".mp4") and not any(map(importlib.util.find_spec, ("imageio_ffmpeg", "cv2"))):
        parser.error(
            f"--output is {options.output}; an MP4 needs imageio-ffmpeg (pip install imageio imageio-ffmpeg) or OpenCV; a .gif does not"
        )


def tiny_pipeline(name: str) -> Any:
    """A pipeline with random weights: it shows that everything runs, and what it generates means nothing."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.tiny_pipelines import PIPELINES

    print("no --model given: a tiny pipeline with random weights, so the video is noise")
    return PIPELINES[name].build()


def generate_both(pipe: Any, generate: Callable[..., Any], options: argparse.Namespace) -> tuple[Any, Any]:
    """What ``generate`` gives without and with the cache; prints the report and both times, and saves the report's plot."""
    without, seconds_without = timed(generate, options)
    apply_cache_on_pipe(pipe, residual_diff_threshold=options.threshold)
    cached, seconds = timed(generate, options)
    report = cache_report(pipe)
    print(report)
    print(f"without the cache {seconds_without:.2f} s, with it {seconds:.2f} s: {seconds_without / seconds:.2f} ×")
    if options.runs > 1:
        print(f"medians of {options.runs} runs each")
    report.plot(beside(options.output, "steps", ".png"))
    print(f"{options.output}, beside it without the cache, and the report as a plot")
    return without, cached


def timed(generate: Callable[..., Any], options: argparse.Namespace) -> tuple[Any, float]:
    """What ``generate(num_inference_steps=, generator=)`` gives, and the seconds that it took, the median of the runs."""

    def run(steps: int) -> Any:
        return generate(num_inference_steps=steps, generator=torch.Generator(DEVICE).manual_seed(options.seed))

    # To compile and allocate: with the cache the first call of a generation is a graph of its own.
    run(2)
    seconds = []
    for _ in range(options.runs):
        start = time.perf_counter()
        result = run(options.steps)
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def beside(output: str, suffix: str, extension: str | None = None) -> str:
    """``flux.png`` becomes ``flux_suffix.png``."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}_{suffix}{extension or path.suffix}"))


def write_videos(without: list[Image.Image], cached: list[Image.Image], options: argparse.Namespace) -> None:
    """GIFs, or by the name MP4s (which needs imageio-ffmpeg or OpenCV)."""
    for frames, path in ((without, beside(options.output, "without")), (cached, options.output)):
        if path.endswith(".gif"):
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 // options.fps, loop=0)
        else:
            export_to_video(frames, path, fps=options.fps)
