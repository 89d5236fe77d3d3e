"""Wan 2.1 or 2.2 on one device, or on several:

python parallel_examples/run_wan.py
torchrun --nproc_per_node=4 parallel_examples/run_wan.py --batch 2
torchrun --nproc_per_node=4 parallel_examples/run_wan.py --model Wan-AI/Wan2.2-T2V-A14B-Diffusers \
    --prompt "a cat walks on the grass" --steps 40 --height 720 --width 1280 --frames 81 --max-sequence-length 512 --batch 2 --output cat.mp4
"""

from functools import partial

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from options import parse_options, start_ranks, timed, tiny_pipeline, write_video

from para_core.adapters import parallelize_pipe

options = parse_options(
    __doc__,
    prompt="a large red circle at the top left, on white",
    steps=4,
    height=48,
    width=80,
    frames=9,
    max_sequence_length=13,
    output="wan.gif",
)
ranks = start_ranks(options)

if options.model is None:
    pipe = tiny_pipeline("wan", ranks.rank)
else:
    pipe = WanPipeline.from_pretrained(options.model, dtype=ranks.dtype)
    pipe.vae.enable_tiling()
pipe.to(ranks.device).set_progress_bar_config(disable=ranks.rank != 0)
parallelize_pipe(pipe, mesh=ranks.mesh, vae=options.parallel_vae)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)
    if pipe.transformer_2 is not None:
        pipe.transformer_2 = torch.compile(pipe.transformer_2, fullgraph=True)

generate = partial(
    pipe,
    prompt=options.prompt,
    height=options.height,
    width=options.width,
    num_frames=options.frames,
    max_sequence_length=options.max_sequence_length,
    output_type="pil",
)
frames = timed(generate, options, ranks).frames[0]
if ranks.rank == 0:
    write_video(frames, options)
if ranks.mesh is not None:
    dist.destroy_process_group()
