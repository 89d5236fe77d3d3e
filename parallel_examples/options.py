"""What the examples share: options, starting the ranks, a tiny pipeline where no checkpoint is named, writing a video."""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from diffusers.utils import export_to_video, logging
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh

from para_core import init_context_parallel_mesh

# What a result may be called.
ALLOWED = {"image": (".png", ".jpg", ".jpeg", ".webp"), "video": (".gif", ".mp4")}


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
    parser.add_argument("--batch", type=int, help="2: half of the ranks for each branch of guidance")
    parser.add_argument("--ring", type=int, help="ranks of the ring; the others do Ulysses, unless given too")
    parser.add_argument("--ulysses", type=int, help="ranks of Ulysses; the others form the ring, unless given too")
    parser.add_argument("--parallel-vae", action="store_true", help="the VAE on all ranks, too")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
    parser.add_argument("--runs", type=int, default=1, help="the time is the median of so many")
    parser.add_argument("--output", help="where the result goes")
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    check(options, parser)
    return options


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End in a sentence what cannot run, before anything is loaded."""
    for name in (
        "steps",
        "height",
        "width",
        "frames",
        "fps",
        "max_sequence_length",
        "batch",
        "ring",
        "ulysses",
        "runs",
    ):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
    given = [f"--{name} {getattr(options, name)}" for name in ("batch", "ring", "ulysses") if getattr(options, name)]
    if given and "RANK" not in os.environ:  # set by torchrun
        parser.error(f"{' '.join(given)} needs ranks: torchrun --nproc_per_node=N {sys.argv[0]} …, one rank per GPU")
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


@dataclass(frozen=True)
class Ranks:
    """The processes that work together: one, or those that torchrun started."""

    mesh: DeviceMesh | None
    rank: int
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        if self.mesh is None:
            return "1 rank"
        batch, ring, ulysses = (self.mesh[name].size() for name in ("batch", "ring", "ulysses"))
        guidance = f"batch {batch} × " if batch > 1 else ""
        return f"{self.mesh.size()} ranks, {guidance}ring {ring} × ulysses {ulysses}"


def start_ranks(options: argparse.Namespace) -> Ranks:
    """Join the other ranks, if there are any. Progress bars are rank 0's."""
    if int(os.environ.get("RANK", "0")) > 0:
        logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if "RANK" not in os.environ:  # set by torchrun
        return Ranks(None, 0, device, dtype)
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_context_parallel_mesh(
        device,
        max_batch_dim_size=options.batch,
        max_ring_dim_size=options.ring,
        max_ulysses_dim_size=options.ulysses,
    )
    return Ranks(mesh, dist.get_rank(), device, dtype)


def tiny_pipeline(name: str, rank: int) -> Any:
    """A pipeline with random weights: it shows that everything runs, and what it generates means nothing."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.tiny_pipelines import PIPELINES
    from benchmarks.tiny_unets import UNET_PIPELINES

    if rank == 0:
        print("no --model given: a tiny pipeline with random weights, so what it generates is noise")
    return {**PIPELINES, **UNET_PIPELINES}[name].build()


def timed(run: Callable[..., Any], options: argparse.Namespace, ranks: Ranks) -> Any:
    """What ``run(num_inference_steps=, generator=)`` gives; rank 0 prints how long it took."""
    if options.compile:
        # Mochi has no schedule of one step.
        run(num_inference_steps=2, generator=torch.Generator(ranks.device).manual_seed(options.seed))
    seconds_of_runs = []
    for _ in range(options.runs):
        generator = torch.Generator(ranks.device).manual_seed(options.seed)
        start = time.perf_counter()
        result = run(num_inference_steps=options.steps, generator=generator)
        seconds_of_runs.append(time.perf_counter() - start)
    seconds = statistics.median(seconds_of_runs)
    if ranks.rank == 0:
        each = seconds / options.steps
        print(f"{ranks}: {options.steps} steps in {seconds:.2f} s, {each:.3f} s per step; {options.output}")
    return result


def write_video(frames: list[Image.Image], options: argparse.Namespace) -> None:
    """A GIF, or by its name an MP4 (which needs imageio-ffmpeg or OpenCV)."""
    if options.output.endswith(".gif"):
        frames[0].save(options.output, save_all=True, append_images=frames[1:], duration=1000 // options.fps, loop=0)
    else:
        export_to_video(frames, options.output, fps=options.fps)
