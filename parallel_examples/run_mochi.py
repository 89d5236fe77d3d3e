"""Mochi on several GPUs, with First Block Cache (which approximates).

torchrun --nproc_per_node=2 parallel_examples/run_mochi.py
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import MochiPipeline
from diffusers.utils import export_to_gif

from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="genmo/mochi-1-preview", help="a name on the Hub, or a folder")
parser.add_argument(
    "--size", type=int, nargs=3, default=(480, 848, 85), help="height, width, frames (6 k + 1)"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = MochiPipeline.from_pretrained(options.model, dtype=dtype).to(device)
pipe.vae.enable_tiling()
parallelize_pipe(pipe)
apply_cache_on_pipe(pipe)  # A larger residual_diff_threshold= skips more steps.

height, width, num_frames = options.size
frames = pipe(
    "a cat walks on the grass",
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=50,
    generator=torch.Generator().manual_seed(0),
).frames[0]
if dist.get_rank() == 0:
    print(cache_report(pipe))
    export_to_gif(frames, "mochi.gif", fps=30)
dist.destroy_process_group()
