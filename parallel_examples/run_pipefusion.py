"""FLUX.1-dev with PipeFusion (which approximates): each GPU holds consecutive blocks, and all work at the same time.

torchrun --nproc_per_node=4 parallel_examples/run_pipefusion.py
torchrun --nproc_per_node=2 parallel_examples/run_pipefusion.py --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, pipefusion_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
mesh = init_context_parallel_mesh(device, max_pipe_dim_size=dist.get_world_size())
# Without pipefusion=, the mesh gives exact pipeline stages, which wait for each other.
parallelize_pipe(pipe, mesh=mesh, pipefusion=PipeFusion(num_patches=4))
held = sum(x.nbytes for x in pipe.transformer.parameters() if not x.is_meta)
print(f"rank {dist.get_rank()} holds {held / 1e6:.1f} MB of the transformer", flush=True)

image = pipe(
    "a large red circle in the top left on a white background",
    height=options.size,
    width=options.size,
    num_inference_steps=28,
    generator=torch.Generator().manual_seed(0),
).images[0]
if dist.get_rank() == 0:
    print(pipefusion_report(pipe))
    image.save("pipefusion.png")
dist.destroy_process_group()
