"""FLUX.1-dev on several GPUs.

torchrun --nproc_per_node=2 parallel_examples/run_flux.py
torchrun --nproc_per_node=2 parallel_examples/run_flux.py --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core.adapters import parallelize_pipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
# All ranks take part, in the mesh that is predicted to be fastest.
parallelize_pipe(pipe)
# Optional: compile the transformer into one graph. Compiling takes time, so it pays off from the second image on.
# pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)

image = pipe(
    "a large red circle in the centre on a white background",
    height=options.size,
    width=options.size,
    num_inference_steps=28,
    generator=torch.Generator().manual_seed(0),
).images[0]
if dist.get_rank() == 0:
    image.save("flux.png")
dist.destroy_process_group()
