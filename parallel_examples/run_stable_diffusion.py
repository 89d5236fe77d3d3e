"""Stable Diffusion XL on one device, or on several, which share the rows of the image:

python parallel_examples/run_stable_diffusion.py
torchrun --nproc_per_node=2 parallel_examples/run_stable_diffusion.py --parallel-vae
torchrun --nproc_per_node=4 parallel_examples/run_stable_diffusion.py --model stabilityai/stable-diffusion-xl-base-1.0 \
    --prompt "a cat holding a sign" --steps 30 --height 1024 --width 1024 --batch 2 --parallel-vae
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import AutoPipelineForText2Image

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

# para_core's own checkout has tiny pipelines with random weights; elsewhere --model is required.
CHECKOUT = Path(__file__).absolute().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model",
    required=not (CHECKOUT / "zoo/tiny/pipelines/unet.py").exists(),
    help="a folder or a name on the Hub; left out: a tiny one with random weights, whose image is noise",
)
parser.add_argument("--prompt", default="a large red circle at the top left, on white")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--height", type=int, default=136, help="pixels")
parser.add_argument("--width", type=int, default=88, help="pixels")
parser.add_argument("--batch", type=int, help="2: half of the ranks for each branch of guidance; all others share rows")
parser.add_argument("--parallel-vae", action="store_true", help="the VAE on all ranks, too")
parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True); on one device")
parser.add_argument("--runs", type=int, default=1, help="the time is the median of so many")
parser.add_argument("--output", type=Path, default=Path("stable_diffusion.png"))
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name, value in vars(options).items():
    if type(value) is int and value < 1:
        parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
if options.height % 8 or options.width % 8:
    parser.error(f"--height {options.height} --width {options.width}; expected multiples of 8")
if options.batch and "RANK" not in os.environ:  # set by torchrun
    parser.error(f"--batch {options.batch} needs ranks: torchrun --nproc_per_node=N …, one rank per GPU")
if options.compile and "RANK" in os.environ:
    parser.error("--compile: a UNet on several ranks runs eagerly; expected one device, without torchrun")
if options.output.suffix not in (".png", ".jpg", ".webp") or not os.access(options.output.absolute().parent, os.W_OK):
    parser.error(f"--output is {options.output}; expected a .png, .jpg or .webp in a folder that can be written to")

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
mesh, rank = None, 0
if "RANK" in os.environ:
    dist.init_process_group()
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_context_parallel_mesh(device, max_batch_dim_size=options.batch)

if options.model is None:
    sys.path.insert(0, str(CHECKOUT))
    from zoo.tiny.pipelines.unet import UNET_PIPELINES

    pipe = UNET_PIPELINES["xl"].build()
else:
    pipe = AutoPipelineForText2Image.from_pretrained(options.model, torch_dtype=dtype)
pipe.to(device).set_progress_bar_config(disable=rank != 0)
parallelize_pipe(pipe, mesh=mesh, vae=options.parallel_vae)
if options.compile:
    pipe.unet = torch.compile(pipe.unet, fullgraph=True)


def generate(steps: int):
    return pipe(
        options.prompt,
        negative_prompt="blurred",
        height=options.height,
        width=options.width,
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
