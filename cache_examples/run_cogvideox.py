"""CogVideoX without and with First Block Cache:

python cache_examples/run_cogvideox.py
python cache_examples/run_cogvideox.py --threshold 0.3 --compile
python cache_examples/run_cogvideox.py --model THUDM/CogVideoX-5b \
    --prompt "a cat walks on the grass" --steps 50 --height 480 --width 720 --frames 49 --max-sequence-length 226 --output cat.mp4
"""

import argparse
import os
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline
from diffusers.utils import export_to_gif, export_to_video

from para_core.adapters import apply_cache_on_pipe, cache_report

# para_core's own checkout has tiny pipelines with random weights; elsewhere --model is required.
CHECKOUT = Path(__file__).absolute().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model",
    required=not (CHECKOUT / "zoo/tiny/pipelines/registry.py").exists(),
    help="a folder or a name on the Hub; left out: a tiny one with random weights, whose video is noise",
)
parser.add_argument("--prompt", default="a large red circle at the top left, on white")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--height", type=int, default=48, help="pixels")
parser.add_argument("--width", type=int, default=80, help="pixels")
parser.add_argument("--frames", type=int, default=9)
parser.add_argument("--fps", type=int, default=16, help="frames per second of the video")
parser.add_argument("--max-sequence-length", type=int, default=13, help="text tokens")
parser.add_argument("--threshold", type=float, help="larger is faster; left out: the default of the model's family")
parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
parser.add_argument("--runs", type=int, default=3, help="the times are medians of so many")
parser.add_argument("--output", type=Path, default=Path("cogvideox.gif"), help="the other is beside it: …_without.gif")
parser.add_argument("--plot", type=Path, help="an image of what each step did; needs matplotlib")
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name, value in vars(options).items():
    if type(value) is int and value < 1:
        parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive integer")
if options.height % 16 or options.width % 16 or options.frames % 4 != 1:
    parser.error(
        f"--height {options.height} --width {options.width} --frames {options.frames}; expected multiples of 16, and 4 k + 1 frames"
    )
if options.threshold is not None and not options.threshold >= 0:
    parser.error(f"--threshold is {options.threshold:g}; expected 0 (skips nothing) or more")
for path, kinds in ((options.output, (".gif", ".mp4")), (options.plot, (".png", ".svg", ".pdf"))):
    if path and (path.suffix not in kinds or not os.access(path.absolute().parent, os.W_OK)):
        parser.error(f"{path}: expected a {' or '.join(kinds)} in a folder that can be written to")
if options.output.suffix == ".mp4" and not all(map(find_spec, ("imageio", "imageio_ffmpeg"))):
    parser.error(f"--output is {options.output}; an .mp4 needs pip install imageio imageio-ffmpeg, a .gif does not")
if options.plot and not find_spec("matplotlib"):
    parser.error(f"--plot is {options.plot}; a plot needs pip install matplotlib")

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
if options.model is None:
    sys.path.insert(0, str(CHECKOUT))
    from zoo.tiny.pipelines.registry import PIPELINES

    pipe = PIPELINES["cogvideox"].build()
else:
    pipe = CogVideoXPipeline.from_pretrained(options.model, dtype=dtype)
    pipe.vae.enable_tiling()
pipe.to(device)
if options.compile:
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)


def generate(steps: int):
    return pipe(
        prompt=options.prompt,
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        max_sequence_length=options.max_sequence_length,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="pil",
    ).frames[0]


def timed():
    """The frames, and the median of the runs' seconds."""
    generate(steps=2)  # compiles and allocates
    seconds = []
    for _ in range(options.runs):
        start = time.perf_counter()
        frames = generate(options.steps)
        seconds.append(time.perf_counter() - start)
    return frames, statistics.median(seconds)


def write(frames: list, path: Path) -> None:
    export = export_to_gif if path.suffix == ".gif" else export_to_video
    export(frames, str(path), fps=options.fps)


frames_without, seconds_without = timed()
apply_cache_on_pipe(pipe, residual_diff_threshold=options.threshold)
frames, seconds = timed()

write(frames_without, options.output.with_stem(f"{options.output.stem}_without"))
write(frames, options.output)
report = cache_report(pipe)
print(report)
if options.plot:
    report.plot(options.plot)
print(
    f"without the cache {seconds_without:.2f} s, with it {seconds:.2f} s: {seconds_without / seconds:.2f} × "
    f"(medians of {options.runs}); {options.output}"
)
