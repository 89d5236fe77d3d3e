"""FLUX.1 on one device, or on several:

python parallel_examples/run_flux.py
torchrun --nproc_per_node=2 parallel_examples/run_flux.py --ring 2
torchrun --nproc_per_node=4 parallel_examples/run_flux.py --model black-forest-labs/FLUX.1-dev \
    --prompt "a cat holding a sign" --steps 28 --height 1024 --width 1024 --max-sequence-length 512 --compile
"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from options import parse_options, start_ranks, timed

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
ranks = start_ranks(options)

pipe = FluxPipeline.from_pretrained(options.model, dtype=ranks.dtype).to(ranks.device)
pipe.set_progress_bar_config(disable=ranks.rank != 0)
parallelize_pipe(pipe, mesh=ranks.mesh, vae=options.parallel_vae)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)

generate = partial(
    pipe,
    prompt=options.prompt,
    height=options.height,
    width=options.width,
    max_sequence_length=options.max_sequence_length,
)
image = timed(generate, options, ranks).images[0]
if ranks.rank == 0:
    image.save(options.output)
if ranks.mesh is not None:
    dist.destroy_process_group()
