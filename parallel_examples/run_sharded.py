"""A pipeline larger than one device, loaded once, of which each rank holds its part:

torchrun --nproc_per_node=2 parallel_examples/run_sharded.py
torchrun --nproc_per_node=8 parallel_examples/run_sharded.py --model black-forest-labs/FLUX.2-dev --weights fsdp
torchrun --nproc_per_node=8 parallel_examples/run_sharded.py --model Qwen/Qwen-Image --weights tensor --tensor 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch.distributed.tensor import DTensor

from para_core import init_context_parallel_mesh
from para_core.adapters import from_pretrained_sharded

# Trained for para_core's own checkout, and found there alone: elsewhere --model is required.
TINY = Path(__file__).absolute().parent.parent / "zoo/flux/pipeline"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default=TINY, required=not TINY.exists(), help="a folder or a name on the Hub; left out: a tiny FLUX"
)
parser.add_argument("--weights", choices=["fsdp", "tensor"], default="fsdp")
parser.add_argument(
    "--tensor", type=int, default=2, help="with --weights tensor: so many ranks share heads, the others tokens"
)
parser.add_argument("--prompt", default="a large red circle at the top left, on white")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", type=Path, default=Path("sharded.png"))
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name in ("steps", "tensor"):
    if getattr(options, name) < 1:
        parser.error(f"--{name} is {getattr(options, name)}; expected a positive integer")
if options.output.suffix not in (".png", ".jpg", ".webp") or not os.access(options.output.absolute().parent, os.W_OK):
    parser.error(f"--output is {options.output}; expected a .png, .jpg or .webp in a folder that can be written to")
if "RANK" not in os.environ:  # set by torchrun
    parser.error("it needs ranks: torchrun --nproc_per_node=N …, one rank per GPU")

dist.init_process_group()
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(dist.get_node_local_rank())

tensor = options.tensor if options.weights == "tensor" else None
mesh = init_context_parallel_mesh("cuda" if cuda else "cpu", max_tensor_dim_size=tensor)
dtype = torch.bfloat16 if cuda else torch.float32
pipe = from_pretrained_sharded(DiffusionPipeline, options.model, mesh=mesh, weights=options.weights, dtype=dtype)

pipe.set_progress_bar_config(disable=dist.get_rank() != 0)
weights = list(pipe.transformer.parameters())
whole = sum(x.numel() * x.element_size() for x in weights)
held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in weights)
print(f"rank {dist.get_rank()} holds {held / 1e6:.1f} of {whole / 1e6:.1f} MB of the transformer", flush=True)

size = {"height": 128, "width": 128, "max_sequence_length": 64} if options.model == TINY else {}
image = pipe(
    options.prompt, num_inference_steps=options.steps, generator=torch.Generator().manual_seed(0), **size
).images[0]
if dist.get_rank() == 0:
    image.save(options.output)
dist.destroy_process_group()
