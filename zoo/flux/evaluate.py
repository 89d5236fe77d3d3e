"""Generate images of captions that training never saw and count what is right:  python -m zoo.flux.evaluate

Loads the pipeline folder with plain diffusers, as float32 on the CPU. Writes benchmarks/results/tiny_flux.json and the
grid of images docs/images/tiny_flux.png.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from zoo.flux import grammar
from zoo.flux.check import Verdict, check
from zoo.flux.draw import SIDE, draw
from zoo.flux.grammar import Scene
from zoo.training.held_out import parser, run

TEXT_LENGTH = 64
WORD = 3  # first word of the seeds here; training uses 0, 1 and 2


def held_out_scenes(seed: int, num_things: int, count: int) -> list[Scene]:
    """Return ``count`` different scenes."""
    rng = np.random.default_rng([WORD, seed, num_things])
    scenes: dict[Scene, None] = {}
    while len(scenes) < count:
        scenes[grammar.held_out_scene(rng, num_things)] = None
    return list(scenes)


def generate(
    pipe: FluxPipeline, captions: list[str], *, steps: int, seed: int, batch: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, image ``[128, 128, 3]`` uint8) of each caption; its noise depends on ``seed`` and index alone."""
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        generators = [torch.Generator().manual_seed(seed * 100_000 + start + i) for i in range(len(part))]
        images = pipe(
            part,
            height=SIDE,
            width=SIDE,
            num_inference_steps=steps,
            max_sequence_length=TEXT_LENGTH,
            generator=generators,
            output_type="np",
        ).images
        for i, image in enumerate((images * 255).round().astype(np.uint8)):
            yield start + i, image


def tally(verdicts: list[Verdict]) -> dict[str, float]:
    """Return the share of things (colour, shape, place, size) and of images (count, background, all) that are right."""

    def share(values: list[bool]) -> float:
        return round(sum(values) / len(values), 4)

    shares = {
        name: share([right for verdict in verdicts for right in getattr(verdict, name)])
        for name in ("colour", "shape", "place", "size")
    }
    shares["count"] = share([verdict.count for verdict in verdicts])
    shares["background"] = share([verdict.background for verdict in verdicts])
    shares["all"] = share([verdict.all_right for verdict in verdicts])
    return shares


@torch.no_grad()
def through_vae(pipe: FluxPipeline, image: np.ndarray) -> Image.Image:
    """Return a true drawing, encoded and decoded. No denoiser can improve on it."""
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].to(pipe.vae.device).float() / 127.5 - 1
    decoded = pipe.vae.decode(pipe.vae.encode(tensor).latent_dist.mean).sample
    return pipe.image_processor.postprocess(decoded, output_type="pil")[0]


def ceiling(pipe: FluxPipeline, scenes: list[Scene], seed: int) -> dict[str, float]:
    """Return the same figures for true drawings that went through the autoencoder."""
    verdicts = []
    for i, scene in enumerate(scenes):
        image = draw(scene, np.random.default_rng([WORD, seed, i]))
        verdicts.append(check(np.asarray(through_vae(pipe, image)), scene))
    return tally(verdicts)


def grid(images: list[np.ndarray], captions: list[str], columns: int = 6, scale: int = 1) -> Image.Image:
    """Return images with their captions below, row by row."""
    font = ImageFont.load_default(size=11)
    side, gap, text_height = SIDE * scale, 16, 78
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + text_height + gap) + gap), "white")
    canvas = ImageDraw.Draw(sheet)
    for i, (image, text) in enumerate(zip(images, captions, strict=True)):
        x, y = gap + (i % columns) * (side + gap), gap + (i // columns) * (side + text_height + gap)
        sheet.paste(Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST), (x, y))
        canvas.rectangle((x - 1, y - 1, x + side, y + side), outline=(200, 200, 200))
        canvas.multiline_text((x, y + side + 4), "\n".join(textwrap.wrap(text, 24)), fill="black", font=font, spacing=2)
    return sheet


def evaluate(pipe: FluxPipeline, args: argparse.Namespace) -> tuple[dict[str, Any], Image.Image]:
    """Return the figures for one, two and three things, and the grid: the first twelve, six and six, as they came."""
    figures: dict[str, Any] = {}
    shown, shown_captions = [], []
    for num_things, count in zip((1, 2, 3), args.counts, strict=True):
        scenes = held_out_scenes(args.seed, num_things, count)
        captions = [grammar.caption(scene) for scene in scenes]
        verdicts, start = [], time.monotonic()
        images = generate(pipe, captions, steps=args.steps, seed=args.seed + num_things, batch=args.batch)
        for i, image in tqdm(images, total=count, desc=f"{num_things} things", mininterval=5.0):
            verdicts.append(check(image, scenes[i]))
            if i < (12 if num_things == 1 else 6):
                shown.append(image)
                shown_captions.append(captions[i])
        name = f"things_{num_things}"
        figures[name] = {"captions": count, **tally(verdicts), "seconds": round(time.monotonic() - start, 1)}
        figures[name]["ceiling_all"] = ceiling(pipe, scenes, args.seed)["all"]
    return figures, grid(shown, shown_captions)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    options = parser(__doc__, "tiny_flux")
    options.add_argument("--counts", type=int, nargs=3, default=[200, 100, 100], help="captions with 1, 2, 3 things")
    return options.parse_args(arguments)


if __name__ == "__main__":
    run(parse(), FluxPipeline, evaluate, TEXT_LENGTH)
