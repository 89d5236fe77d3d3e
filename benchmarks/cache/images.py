"""Images of First Block Cache on the tiny FLUX:  python -m benchmarks.cache.images

Generates one caption with several thresholds, and saves the images of docs/cache.md: the differences from step to step,
and the images next to the one without the cache.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers import FluxPipeline

from benchmarks.cache.judged import psnr
from benchmarks.cache.ways import SIDE, TEXT_TOKENS, load
from benchmarks.harness import parser_of
from para_core.adapters import apply_cache_on_pipe, cache_report

SEED = 5  # Of eight seeds that a person compared, this one gave the roundest circle. The checker accepts all eight.
PROMPT = "a large red circle on the left and a small blue triangle in the bottom right on a striped background"
CALL = {"num_inference_steps": 28, "height": SIDE, "width": SIDE, "max_sequence_length": TEXT_TOKENS}
THRESHOLDS = (0.08, 0.2, 0.3, 0.4)


def generate(pipe: FluxPipeline) -> np.ndarray:
    """Return an image ``[1, H, W, 3]`` in 0 … 1."""
    generator = torch.Generator().manual_seed(SEED)
    images: np.ndarray = pipe(PROMPT, generator=generator, output_type="np", **CALL).images
    return images


def save_images(images: dict[str, np.ndarray], path: Path, *, amplified: int) -> None:
    """Save images ``[1, H, W, 3]`` in 0 … 1, and below each its ``amplified`` difference from the first."""
    reference = next(iter(images.values()))
    figure, axes = plt.subplots(2, len(images), figsize=(3 * len(images), 6.6))
    for (name, image), (above, below) in zip(images.items(), axes.T, strict=True):
        above.imshow(image[0])
        above.set_title(name, fontsize=10)
        below.imshow(np.clip(np.abs(image - reference)[0] * amplified, 0, 1))
        below.set_title("the reference" if image is reference else f"difference × {amplified:,}", fontsize=10)
        above.axis("off")
        below.axis("off")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Generate, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where the images go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    # One of the shown thresholds skips every step that it may.
    warnings.filterwarnings("ignore", message="the cache of the")
    pipe = load()
    reference = generate(pipe)
    images = {"without the cache": reference}
    for threshold in THRESHOLDS:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold, forecast_order=0)
        image, report = generate(pipe), cache_report(pipe)
        decibels = f"PSNR {psnr(image[0], reference[0]):.1f} dB"
        print(f"threshold {threshold:g}: {decibels}")
        images[f"{threshold:g}: {report.computed} of {len(report.rows)} computed, {decibels}"] = image
        if threshold == THRESHOLDS[1]:
            print(report)
            report.plot(folder / "cache_steps.png")
    save_images(images, folder / "cache_images.png", amplified=5)


if __name__ == "__main__":
    main()
