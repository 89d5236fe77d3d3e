"""An image or a clip through the VAE, on one device or on several:

python parallel_examples/run_vae.py
torchrun --nproc_per_node=2 parallel_examples/run_vae.py
torchrun --nproc_per_node=4 parallel_examples/run_vae.py --model black-forest-labs/FLUX.1-dev --image photo.png --output back.png
torchrun --nproc_per_node=4 parallel_examples/run_vae.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --frames 81
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from para_core.adapters import parallelize_vae

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", help="a repository with a folder vae/; left out: a small AutoencoderKL with random weights"
)
parser.add_argument("--image", type=Path, help="left out: noise")
parser.add_argument("--height", type=int, default=256, help="pixels")
parser.add_argument("--width", type=int, default=256, help="pixels")
parser.add_argument("--frames", type=int, help="a clip of so many copies of the image, for a VAE of videos")
parser.add_argument("--method", choices=["exact", "tiled"], default="exact")
parser.add_argument("--runs", type=int, default=3, help="the times are medians of so many")
parser.add_argument("--output", type=Path, default=Path("vae.png"))
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name in ("height", "width", "frames", "runs"):
    value = getattr(options, name)
    if value is not None and value < 1:
        parser.error(f"--{name} is {value}; expected a positive integer")
if options.height % 8 or options.width % 8:
    parser.error(f"--height {options.height} --width {options.width}; expected multiples of 8")
if options.frames is not None and options.model is None:
    parser.error(f"--frames {options.frames} needs the VAE of a video model: --model")
if options.image is not None and not options.image.is_file():
    parser.error(f"--image is {options.image}; there is no such file")
if options.output.suffix not in (".png", ".jpg", ".webp") or not os.access(options.output.absolute().parent, os.W_OK):
    parser.error(f"--output is {options.output}; expected a .png, .jpg or .webp in a folder that can be written to")

device = "cuda" if torch.cuda.is_available() else "cpu"
if "RANK" in os.environ:  # set by torchrun
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())

torch.manual_seed(0)  # the same image, and the same random weights, on every rank
if options.model is None:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    vae = diffusers.AutoencoderKL(block_out_channels=(32, 64, 64), latent_channels=4, **blocks)
else:
    vae = diffusers.AutoModel.from_pretrained(options.model, subfolder="vae", torch_dtype=torch.bfloat16)
vae.to(device).eval()
parallelize_vae(vae, method=options.method)

if options.image is None:
    pixels = torch.rand(3, options.height, options.width)
else:
    image = Image.open(options.image).convert("RGB").resize((options.width, options.height))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
x = (2 * pixels - 1)[None].to(device, vae.dtype)
if options.frames is not None:
    x = x[:, :, None].expand(-1, -1, options.frames, -1, -1).contiguous()


def timed(function):
    """What ``function()`` gives, and the median of the runs' seconds."""
    seconds = []
    for _ in range(options.runs):
        start = time.perf_counter()
        result = function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


with torch.no_grad():
    latents, encoding = timed(lambda: vae.encode(x).latent_dist.mean)
    back, decoding = timed(lambda: vae.decode(latents).sample)

if not dist.is_initialized() or dist.get_rank() == 0:
    print(f"{list(x.shape)}: encoded in {encoding:.2f} s, decoded in {decoding:.2f} s, medians of {options.runs}")
    image = back[0, :, 0] if options.frames is not None else back[0]
    array = ((image.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(array).save(options.output)
if dist.is_initialized():
    dist.destroy_process_group()
