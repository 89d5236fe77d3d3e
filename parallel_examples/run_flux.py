"""FLUX.1 on one device, or on several:

python parallel_examples/run_flux.py
torchrun --nproc_per_node=2 parallel_examples/run_flux.py --ring 2
torchrun --nproc_per_node=4 parallel_examples/run_flux.py --model black-forest-labs/FLUX.1-dev \
    --prompt "a cat holding a sign" --steps 28 --height 1024 --width 1024 --max-sequence-length 512 --compile
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from diffusers import FluxPipeline
from diffusers.utils import logging
from options import parse_options

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

options = parse_options(
    __doc__,
    model=str(Path(__file__).parents[1] / "benchmarks/tiny_flux/pipeline"),
    prompt="a large red circle in the centre on a white background",
    steps=20,
    height=128,
    width=128,
    max_sequence_length=64,
    output="flux.png",
)
device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
mesh, rank, shape = None, 0, "1 rank"
if "RANK" in os.environ:  # set by torchrun
    dist.init_process_group()
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_context_parallel_mesh(device, max_ring_dim_size=options.ring, max_ulysses_dim_size=options.ulysses)
    shape = f"{mesh.size()} ranks, ring {mesh['ring'].size()} × ulysses {mesh['ulysses'].size()}"

# One progress bar, rank 0's: of the steps, not of loading.
logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
pipe.set_progress_bar_config(disable=rank != 0)
parallelize_pipe(pipe, mesh=mesh)

call = {
    "prompt": options.prompt,
    "height": options.height,
    "width": options.width,
    "max_sequence_length": options.max_sequence_length,
}
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)
    pipe(**call, num_inference_steps=1, output_type="latent")

start = time.perf_counter()
generator = torch.Generator(device).manual_seed(options.seed)
image = pipe(**call, num_inference_steps=options.steps, generator=generator).images[0]
seconds = time.perf_counter() - start
if rank == 0:
    image.save(options.output)
    print(
        f"{shape}: {options.steps} steps in {seconds:.2f} s, {seconds / options.steps:.3f} s per step; {options.output}"
    )
if mesh is not None:
    dist.destroy_process_group()
