"""FLUX.1-dev with First Block Cache, which skips blocks: the result is an approximation.

python cache_examples/run_flux.py
python cache_examples/run_flux.py --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse

import torch
from diffusers import FluxPipeline

from para_core.adapters import apply_cache_on_pipe, cache_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
# Without residual_diff_threshold=, the threshold is the default of the model family. A larger one skips more steps.
apply_cache_on_pipe(pipe)

image = pipe(
    "a large red circle in the centre on a white background",
    height=options.size,
    width=options.size,
    num_inference_steps=28,
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save("flux.png")
print(cache_report(pipe))
