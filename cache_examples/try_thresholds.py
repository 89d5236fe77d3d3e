"""Several thresholds of First Block Cache on FLUX.1-dev: steps computed, speed, and difference from the uncached image.

python cache_examples/try_thresholds.py
python cache_examples/try_thresholds.py --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse
import math
import time

import torch
from diffusers import FluxPipeline

from para_core.adapters import apply_cache_on_pipe, cache_report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
parser.add_argument("--steps", type=int, default=28, help="number of inference steps")
parser.add_argument("--thresholds", type=float, nargs="+", default=(0.05, 0.1, 0.2, 0.4))
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
pipe.set_progress_bar_config(disable=True)


def generate():
    """Return the image as a float32 tensor with values in 0 … 1, and the seconds that it took."""
    start = time.perf_counter()
    image = pipe(
        "a large red circle in the centre on a white background",
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images[0]
    return image.float().cpu(), time.perf_counter() - start


def psnr(image, reference):
    """Return the peak signal-to-noise ratio in dB; infinity for equal images."""
    error = (image - reference).square().mean().item()
    return -10 * math.log10(error) if error else math.inf


generate()  # The first call also allocates memory, so it is not timed.
reference, seconds = generate()
print(f"without the cache: {seconds:.2f} s")
for threshold in options.thresholds:
    apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
    image, cached_seconds = generate()
    report = cache_report(pipe)
    print(
        f"threshold {threshold:g}: {len(report.rows) - report.computed} of {len(report.rows)} steps skipped, "
        f"{seconds / cached_seconds:.2f} times as fast, PSNR {psnr(image, reference):.1f} dB"
    )
