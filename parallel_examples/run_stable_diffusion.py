"""Stable Diffusion XL on one device, or on several, which share the rows of the image:

python parallel_examples/run_stable_diffusion.py
torchrun --nproc_per_node=2 parallel_examples/run_stable_diffusion.py --parallel-vae
torchrun --nproc_per_node=4 parallel_examples/run_stable_diffusion.py --model stabilityai/stable-diffusion-xl-base-1.0 \
    --prompt "a cat holding a sign" --steps 30 --height 1024 --width 1024 --batch 2 --parallel-vae
"""

from functools import partial

import torch
import torch.distributed as dist
from diffusers import AutoPipelineForText2Image
from options import parse_options, start_ranks, timed, tiny_pipeline

from para_core.adapters import parallelize_pipe

options = parse_options(
    __doc__,
    prompt="a large red circle at the top left, on white",
    steps=4,
    height=136,
    width=88,
    output="stable_diffusion.png",
)
ranks = start_ranks(options)

if options.model is None:
    pipe = tiny_pipeline("xl", ranks.rank)
else:
    pipe = AutoPipelineForText2Image.from_pretrained(options.model, torch_dtype=ranks.dtype).to(ranks.device)
pipe.set_progress_bar_config(disable=ranks.rank != 0)
if options.compile:
    pipe.unet = torch.compile(pipe.unet, fullgraph=True)  # on one device; parallelize_pipe refuses it
# --batch 2: half of the ranks for each branch of guidance; all others share rows.
parallelize_pipe(pipe, mesh=ranks.mesh, vae=options.parallel_vae)

generate = partial(pipe, prompt=options.prompt, negative_prompt="blurred", height=options.height, width=options.width)
image = timed(generate, options, ranks).images[0]
if ranks.rank == 0:
    image.save(options.output)
if ranks.mesh is not None:
    dist.destroy_process_group()
