"""FLUX.1 without and with First Block Cache:

python cache_examples/run_flux.py
python cache_examples/run_flux.py --threshold 0.3 --compile
python cache_examples/run_flux.py --model black-forest-labs/FLUX.1-dev \
    --prompt "a cat holding a sign" --steps 28 --height 1024 --width 1024 --max-sequence-length 512 --compile
"""

import argparse
import os
import statistics
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from diffusers import FluxPipeline

from para_core.adapters import apply_cache_on_pipe, cache_report

# Trained for para_core's own checkout, and found there alone: elsewhere --model is required.
TINY = Path(__file__).absolute().parent.parent / "zoo/flux/pipeline"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default=TINY, required=not TINY.exists(), help="a folder or a name on the Hub; left out: a tiny FLUX"
)
parser.add_argument("--prompt", default="a large red circle in the centre on a white background")
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--height", type=int, default=128, help="pixels")
parser.add_argument("--width", type=int, default=128, help="pixels")
parser.add_argument("--max-sequence-length", type=int, default=64, help="text tokens")
parser.add_argument("--threshold", type=float, help="larger is faster; left out: the default of the model's family")
parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
parser.add_argument("--runs", type=int, default=3, help="the times are medians of so many")
parser.add_argument("--output", type=Path, default=Path("flux.png"), help="the other is beside it: …_without.png")
parser.add_argument("--plot", type=Path, help="an image of what each step did; needs matplotlib")
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name, value in vars(options).items():
    if type(value) is int and value < 1:
        parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
if options.height % 16 or options.width % 16:
    parser.error(f"--height {options.height} --width {options.width}; expected multiples of 16")
if options.threshold is not None and not options.threshold >= 0:
    parser.error(f"--threshold is {options.threshold:g}; expected 0 (skips nothing) or more")
for path, kinds in ((options.output, (".png", ".jpg", ".webp")), (options.plot, (".png", ".svg", ".pdf"))):
    if path and (path.suffix not in kinds or not os.access(path.absolute().parent, os.W_OK)):
        parser.error(f"{path}: expected a {' or '.join(kinds)} in a folder that can be written to")
if options.plot and not find_spec("matplotlib"):
    parser.error(f"--plot is {options.plot}; a plot needs pip install matplotlib")

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)


def generate(steps: int):
    return pipe(
        options.prompt,
        height=options.height,
        width=options.width,
        max_sequence_length=options.max_sequence_length,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
    ).images[0]


def timed():
    """The image, and the median of the runs' seconds."""
    generate(steps=2)  # compiles and allocates
    seconds = []
    for _ in range(options.runs):
        start = time.perf_counter()
        image = generate(options.steps)
        seconds.append(time.perf_counter() - start)
    return image, statistics.median(seconds)


image_without, seconds_without = timed()
apply_cache_on_pipe(pipe, residual_diff_threshold=options.threshold)
image, seconds = timed()

image_without.save(options.output.with_stem(f"{options.output.stem}_without"))
image.save(options.output)
report = cache_report(pipe)
print(report)
if options.plot:
    report.plot(options.plot)
print(
    f"without the cache {seconds_without:.2f} s, with it {seconds:.2f} s: {seconds_without / seconds:.2f} × "
    f"(medians of {options.runs}); {options.output}"
)
