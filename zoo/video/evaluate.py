"""Generate videos of captions that training never saw and count what is right:  python -m zoo.video.evaluate

Loads the pipeline folder with plain diffusers, as float32 on the CPU. Writes benchmarks/results/tiny_video.json and the
strips docs/images/tiny_video.png.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterator
from dataclasses import astuple, fields
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from zoo.training.held_out import parser, run
from zoo.video import grammar
from zoo.video.check import Verdict, check
from zoo.video.draw import FRAMES, SIDE, draw
from zoo.video.grammar import Scene
from zoo.video.stages import to_tensor

TEXT_LENGTH = 32
WORD = 3  # first word of the seeds here; training uses 0, 1 and 2
SHOWN = 8  # videos in the strips
SHOWN_FRAMES = range(0, FRAMES, 2)


def held_out_scenes(seed: int, count: int) -> list[Scene]:
    """Return ``count`` different scenes."""
    rng = np.random.default_rng([WORD, seed])
    scenes: dict[Scene, None] = {}
    while len(scenes) < count:
        scenes[grammar.random_scene(rng, held_out=True)] = None
    return list(scenes)


def generate(
    pipe: WanPipeline, captions: list[str], *, steps: int, guidance: float, seed: int, batch: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, video ``[17, 64, 64, 3]`` uint8) of each caption; its noise depends on ``seed`` and index alone."""
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        videos = pipe(
            part,
            negative_prompt=[""] * len(part),
            height=SIDE,
            width=SIDE,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=TEXT_LENGTH,
            generator=[torch.Generator().manual_seed(seed * 100_000 + start + i) for i in range(len(part))],
            output_type="np",
        ).frames
        for i, video in enumerate((videos * 255).round().astype(np.uint8)):
            yield start + i, video


def tally(verdicts: list[Verdict]) -> dict[str, float]:
    """Return the share of videos in which each attribute, and all of them, are right."""
    rows = np.array([astuple(verdict) for verdict in verdicts])
    shares = dict(zip([field.name for field in fields(Verdict)], rows.mean(axis=0).round(4).tolist(), strict=True))
    return {**shares, "all": round(float(rows.all(axis=1).mean()), 4)}


@torch.no_grad()
def ceiling(pipe: WanPipeline, scenes: list[Scene], seed: int) -> dict[str, float]:
    """Return the same figures for true videos, encoded and decoded. No denoiser can improve on them."""
    verdicts = []
    for i, scene in enumerate(scenes):
        video = to_tensor([draw(scene, np.random.default_rng([WORD, seed, i]))])
        decoded = pipe.vae.decode(pipe.vae.encode(video.to(pipe.vae.device)).latent_dist.mean).sample
        frames = pipe.video_processor.postprocess_video(decoded, output_type="np")[0]
        verdicts.append(check((frames * 255).round().astype(np.uint8), scene))
    return tally(verdicts)


def strips(videos: list[np.ndarray], captions: list[str], scale: int = 2) -> Image.Image:
    """Return every second frame of each video in a row, its caption to the left."""
    font = ImageFont.load_default(size=13)
    side, gap, text_width = SIDE * scale, 8, 190
    width, height = text_width + len(SHOWN_FRAMES) * (side + gap) + gap, len(videos) * (side + gap) + gap
    image = Image.new("RGB", (width, height), "white")
    canvas = ImageDraw.Draw(image)
    for row, (video, text) in enumerate(zip(videos, captions, strict=True)):
        y = gap + row * (side + gap)
        canvas.multiline_text((gap, y), "\n".join(textwrap.wrap(text, 24)), fill="black", font=font)
        for column, i in enumerate(SHOWN_FRAMES):
            x = text_width + gap + column * (side + gap)
            image.paste(Image.fromarray(video[i]).resize((side, side), Image.Resampling.NEAREST), (x, y))
            canvas.rectangle((x - 1, y - 1, x + side, y + side), outline=(200, 200, 200))
    return image


def evaluate(pipe: WanPipeline, args: argparse.Namespace) -> tuple[dict[str, Any], Image.Image]:
    """Return the figures with guidance and without, and the strips: the first with guidance, as they came."""
    scenes = held_out_scenes(args.seed, args.count)
    captions = [grammar.caption(scene) for scene in scenes]
    figures: dict[str, Any] = {}
    shown: list[np.ndarray] = []
    for guidance in (args.guidance, 1.0):
        verdicts, start = [], time.monotonic()
        videos = generate(pipe, captions, steps=args.steps, guidance=guidance, seed=args.seed, batch=args.batch)
        for i, video in tqdm(videos, total=args.count, desc=f"guidance {guidance}", mininterval=5.0):
            verdicts.append(check(video, scenes[i]))
            if guidance == args.guidance and i < SHOWN:
                shown.append(video)
        seconds = round(time.monotonic() - start, 1)
        figures[f"guidance_{guidance}"] = {"captions": args.count, **tally(verdicts), "seconds": seconds}
    figures["true_videos_through_vae"] = ceiling(pipe, scenes, args.seed)
    return figures, strips(shown, captions[: len(shown)])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    options = parser(__doc__, "tiny_video")
    options.add_argument("--guidance", type=float, default=2.0)
    options.add_argument("--count", type=int, default=100, help="captions")
    return options.parse_args(arguments)


if __name__ == "__main__":
    run(parse(), WanPipeline, evaluate, TEXT_LENGTH)
