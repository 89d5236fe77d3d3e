"""FLUX.1 without and with First Block Cache:

python cache_examples/run_flux.py
python cache_examples/run_flux.py --threshold 0.3 --compile
python cache_examples/run_flux.py --model black-forest-labs/FLUX.1-dev \
    --prompt "a cat holding a sign" --steps 28 --height 1024 --width 1024 --max-sequence-length 512 --compile
"""

from functools import partial
from pathlib import Path

import torch
from diffusers import FluxPipeline
from options import DEVICE, DTYPE, beside, generate_both, parse_options

options = parse_options(
    __doc__,
    model=str(Path(__file__).parents[1] / "benchmarks/tiny_flux/pipeline"),
    prompt="a large red circle in the centre on a white background",
    steps=28,
    height=128,
    width=128,
    max_sequence_length=64,
    output="flux.png",
)

pipe = FluxPipeline.from_pretrained(options.model, dtype=DTYPE).to(DEVICE)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)

generate = partial(
    pipe,
    prompt=options.prompt,
    height=options.height,
    width=options.width,
    max_sequence_length=options.max_sequence_length,
)
without, cached = generate_both(pipe, generate, options)
without.images[0].save(beside(options.output, "without"))
cached.images[0].save(options.output)
