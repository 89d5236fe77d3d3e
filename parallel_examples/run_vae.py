"""Encode and decode an image with a VAE on several GPUs, each with some of the image rows.

torchrun --nproc_per_node=2 parallel_examples/run_vae.py photo.png
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import AutoModel
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from para_core.adapters import parallelize_vae

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("image", help="a file; its sides are rounded down to multiples of 8 pixels")
parser.add_argument(
    "--model", default="black-forest-labs/FLUX.1-dev", help="a repository or folder that has a vae/"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

vae = AutoModel.from_pretrained(options.model, subfolder="vae", dtype=dtype).to(device)
parallelize_vae(vae)

processor = VaeImageProcessor(vae_scale_factor=8)
pixels = processor.preprocess(Image.open(options.image).convert("RGB")).to(device, dtype)
with torch.no_grad():
    back = vae.decode(vae.encode(pixels).latent_dist.mean).sample
if dist.get_rank() == 0:
    processor.postprocess(back.float())[0].save("vae.png")
dist.destroy_process_group()
