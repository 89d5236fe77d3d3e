"""What a denoiser knows, asked without generating from noise:  python -m benchmarks.tiny_flux.probe

Two questions, each at several noise levels. Does it use a word? Two captions of a held-out scene differ in one word, and
the true one should predict the velocity better; this tells long before images show it. Can it finish an image? A true one,
noised and denoised again, should keep what can still be seen in it. Writes benchmarks/results/tiny_flux_probe.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline

from benchmarks.tiny_flux import grammar
from benchmarks.tiny_flux.check import check
from benchmarks.tiny_flux.draw import SIDE, draw
from benchmarks.tiny_flux.evaluate import tally
from benchmarks.tiny_flux.grammar import Scene
from benchmarks.tiny_flux.models import Denoiser, Tokenizers
from benchmarks.tiny_flux.stages import encode, to_tensor, tokenize
from benchmarks.tiny_training.held_out import environment
from benchmarks.tiny_training.losses import PlainAttention
from benchmarks.tiny_training.program import prepare

HERE = Path(__file__).parent
WORD = 5  # first word of the seeds here
SCENES = 48
TEXT_LENGTH = 48
SIGMAS = (0.6, 0.75, 0.85, 0.93, 0.97)
STARTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
STEP = 0.07  # of sigma, in denoising
WORDS = {"colour": list(grammar.COLOURS), "shape": list(grammar.SHAPES), "cell": list(grammar.CELLS)}
Encoder = Callable[[torch.Tensor], torch.Tensor]


def swapped(scene: Scene, name: str, rng: np.random.Generator) -> Scene:
    """The scene with another colour, shape or cell of its one thing."""
    (thing,) = scene.things
    others = [value for value in WORDS[name] if value != getattr(thing, name)]
    return replace(scene, things=(replace(thing, **{name: others[int(rng.integers(len(others)))]}),))


def held_out(rng: np.random.Generator, encode: Encoder) -> tuple[list[Scene], torch.Tensor]:
    """`SCENES` held-out scenes of one thing, and their latents ``[B, S, C]``."""
    scenes = [grammar.held_out_scene(rng, 1) for _ in range(SCENES)]
    return scenes, encode(to_tensor([draw(scene, rng) for scene in scenes]))


@torch.no_grad()
def use_of_words(model: Denoiser, encode: Encoder, tokenizers: Tokenizers) -> dict[str, dict[str, list[float]]]:
    """For each word, at each of `SIGMAS`: in what share of scenes the true word gives the smaller loss (0.5 by chance),
    and by how much, relative to it, the loss grows with a wrong one.
    """
    rng, generator = np.random.default_rng(WORD), torch.Generator().manual_seed(WORD)
    scenes, data = held_out(rng, encode)
    captions = {"true": [grammar.caption(scene) for scene in scenes]}
    for name in WORDS:
        captions[name] = [grammar.caption(swapped(scene, name, rng)) for scene in scenes]
    found: dict[str, dict[str, list[float]]] = {name: {"right": [], "growth": []} for name in WORDS}
    for sigma in SIGMAS:
        noise = torch.randn(data.shape, generator=generator)
        noisy, sigmas = torch.lerp(data, noise, sigma), torch.full((len(data),), sigma)
        losses = {}
        for name, texts in captions.items():
            condition = tokenize(tokenizers, texts, texts, TEXT_LENGTH)
            with torch.autocast("cpu", torch.bfloat16), PlainAttention():
                velocity = model(noisy, sigmas, *condition)
            losses[name] = (velocity.float() - (noise - data)).square().mean((1, 2))
        for name in WORDS:
            growth = losses[name] - losses["true"]
            found[name]["right"].append(round((growth > 0).float().mean().item(), 3))
            found[name]["growth"].append(round((growth.mean() / losses["true"].mean()).item(), 4))
    return found


@torch.no_grad()
def finished(model: Denoiser, pipe: FluxPipeline, tokenizers: Tokenizers) -> dict[str, dict[str, float]]:
    """What is right in true images that were noised up to each of `STARTS` and denoised from there with their caption."""
    scenes, data = held_out(np.random.default_rng(WORD), partial(encode, pipe.vae))
    noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(WORD))
    captions = [grammar.caption(scene) for scene in scenes]
    condition = tokenize(tokenizers, captions, captions, TEXT_LENGTH)
    found = {}
    for start in STARTS:
        latents = torch.lerp(data, noise, start)
        levels = torch.linspace(start, 0, 1 + round(start / STEP))
        for level, following in pairwise(levels):
            with torch.autocast("cpu", torch.bfloat16), PlainAttention():
                velocity = model(latents, level.expand(len(latents)), *condition)
            latents = latents + (following - level) * velocity.float()
        packed = FluxPipeline._unpack_latents(latents, SIDE, SIDE, pipe.vae_scale_factor)
        decoded = pipe.vae.decode(packed / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
        images = pipe.image_processor.postprocess(decoded, output_type="np")
        verdicts = [check((x * 255).round().astype(np.uint8), scene) for x, scene in zip(images, scenes, strict=True)]
        found[str(start)] = tally(verdicts)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Ask the pipeline in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--pipeline", type=Path, default=HERE / "pipeline")
    parser.add_argument("--result", type=Path, default=HERE.parent / "results" / "tiny_flux_probe.json")
    args = parser.parse_args(arguments)
    prepare(args)
    pipe = FluxPipeline.from_pretrained(args.pipeline, dtype=torch.float32, local_files_only=True)
    tokenizers = Tokenizers(pipe.tokenizer, pipe.tokenizer_2)
    model = Denoiser(tokenizers).eval()
    model.transformer, model.text_encoder = pipe.transformer, pipe.text_encoder
    model.text_encoder_2 = pipe.text_encoder_2
    result = {
        "environment": environment("cpu"),
        "training": json.loads((args.pipeline / "training.json").read_text()),
        "scenes": SCENES,
        "sigmas": SIGMAS,
        "use_of_words": use_of_words(model, partial(encode, pipe.vae), tokenizers),
        "finished_from": finished(model, pipe, tokenizers),
    }
    args.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("use_of_words", "finished_from")}))


if __name__ == "__main__":
    main()
