"""Mochi without and with First Block Cache:

python cache_examples/run_mochi.py
python cache_examples/run_mochi.py --threshold 0.3 --compile
python cache_examples/run_mochi.py --model genmo/mochi-1-preview \
    --prompt "a cat walks on the grass" --steps 64 --height 480 --width 848 --frames 84 --max-sequence-length 256 --output cat.mp4
"""

from functools import partial

import torch
from diffusers import MochiPipeline
from options import DEVICE, DTYPE, generate_both, parse_options, tiny_pipeline, write_videos

options = parse_options(
    __doc__,
    prompt="a large red circle at the top left, on white",
    steps=8,
    height=48,
    width=80,
    frames=13,
    max_sequence_length=16,
    output="mochi.gif",
)

if options.model is None:
    pipe = tiny_pipeline("mochi")
else:
    pipe = MochiPipeline.from_pretrained(options.model, dtype=DTYPE)
    pipe.vae.enable_tiling()
pipe.to(DEVICE)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)

generate = partial(
    pipe,
    prompt=options.prompt,
    height=options.height,
    width=options.width,
    num_frames=options.frames,
    max_sequence_length=options.max_sequence_length,
    output_type="pil",
)
without, cached = generate_both(pipe, generate, options)
write_videos(without.frames[0], cached.frames[0], options)
