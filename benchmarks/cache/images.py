"""Images and figures of First Block Cache on the tiny FLUX:  python -m benchmarks.cache.images

Generates one caption with several thresholds, and saves the images of docs/cache.md: the differences from step to step,
the images beside the one without the cache, and the curve of a calibration over several captions.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from diffusers import FluxPipeline
from diffusers.utils import logging

from benchmarks.harness import parser_of, write_results
from para_core.adapters import apply_cache_on_pipe, cache_report, calibrate_cache, remove_cache_from_pipe
from para_core.adapters.cache.calibration.image_metrics import as_images, load_metric
from zoo.flux import PIPELINE

SEED = 5  # as in the demo
PROMPT = "a large red circle on the left and a small blue triangle in the bottom right on a striped background"
PROMPTS = (
    PROMPT,
    "a small blue square at the top left on a black background",
    "a large green triangle at the bottom on a grey background",
    "a small yellow ring at the right on a striped background",
)
CALL = {"num_inference_steps": 28, "height": 128, "width": 128, "max_sequence_length": 64}
THRESHOLDS = (0.08, 0.2, 0.3, 0.4)
AMPLIFIED = 5


def generate(pipe: FluxPipeline) -> np.ndarray:
    """Return ``[1, H, W, 3]`` in 0 … 1."""
    generator = torch.Generator().manual_seed(SEED)
    images: np.ndarray = pipe(PROMPT, generator=generator, output_type="np", **CALL).images
    return images


def save_images(images: dict[str, np.ndarray], path: Path) -> None:
    """Save the images, and below each its difference from the first."""
    reference = next(iter(images.values()))
    figure, axes = plt.subplots(2, len(images), figsize=(2.6 * len(images), 5.6))
    for (name, image), (above, below) in zip(images.items(), axes.T, strict=True):
        above.imshow(image[0])
        above.set_title(name, fontsize=9)
        below.imshow(np.clip(np.abs(image - reference)[0] * AMPLIFIED, 0, 1))
        below.set_title("the reference" if image is reference else f"difference × {AMPLIFIED}", fontsize=9)
        above.axis("off")
        below.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    """Generate, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where the images go")
    parser.add_argument("--record", action="store_true", help="also write benchmarks/results/cache_images.json")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    # A threshold that skips all it can is one of those shown.
    warnings.filterwarnings("ignore", message="the cache of the")
    logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    images = {"without the cache": generate(pipe)}
    reference = as_images(images["without the cache"])
    psnr, ssim = load_metric("psnr"), load_metric("ssim")
    rows: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold, forecast_order=0)
        image = generate(pipe)
        report = cache_report(pipe)
        found = [as_images(image)]
        rows.append(
            {
                "threshold": threshold,
                "computed": report.computed,
                "psnr": psnr(found, [reference]),
                "ssim": ssim(found, [reference]),
            }
        )
        images[f"{threshold:g}: {report.computed} of {len(report.rows)} computed"] = image
        print(rows[-1])
        if threshold == THRESHOLDS[1]:
            print(report)
            report.plot(options.folder / "cache_steps.png")
    save_images(images, options.folder / "cache_images.png")

    remove_cache_from_pipe(pipe)
    calibration = calibrate_cache(pipe, PROMPTS, target=40.0, **CALL)
    print(calibration)
    calibration.plot(options.folder / "cache_calibration.png")
    if options.record:
        calibrated = [
            {"threshold": row.threshold, **row.metrics, "computed": row.computed, "steps": row.steps}
            for row in calibration.rows[1:]
        ]
        results = {"settings": {"prompt": PROMPT, "prompts": PROMPTS, **CALL}, "rows": rows, "calibration": calibrated}
        print(f"the figures: {write_results('cache_images', results, 'diffusers', 'scikit-image')}")


if __name__ == "__main__":
    main()
