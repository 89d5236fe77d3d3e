"""HunyuanVideo without and with First Block Cache:

python cache_examples/run_hunyuan_video.py
python cache_examples/run_hunyuan_video.py --threshold 0.3 --compile
python cache_examples/run_hunyuan_video.py --model hunyuanvideo-community/HunyuanVideo \
    --prompt "a cat walks on the grass" --steps 30 --height 720 --width 1280 --frames 129 --max-sequence-length 256 --output cat.mp4
"""

from functools import partial

import torch
from diffusers import HunyuanVideoPipeline
from options import DEVICE, DTYPE, generate_both, parse_options, tiny_pipeline, write_videos

options = parse_options(
    __doc__,
    prompt="a large red circle at the top left, on white",
    steps=8,
    height=48,
    width=80,
    frames=9,
    max_sequence_length=13,
    output="hunyuan_video.gif",
)

if options.model is None:
    pipe = tiny_pipeline("hunyuan")
else:
    pipe = HunyuanVideoPipeline.from_pretrained(options.model, dtype=DTYPE)
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
