"""The trained models' images and clips, on one rank, on several and cached, with differences amplified.

    python -m benchmarks.demo.gallery

Writes docs/images/gallery_images.png, docs/images/gallery_clips.gif, benchmarks/results/gallery.json
(docs/measured/cache_quality.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from benchmarks.cache.ways import load, load_wan
from benchmarks.harness import ROOT, markdown_table, measure_on_ranks, parser_of, read_results, write_results
from para_core import init_context_parallel_mesh
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe

IMAGES, CLIPS = ROOT / "docs/images/gallery_images.png", ROOT / "docs/images/gallery_clips.gif"
SEED, STEPS = 5, 20
CAPTIONS = {
    "flux": (
        "a large red circle left of a small blue cross on a white background",
        "a small cyan square in the top left and a large pink ring on the right on a striped background",
        "a large green triangle at the bottom on a black background",
        (
            "a small yellow ring on the right, a large purple cross on the left and a small orange circle at the top "
            "on a grey background"
        ),
    ),
    "wan": (
        "a red circle moving up left on a white background",
        "a blue square moving right on a white background",
        "a green triangle moving down on a white background",
    ),
}
# Each way has a name, ranks, a mesh, and a threshold of the cache.
WAYS: tuple[tuple[str, int, dict[str, int], float | None], ...] = (
    ("1 rank", 1, {}, None),
    ("2 ranks", 2, {}, None),
    ("2 ranks, ring", 2, {"max_ring_dim_size": 2}, None),
    ("cached", 1, {}, 0.12),
)
# The shown differences from one rank are multiplied by these factors.
AMPLIFIED = {"2 ranks": 1_000_000, "2 ranks, ring": 1_000_000, "cached": 10}


def generate(pipe: Any, model: str, caption: str) -> np.ndarray:
    """Return ``[frames, H, W, 3]`` in 0 … 1. An image is one frame."""
    generator = torch.Generator().manual_seed(SEED)
    if model == "flux":
        sizes = {"height": 128, "width": 128, "max_sequence_length": 64}
        out = pipe(caption, num_inference_steps=STEPS, generator=generator, output_type="np", **sizes).images
    else:
        sizes = {"height": 64, "width": 64, "num_frames": 17, "max_sequence_length": 32}
        guided = {"negative_prompt": "", "guidance_scale": 2.0}
        call = {**sizes, **guided, "num_inference_steps": STEPS, "generator": generator, "output_type": "np"}
        out = pipe(caption, **call).frames[0]
    return np.asarray(out, dtype=np.float64)


def generate_all(way: int) -> dict[str, Any]:
    """Return the images and clips of all captions, and their computed steps, in one way."""
    _, ranks, mesh, threshold = WAYS[way]
    outputs: dict[str, Any] = {}
    for model, captions in CAPTIONS.items():
        pipe = load() if model == "flux" else load_wan()
        if ranks > 1:
            parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu", max_batch_dim_size=1, **mesh))
        if threshold is not None:
            apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
        generated, computed = [], []
        for caption in captions:
            generated.append(generate(pipe, model, caption))
            if threshold is not None:
                report = cache_report(pipe)
                computed.append(STEPS * report.computed / len(report.rows))  # There are two branches in a step.
        outputs |= {model: generated, f"{model}, computed": computed}
    return outputs


def panels(outputs: dict[str, dict[str, Any]], model: str) -> list[list[tuple[str, np.ndarray]]]:
    """Return a row of panels for each caption: one rank, then each way and its difference."""
    rows = []
    for i in range(len(CAPTIONS[model])):
        alone = outputs["1 rank"][model][i]
        row = [("1 rank", alone)]
        for name, times in AMPLIFIED.items():
            other = outputs[name][model][i]
            row += [(name, other), (f"difference x {times:,}", np.clip(np.abs(alone - other) * times, 0, 1))]
        rows.append(row)
    return rows


def sheet(rows: list[list[tuple[str, np.ndarray]]], frame: int, scale: int) -> Image.Image:
    """Return one frame of all panels, with a line of titles above."""
    side = rows[0][0][1].shape[1] * scale
    gap, top = 6, 20
    image = Image.new("RGB", (len(rows[0]) * (side + gap) + gap, len(rows) * (side + gap) + gap + top), "white")
    pen = ImageDraw.Draw(image)
    for j, (title, _) in enumerate(rows[0]):
        pen.text((gap + j * (side + gap), 4), title, fill="black")
    for i, row in enumerate(rows):
        for j, (_, frames) in enumerate(row):
            pixels = Image.fromarray((frames[frame] * 255).round().astype(np.uint8))
            resized = pixels.resize((side, side), Image.Resampling.NEAREST)
            image.paste(resized, (gap + j * (side + gap), top + gap + i * (side + gap)))
    return image


def measured(outputs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each model and way the largest difference from one rank, and how many 8-bit values differ."""
    rows = []
    for model, captions in CAPTIONS.items():
        alone = np.stack(outputs["1 rank"][model])
        for name in AMPLIFIED:
            other = np.stack(outputs[name][model])
            eight_bits = np.abs((other * 255).round() - (alone * 255).round())
            computed = outputs[name][f"{model}, computed"]
            rows.append(
                {
                    "model": model,
                    "captions": len(captions),
                    "way": name,
                    "largest difference": float(np.abs(other - alone).max()),
                    "8-bit values that differ": int((eight_bits > 0).sum()),
                    "of": int(eight_bits.size),
                    "by at most": int(eight_bits.max()),
                    "computed steps": float(np.mean(computed)) if computed else float(STEPS),
                    "mean squared error": float(np.square(other - alone).mean()),
                }
            )
    return rows


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/cache_quality.md."""
    results = read_results("gallery")
    names = {"flux": "tiny FLUX, images", "wan": "tiny Wan, clips"}
    rows = []
    for row in results["rows"]:
        share = f"{row['8-bit values that differ'] / row['of']:.2g}"
        error, steps = row["mean squared error"], f"{row['computed steps']:.1f} of {STEPS}"
        psnr = f"{-10 * np.log10(error):.1f}" if error else "same bits"
        rows.append([names[row["model"]], row["way"], steps, f"{row['largest difference']:.1e}", share, psnr])
    heads = ["model", "way", "computed steps", "largest difference", "share of 8-bit values that differ", "PSNR, dB"]
    return {"differences": markdown_table(heads, rows, right=(2, 3, 4, 5))}


def main() -> None:
    """Generate in all ways, compare and write."""
    parser_of(__doc__).parse_args()
    outputs = {name: measure_on_ranks(generate_all, ranks, i) for i, (name, ranks, _, _) in enumerate(WAYS)}
    sheet(panels(outputs, "flux"), 0, 1).save(IMAGES, optimize=True)
    rows = panels(outputs, "wan")
    # Keep every second frame in few colours, because every reader would load a clip of megabytes.
    frames = [
        sheet(rows, i, 2).quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        for i in range(0, len(rows[0][0][1]), 2)
    ]
    frames[0].save(CLIPS, save_all=True, append_images=frames[1:], duration=160, loop=0, optimize=True)
    write_results("gallery", {"captions": CAPTIONS, "steps": STEPS, "rows": measured(outputs)}, "diffusers")
    print(IMAGES, CLIPS, sep="\n")


if __name__ == "__main__":
    main()
