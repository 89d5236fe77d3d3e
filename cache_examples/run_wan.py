"""Wan 2.1 or 2.2 with First Block Cache, which skips blocks: the result is an approximation.

python cache_examples/run_wan.py
python cache_examples/run_wan.py --model zoo/video/pipeline --size 64 64 17  # on CPUs
"""

import argparse

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_gif

from para_core.adapters import apply_cache_on_pipe, cache_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="a name on the Hub, or a folder"
)
parser.add_argument(
    "--size", type=int, nargs=3, default=(480, 832, 81), help="height, width, frames (4 k + 1)"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = WanPipeline.from_pretrained(options.model, dtype=dtype).to(device)
# Without residual_diff_threshold=, the threshold is the default of the model family. A larger one skips more steps.
apply_cache_on_pipe(pipe)

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
export_to_gif(frames, "wan.gif", fps=16)
print(cache_report(pipe))
