"""CogVideoX with First Block Cache, which skips blocks: the result is an approximation.

python cache_examples/run_cogvideox.py
"""

import argparse

import torch
from diffusers import CogVideoXPipeline
from diffusers.utils import export_to_gif

from para_core.adapters import apply_cache_on_pipe, cache_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="THUDM/CogVideoX-5b", help="a name on the Hub, or a folder")
parser.add_argument(
    "--size", type=int, nargs=3, default=(480, 720, 49), help="height, width, frames (4 k + 1)"
)
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = CogVideoXPipeline.from_pretrained(options.model, dtype=dtype).to(device)
# Without residual_diff_threshold=, the threshold is the default of the model family. A larger one skips more steps.
apply_cache_on_pipe(pipe)

height, width, num_frames = options.size
frames = pipe(
    "a cat walks on the grass",
    height=height,
    width=width,
    num_frames=num_frames,
    max_sequence_length=pipe.transformer.config.max_text_seq_length,
    num_inference_steps=50,
    generator=torch.Generator().manual_seed(0),
    output_type="pil",
).frames[0]
export_to_gif(frames, "cogvideox.gif", fps=8)
print(cache_report(pipe))
