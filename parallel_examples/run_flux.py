"""FLUX.1 on one device, or on several:

python parallel_examples/run_flux.py
torchrun --nproc_per_node=2 parallel_examples/run_flux.py --ring 2
torchrun --nproc_per_node=4 parallel_examples/run_flux.py --model black-forest-labs/FLUX.1-dev \
    --prompt "a cat holding a sign" --steps 28 --height 1024 --width 1024 --max-sequence-length 512 --compile
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

# Trained for para_core's own checkout, and found there alone: elsewhere --model is required.
TINY = Path(__file__).absolute().parent.parent / "zoo/flux/pipeline"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default=TINY, required=not TINY.exists(), help="a folder or a name on the Hub; left out: a tiny FLUX"
)
parser.add_argument("--prompt", default="a large red circle in the centre on a white background")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--height", type=int, default=128, help="pixels")
parser.add_argument("--width", type=int, default=128, help="pixels")
parser.add_argument("--max-sequence-length", type=int, default=64, help="text tokens")
parser.add_argument("--ring", type=int, help="ranks of the ring; the others do Ulysses")
parser.add_argument("--parallel-vae", action="store_true", help="the VAE on all ranks, too")
parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
parser.add_argument("--runs", type=int, default=1, help="the time is the median of so many")
parser.add_argument("--output", type=Path, default=Path("flux.png"))
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name, value in vars(options).items():
    if type(value) is int and value < 1:
        parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
if options.height % 16 or options.width % 16:
    parser.error(f"--height {options.height} --width {options.width}; expected multiples of 16")
if options.ring and "RANK" not in os.environ:  # set by torchrun
    parser.error(f"--ring {options.ring} needs ranks: torchrun --nproc_per_node=N …, one rank per GPU")
if options.output.suffix not in (".png", ".jpg", ".webp") or not os.access(options.output.absolute().parent, os.W_OK):
    parser.error(f"--output is {options.output}; expected a .png, .jpg or .webp in a folder that can be written to")

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
mesh, rank = None, 0
if "RANK" in os.environ:
    dist.init_process_group()
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_context_parallel_mesh(device, max_ring_dim_size=options.ring)

pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
pipe.set_progress_bar_config(disable=rank != 0)
parallelize_pipe(pipe, mesh=mesh, vae=options.parallel_vae)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)


def generate(steps: int):
    return pipe(
        options.prompt,
        height=options.height,
        width=options.width,
        max_sequence_length=options.max_sequence_length,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
    ).images[0]


if options.compile:
    generate(steps=2)
seconds = []
for _ in range(options.runs):
    start = time.perf_counter()
    image = generate(options.steps)
    seconds.append(time.perf_counter() - start)

if rank == 0:
    image.save(options.output)
    print(f"{mesh or '1 rank'}: {options.steps} steps in {statistics.median(seconds):.2f} s; {options.output}")
if mesh is not None:
    dist.destroy_process_group()
