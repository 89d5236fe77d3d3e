"""Wan 2.1 or 2.2 on several GPUs with CFG parallelism: one half of the GPUs for each CFG branch.

torchrun --nproc_per_node=4 parallel_examples/run_wan.py
torchrun --nproc_per_node=2 parallel_examples/run_wan.py --model zoo/video/pipeline --size 64 64 17  # on CPUs
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from diffusers.utils import export_to_gif

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default="Wan-AI/Wan2.1-T2V-14B-Diffusers", help="a name on the Hub, or a folder"
)
parser.add_argument(
    "--size", type=int, nargs=3, default=(480, 832, 81), help="height, width, frames (4 k + 1)"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = WanPipeline.from_pretrained(options.model, dtype=dtype).to(device)
parallelize_pipe(pipe, mesh=init_context_parallel_mesh(device, max_batch_dim_size=2))

height, width, num_frames = options.size
frames = pipe(
    "a red circle moving up left on a white background",
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=30,
    generator=torch.Generator().manual_seed(0),
    output_type="pil",
).frames[0]
if dist.get_rank() == 0:
    export_to_gif(frames, "wan.gif", fps=16)
dist.destroy_process_group()
