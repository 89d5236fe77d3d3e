"""HunyuanVideo on one device, or on several:

python parallel_examples/run_hunyuan_video.py
torchrun --nproc_per_node=2 parallel_examples/run_hunyuan_video.py --ring 2
torchrun --nproc_per_node=4 parallel_examples/run_hunyuan_video.py --model hunyuanvideo-community/HunyuanVideo \
    --prompt "a cat walks on the grass" --steps 30 --height 720 --width 1280 --frames 129 --max-sequence-length 256 --output cat.mp4
"""

import argparse
import os
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import HunyuanVideoPipeline
from diffusers.utils import export_to_gif, export_to_video

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

# para_core's own checkout has tiny pipelines with random weights; elsewhere --model is required.
CHECKOUT = Path(__file__).absolute().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model",
    required=not (CHECKOUT / "zoo/tiny/pipelines/registry.py").exists(),
    help="a folder or a name on the Hub; left out: a tiny one with random weights, whose video is noise",
)
parser.add_argument("--prompt", default="a large red circle at the top left, on white")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--height", type=int, default=48, help="pixels")
parser.add_argument("--width", type=int, default=80, help="pixels")
parser.add_argument("--frames", type=int, default=9)
parser.add_argument("--fps", type=int, default=16, help="frames per second of the video")
parser.add_argument("--max-sequence-length", type=int, default=13, help="text tokens")
parser.add_argument("--ring", type=int, help="ranks of the ring; the others do Ulysses")
parser.add_argument("--parallel-vae", action="store_true", help="the VAE on all ranks, too")
parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
parser.add_argument("--runs", type=int, default=1, help="the time is the median of so many")
parser.add_argument("--output", type=Path, default=Path("hunyuan_video.gif"))
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name, value in vars(options).items():
    if type(value) is int and value < 1:
        parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
if options.height % 16 or options.width % 16 or options.frames % 4 != 1:
    parser.error(
        f"--height {options.height} --width {options.width} --frames {options.frames}; expected multiples of 16, and 4 k + 1 frames"
    )
if options.ring and "RANK" not in os.environ:  # set by torchrun
    parser.error("--ring needs ranks: torchrun --nproc_per_node=N …, one rank per GPU")
if options.output.suffix not in (".gif", ".mp4") or not os.access(options.output.absolute().parent, os.W_OK):
    parser.error(f"--output is {options.output}; expected a .gif or .mp4 in a folder that can be written to")
if options.output.suffix == ".mp4" and not all(map(find_spec, ("imageio", "imageio_ffmpeg"))):
    parser.error(f"--output is {options.output}; an .mp4 needs pip install imageio imageio-ffmpeg, a .gif does not")

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
mesh, rank = None, 0
if "RANK" in os.environ:
    dist.init_process_group()
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_context_parallel_mesh(device, max_ring_dim_size=options.ring)

if options.model is None:
    sys.path.insert(0, str(CHECKOUT))
    from zoo.tiny.pipelines.registry import PIPELINES

    pipe = PIPELINES["hunyuan"].build()
else:
    pipe = HunyuanVideoPipeline.from_pretrained(options.model, dtype=dtype)
    pipe.vae.enable_tiling()
pipe.to(device).set_progress_bar_config(disable=rank != 0)
parallelize_pipe(pipe, mesh=mesh, vae=options.parallel_vae)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)


def generate(steps: int):
    return pipe(
        prompt=options.prompt,
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        max_sequence_length=options.max_sequence_length,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="pil",
    ).frames[0]


if options.compile:
    generate(steps=2)
seconds = []
for _ in range(options.runs):
    start = time.perf_counter()
    frames = generate(options.steps)
    seconds.append(time.perf_counter() - start)

if rank == 0:
    if options.output.suffix == ".gif":
        export_to_gif(frames, str(options.output), fps=options.fps)
    else:
        export_to_video(frames, str(options.output), fps=options.fps)
    print(f"{mesh or '1 rank'}: {options.steps} steps in {statistics.median(seconds):.2f} s; {options.output}")
if mesh is not None:
    dist.destroy_process_group()
