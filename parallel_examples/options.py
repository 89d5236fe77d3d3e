"""What the examples share: options, starting the ranks, a tiny pipeline where no checkpoint is named, writing a video."""

from __future__ import annotations

import argparse
import os
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
    parser.add_argument("--output", help="where the result goes")
    parser.set_defaults(**defaults)
    return parser.parse_args()


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
    """Join the other ranks, if there are any. One progress bar, rank 0's: of the steps, not of loading."""
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
    start = time.perf_counter()
    result = run(num_inference_steps=options.steps, generator=torch.Generator(ranks.device).manual_seed(options.seed))
    seconds = time.perf_counter() - start
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
