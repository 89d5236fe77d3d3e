"""FLUX.2-dev on GPUs that are too small for all its weights: each GPU loads and keeps a shard of them (FSDP2).

torchrun --nproc_per_node=8 parallel_examples/run_sharded.py
torchrun --nproc_per_node=2 parallel_examples/run_sharded.py --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch.distributed.tensor import DTensor

from para_core.adapters import from_pretrained_sharded

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.2-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

# With weights="tensor", ranks would instead hold some heads and some rows of the MLPs, and send activations instead of
# weights.
pipe = from_pretrained_sharded(DiffusionPipeline, options.model, weights="fsdp", dtype=dtype)
weights = list(pipe.transformer.parameters())
whole = sum(x.numel() * x.element_size() for x in weights)
held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in weights)
print(f"rank {dist.get_rank()} holds {held / 1e6:.1f} of {whole / 1e6:.1f} MB of the transformer", flush=True)

image = pipe(
    "a large red circle in the top left on a white background",
    height=options.size,
    width=options.size,
    num_inference_steps=28,
    generator=torch.Generator().manual_seed(0),
).images[0]
if dist.get_rank() == 0:
    image.save("sharded.png")
dist.destroy_process_group()
