"""Generate held-out captions and count what is right:  python -m zoo.evaluate flux|video

Loads a pipeline folder with plain diffusers, as float32 on the CPU. Writes benchmarks/results/tiny_<model>.json and
docs/images/tiny_<model>.png, with the first images or videos in the order of generation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from zoo.flux import check as image_check
from zoo.flux import scenes as images
from zoo.video import scenes as videos

ROOT = Path(__file__).parents[1]
WORD = 3  # The seeds here begin with this word. Training uses 0, 1 and 2.
GUIDANCE = 2.0  # Videos are generated with this guidance, and again without.
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"height": images.SIDE, "width": images.SIDE, "max_sequence_length": 64},
    "video": {"height": videos.SIDE, "width": videos.SIDE, "num_frames": videos.FRAMES, "max_sequence_length": 32},
}


def _different(draw: Callable[[np.random.Generator], Any], count: int, *seed: int) -> list[Any]:
    rng = np.random.default_rng([WORD, *seed])
    scenes: dict[Any, None] = {}
    while len(scenes) < count:
        scenes[draw(rng)] = None
    return list(scenes)


def held_out_images(seed: int, num_things: int, count: int) -> list[images.ImageScene]:
    """Return ``count`` different scenes of ``num_things`` objects that were not in the training set."""
    return _different(lambda rng: images.held_out_scene(rng, num_things), count, seed, num_things)


def short_scenes() -> list[images.ImageScene]:
    """Return the scenes of which a short caption names a colour and a shape alone, three times each, mixed."""
    cell = images.USUAL_CELLS[1][0]
    scenes = [
        images.ImageScene((images.Thing(colour, shape, images.USUAL_SIZE, cell),), images.USUAL_BACKGROUND)
        for colour in images.COLOURS
        for shape in images.SHAPES
    ]
    return [scenes[index] for _ in range(3) for index in np.random.default_rng(WORD).permutation(len(scenes))]


def held_out_videos(seed: int, count: int) -> list[videos.VideoScene]:
    """Return ``count`` different scenes that were not in the training set."""
    return _different(lambda rng: videos.random_scene(rng, held_out=True), count, seed)


def generate(
    pipe: Any, captions: list[str], *, steps: int, seed: int, batch: int, **options: Any
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield index and uint8 image or video, channels last, of each caption. Noise depends on seed and index only."""
    call = CALLS["flux" if isinstance(pipe, diffusers.FluxPipeline) else "video"]
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        generators = [torch.Generator().manual_seed(seed * 100_000 + start + i) for i in range(len(part))]
        arguments = {"num_inference_steps": steps, "generator": generators, "output_type": "np", **call, **options}
        outputs = pipe(part, **arguments)[0]
        yield from enumerate(_to_8_bit(outputs), start)


def _to_8_bit(outputs: np.ndarray) -> np.ndarray:
    return (outputs * 255).round().astype(np.uint8)


def tally(verdicts: list[Any]) -> dict[str, float]:
    """Return the share of right verdicts for each field, and the share of verdicts with all fields right."""
    values = {f.name: np.hstack([getattr(verdict, f.name) for verdict in verdicts]) for f in fields(verdicts[0])}
    values["all"] = np.array([verdict.all_right for verdict in verdicts])
    return {name: round(float(np.mean(x)), 4) for name, x in values.items()}


@torch.no_grad()
def ceiling(pipe: Any, scenes: list[Any], seed: int) -> dict[str, float]:
    """Return the same figures for true drawings, encoded and decoded. No denoiser can exceed them."""
    of_images = isinstance(pipe, diffusers.FluxPipeline)
    draw, check = (images.draw, image_check.check) if of_images else (videos.draw, videos.check)
    postprocess = pipe.image_processor.postprocess if of_images else pipe.video_processor.postprocess_video
    verdicts = []
    for i, scene in enumerate(scenes):
        pixels = images.to_tensor([draw(scene, np.random.default_rng([WORD, seed, i]))]).to(pipe.vae.device)
        decoded = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mean).sample
        verdicts.append(check(_to_8_bit(postprocess(decoded, output_type="np")[0]), scene))
    return tally(verdicts)


