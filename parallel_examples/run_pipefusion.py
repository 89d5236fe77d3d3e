"""Each rank holds consecutive blocks of FLUX; exact, or, with --patches, all ranks at once on patches of the image (not exact):

torchrun --nproc_per_node=2 parallel_examples/run_pipefusion.py
torchrun --nproc_per_node=2 parallel_examples/run_pipefusion.py --patches 4 --cooldown 2
torchrun --nproc_per_node=4 parallel_examples/run_pipefusion.py --model black-forest-labs/FLUX.1-dev --patches 4
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, pipefusion_report

# Trained for para_core's own checkout, and found there alone: elsewhere --model is required.
TINY = Path(__file__).absolute().parent.parent / "zoo/flux/pipeline"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default=TINY, required=not TINY.exists(), help="a folder or a name on the Hub; left out: a tiny FLUX"
)
parser.add_argument("--patches", type=int, default=0, help="of the image; 0: one stage after the other, exactly")
parser.add_argument("--warmup", type=int, default=1, help="first steps that are exact")
parser.add_argument("--cooldown", type=int, default=0, help="last steps that are exact")
parser.add_argument("--prompt", default="a large red circle at the top left, on white")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", type=Path, default=Path("pipefusion.png"))
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
if options.steps < 1:
    parser.error(f"--steps is {options.steps}; expected a positive integer")
try:
    patches = PipeFusion(options.patches, options.warmup, options.cooldown) if options.patches else None
except ValueError as error:
    parser.error(str(error))
if options.output.suffix not in (".png", ".jpg", ".webp") or not os.access(options.output.absolute().parent, os.W_OK):
    parser.error(f"--output is {options.output}; expected a .png, .jpg or .webp in a folder that can be written to")
if "RANK" not in os.environ:  # set by torchrun
    parser.error("it needs ranks: torchrun --nproc_per_node=N …, one rank per GPU")

dist.init_process_group()
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(dist.get_node_local_rank())
device = "cuda" if cuda else "cpu"

pipe = FluxPipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16 if cuda else torch.float32).to(device)
mesh = init_context_parallel_mesh(device, max_pipe_dim_size=dist.get_world_size())
pipe.set_progress_bar_config(disable=dist.get_rank() != 0)
parallelize_pipe(pipe, mesh=mesh, pipefusion=patches)

held = sum(x.nbytes for x in pipe.transformer.parameters() if not x.is_meta)
print(f"rank {dist.get_rank()} holds {held / 1e6:.1f} MB of the transformer", flush=True)

size = {"height": 128, "width": 128, "max_sequence_length": 64} if options.model == TINY else {}
image = pipe(
    options.prompt, num_inference_steps=options.steps, generator=torch.Generator().manual_seed(0), **size
).images[0]
if dist.get_rank() == 0:
    image.save(options.output)
    if patches is not None:
        print(pipefusion_report(pipe))
dist.destroy_process_group()
