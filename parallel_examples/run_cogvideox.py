"""CogVideoX on several GPUs. The VAE also runs on all GPUs, each with some of the image rows.

torchrun --nproc_per_node=2 parallel_examples/run_cogvideox.py
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import CogVideoXPipeline
from diffusers.utils import export_to_gif

from para_core.adapters import parallelize_pipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="THUDM/CogVideoX-5b", help="a name on the Hub, or a folder")
parser.add_argument(
    "--size", type=int, nargs=3, default=(480, 720, 49), help="height, width, frames (4 k + 1)"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = CogVideoXPipeline.from_pretrained(options.model, dtype=dtype).to(device)
parallelize_pipe(pipe, vae=True)

height, width, num_frames = options.size
frames = pipe(
    "a cat walks on the grass",
    height=height,
    width=width,
    num_frames=num_frames,
    max_sequence_length=pipe.transformer.config.max_text_seq_length,
    generator=torch.Generator().manual_seed(0),
).frames[0]
if dist.get_rank() == 0:
    export_to_gif(frames, "cogvideox.gif", fps=8)
dist.destroy_process_group()
