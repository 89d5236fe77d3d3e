"""Tune the tiny FLUX to plain calls:  python -m zoo.flux.tune

Reads a pipeline that `zoo.flux.train` wrote, and trains its transformer and its CLIP encoder further: with captions
that leave out what `scenes.short_caption` leaves out, and with 512 tokens, to which FluxPipeline pads by default. Stop
it at any time; the same command goes on where the last checkpoint was written.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import nn
from transformers import T5EncoderModel

from zoo import training
from zoo.flux import models
from zoo.flux import scenes as grammar
from zoo.flux.models import FluxDenoiser, Tokenizers
from zoo.flux.scenes import ImageScene, draw
from zoo.flux.train import NO_POOLED_CAPTION, cell_weights, encode
from zoo.training import FlowLoss, Pool, Schedule, State, fit, vary

# The published weights were tuned with these numbers; each is an option of the command.
RECIPE = {
    "scenes": 12288,  # drawn once, shown again and again
    "steps": 4000,
    "cell_weight": 12.0,  # of the loss in cells that hold a thing
    "batch": 8,
    "learning_rate": 4e-4,
    "boost": 4.0,  # of the learning rate inside the blocks
}
THINGS = (0.5, 0.35, 0.15)  # how many of the scenes have one, two, three things
FULL = 0.4  # of the captions name everything
# How many of the captions are padded to each length. 512 is FluxPipeline's default; 64 is what the figures of the
# first training used.
TEXT_LENGTHS = {32: 0.1, 64: 0.45, 128: 0.05, 512: 0.4}
# T5 learned from captions of at most 64 tokens. Its last two buckets of relative positions hold the distances from 64
# on: with this bias nothing attends that far, so a word's embedding does not depend on how much padding follows it.
FAR_BUCKETS, FAR_BIAS = slice(-2, None), -1e4


def limit_reach(encoder: T5EncoderModel) -> None:
    """Bias the T5 encoder's attention against distances of 64 tokens and more; in both directions."""
    buckets = encoder.config.relative_attention_num_buckets
    bias = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    with torch.no_grad():
        for direction in bias.view(2, buckets // 2, -1):
            direction[FAR_BUCKETS] = FAR_BIAS


def draw_batch(seed: np.random.SeedSequence, batch: int) -> tuple[torch.Tensor, list[ImageScene]]:
    """Return images of scenes, many of which a short caption describes, ``[batch, 3, 128, 128]``, and the scenes."""
    return training.draw_scenes(lambda rng: grammar.usual_scene(rng, THINGS), draw, seed, batch)


def build_pool(vae: AutoencoderKL, seed: int, count: int, weight: float) -> Pool:
    """Draw and encode ``count`` scenes. ``weight`` is the weight of cells that hold a thing."""
    weigh = partial(cell_weights, weight=weight)
    with torch.no_grad():
        return training.build_pool(draw_batch, partial(encode, vae), weigh, seed, count, 64)


@dataclass(frozen=True)
class PlainCaptions:
    """The conditions of the denoiser: ids of full and short captions, padded to one of `TEXT_LENGTHS`."""

    tokenizers: Tokenizers

    def __call__(self, scenes: list[ImageScene], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return CLIP ids ``[B, 77]`` and T5 ids ``[B, S_text]``."""
        clip, t5 = self.tokenizers.clip, self.tokenizers.t5
        captions = [
            grammar.caption(scene) if rng.random() < FULL else grammar.short_caption(scene, rng) for scene in scenes
        ]
        captions = vary(captions, rng)
        longest = max(len(ids) for ids in t5(captions).input_ids)
        length = int(rng.choice(list(TEXT_LENGTHS), p=list(TEXT_LENGTHS.values())))
        length = next(padded for padded in TEXT_LENGTHS if padded >= max(length, longest))
        pooled = ["" if rng.random() < NO_POOLED_CAPTION else text for text in captions]
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        clip_ids = clip(pooled, max_length=clip.model_max_length, **options).input_ids
        return clip_ids, t5(captions, max_length=length, **options).input_ids


def main(arguments: list[str] | None = None) -> None:
    """Tune the pipeline of the folder ``input``, and write it to the folder ``output`` with each checkpoint.

    Raises:
        ValueError: the input is already tuned, so that tuning it again would not be the recipe.
    """
    home = Path(__file__).parent
    args = training.parse(__doc__, home, arguments, **RECIPE, input="trained")
    source = Path(args.input)
    record = json.loads((source / "training.json").read_text())
    if "tuning" in record:
        raise ValueError(f"{source} is already tuned; expected the output of zoo.flux.train, such as --input FOLDER")
    pipe = FluxPipeline.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    tokenizers = models.build_tokenizers()
    model = FluxDenoiser(tokenizers)
    for name, part in model.named_children():
        part.load_state_dict(getattr(pipe, name).state_dict())
    limit_reach(model.text_encoder_2)
    model.text_encoder_2.requires_grad_(False)
    model.to(args.device)
    vae = pipe.vae.to(args.device)
    pool = build_pool(vae, args.seed + 20, args.scenes, args.cell_weight)
    loss = FlowLoss(pool, PlainCaptions(tokenizers), args.seed + 20, args.batch, models.SHIFT)

    def write(state: State) -> None:
        denoiser = copy.deepcopy(state.averaged).eval().to("cpu", torch.bfloat16)
        tuned: nn.Module = copy.deepcopy(vae).to("cpu", torch.bfloat16)
        models.build_pipeline(denoiser, tuned, tokenizers).save_pretrained(args.output)
        options: dict[str, Any] = {name: getattr(args, name) for name in ("device", "threads", "seed", *RECIPE)}
        versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
        tuning = {"options": options, "step": state.step, "seconds": round(state.seconds), "versions": versions}
        (args.output / "training.json").write_text(json.dumps(record | {"tuning": tuning}, indent=2) + "\n")

    schedule = Schedule(args.steps, args.learning_rate, boost=args.boost, decay=0.7)
    fit(model, loss, schedule, checkpoint=args.checkpoints / "tune.pt", export=write)


if __name__ == "__main__":
    main()
