"""Stable Diffusion XL on several GPUs. Each holds some of the image rows in the UNet and in the VAE.

torchrun --nproc_per_node=2 parallel_examples/run_stable_diffusion.py
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import AutoPipelineForText2Image

from para_core.adapters import parallelize_pipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default="stabilityai/stable-diffusion-xl-base-1.0", help="a name on the Hub, or a folder"
)
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = AutoPipelineForText2Image.from_pretrained(options.model, dtype=dtype).to(device)
parallelize_pipe(pipe, vae=True)

image = pipe(
    "a large red circle in the top left on a white background",
    height=options.size,
    width=options.size,
    num_inference_steps=30,
    generator=torch.Generator().manual_seed(0),
).images[0]
if dist.get_rank() == 0:
    image.save("stable_diffusion.png")
dist.destroy_process_group()
