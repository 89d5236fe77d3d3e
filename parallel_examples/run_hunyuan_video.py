"""HunyuanVideo on several GPUs, with an explicit mesh: a ring of 2, and Ulysses over the remaining GPUs.

torchrun --nproc_per_node=4 parallel_examples/run_hunyuan_video.py
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import HunyuanVideoPipeline
from diffusers.utils import export_to_gif

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default="hunyuanvideo-community/HunyuanVideo", help="a name on the Hub, or a folder"
)
parser.add_argument(
    "--size", type=int, nargs=3, default=(720, 1280, 129), help="height, width, frames (4 k + 1)"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = HunyuanVideoPipeline.from_pretrained(options.model, dtype=dtype).to(device)
pipe.vae.enable_tiling()
parallelize_pipe(pipe, mesh=init_context_parallel_mesh(device, max_ring_dim_size=2))

height, width, num_frames = options.size
frames = pipe(
    "a cat walks on the grass",
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=30,
    generator=torch.Generator().manual_seed(0),
).frames[0]
if dist.get_rank() == 0:
    export_to_gif(frames, "hunyuan_video.gif", fps=15)
dist.destroy_process_group()