def sheet(pictures: list[np.ndarray], captions: list[str], columns: int) -> Image.Image:
    """Return pictures of one size with their captions below, row by row."""
    font, gap, text_height = ImageFont.load_default(size=11), 16, 78 if columns > 1 else 16
    height, width = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    page = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + text_height + gap) + gap), "white")
    canvas = ImageDraw.Draw(page)
    for i, (picture, text) in enumerate(zip(pictures, captions, strict=True)):
        x, y = gap + (i % columns) * (width + gap), gap + (i // columns) * (height + text_height + gap)
        page.paste(Image.fromarray(picture), (x, y))
        canvas.rectangle((x - 1, y - 1, x + width, y + height), outline=(200, 200, 200))
        lines = "\n".join(textwrap.wrap(text, width // 5))
        canvas.multiline_text((x, y + height + 4), lines, fill="black", font=font, spacing=2)
    return page


def _judge(
    args: argparse.Namespace, pipe: Any, scenes: list[Any], captions: list[str], **options: Any
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the figures of one set of captions, and the outputs."""
    start, check = time.monotonic(), (image_check if args.model == "flux" else videos).check
    generated = generate(pipe, captions, steps=args.steps, batch=args.batch, **options)
    outputs = [output for _, output in tqdm(generated, total=len(captions), mininterval=5.0)]
    verdicts = [check(output, scene) for output, scene in zip(outputs, scenes, strict=True)]
    seconds = round(time.monotonic() - start, 1)
    return {"captions": len(captions), **tally(verdicts), "seconds": seconds}, outputs


def evaluate_images(pipe: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Image.Image]:
    """Return the figures for one, two and three objects, and the first twelve, six and six images."""
    figures, shown, shown_captions = {}, [], []
    for num_things in (1, 2, 3):
        scenes = held_out_images(args.seed, num_things, args.count * (1 if num_things == 3 else 2))
        captions = [images.caption(scene) for scene in scenes]
        row, outputs = _judge(args, pipe, scenes, captions, seed=args.seed + num_things)
        figures[f"things_{num_things}"] = {**row, "ceiling_all": ceiling(pipe, scenes, args.seed)["all"]}
        few = 12 if num_things == 1 else 6
        shown, shown_captions = shown + outputs[:few], shown_captions + captions[:few]
    scenes = short_scenes()
    captions = [images.short_caption(scene) for scene in scenes]
    figures["short"], outputs = _judge(args, pipe, scenes, captions, seed=args.seed + 4, max_sequence_length=512)
    return figures, sheet(shown + outputs[:6], shown_captions + captions[:6], columns=6)


def evaluate_videos(pipe: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Image.Image]:
    """Return the figures with guidance and without, and every second frame of the first videos with guidance."""
    scenes = held_out_videos(args.seed, args.count)
    captions = [videos.caption(scene) for scene in scenes]
    figures, shown = {}, {}
    for guidance in (GUIDANCE, 1.0):
        options = {"guidance_scale": guidance, "negative_prompt": "", "seed": args.seed}
        figures[f"guidance_{guidance}"], shown[guidance] = _judge(args, pipe, scenes, captions, **options)
    figures["true_videos_through_vae"] = ceiling(pipe, scenes, args.seed)
    strips = [np.hstack(video[::2]).repeat(2, axis=0).repeat(2, axis=1) for video in shown[GUIDANCE][:8]]
    return figures, sheet(strips, captions[:8], columns=1)


def environment() -> dict[str, str]:
    """Return the device, the date and the versions."""
    versions = {module.__name__: module.__version__ for module in (torch, diffusers, transformers)}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    device = f"CPU, {torch.get_num_threads()} threads"
    return {"device": device, "python": platform.python_version(), **versions, "date": date}


def main(arguments: list[str] | None = None) -> None:
    """Load, measure, print and write. The defaults are those of the published figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", choices=CALLS)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="Euler steps")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--count", type=int, default=100, help="captions; twice as many of one and two things")
    parser.add_argument("--output", type=Path, default=ROOT, help="folder of benchmarks/results and docs/images")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    folder = ROOT / "zoo" / args.model / "pipeline"
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    figures, image = (evaluate_images if args.model == "flux" else evaluate_videos)(pipe, args)
    settings = {"seed": args.seed, "steps": args.steps, "weights": "bfloat16 as float32"}
    result = {
        "environment": environment(),
        "settings": {**settings, "max_sequence_length": CALLS[args.model]["max_sequence_length"]},
        "training": json.loads((folder / "training.json").read_text()),
        "held_out": figures,
    }
    results, pictures = args.output / "benchmarks/results", args.output / "docs/images"
    for path in (results, pictures):
        path.mkdir(parents=True, exist_ok=True)
    (results / f"tiny_{args.model}.json").write_text(json.dumps(result, indent=2) + "\n")
    image.save(pictures / f"tiny_{args.model}.png")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
