"""The training data of the tiny FLUX: images and captions drawn from seeds, and the weights of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline
from torch import nn

from zoo.flux import grammar
from zoo.flux.draw import CELL_CENTRES, SIDE, draw
from zoo.flux.grammar import Scene
from zoo.flux.models import Tokenizers
from zoo.training.loop import step_seed, torch_generator
from zoo.training.losses import DECODER_STAGE, FLOW_STAGE, STATISTICS, Pool, vary

DECODER_NOISE = (
    0.4  # standard deviations of the latents, at most: about how far off the denoiser may be where a thing is
)
# How many of the scenes have one, two, three things: …
THINGS = (0.7, 0.2, 0.1)  # … those that the latents are measured on …
DECODER_THINGS = (0.6, 0.25, 0.15)  # … and those that the decoder sees
DECODER_CELL_WEIGHT = 8.0  # of the decoder's error in cells that hold a thing
# CLIP sees an empty caption in half of the images: its pooled embedding reaches every layer by the shortest way, but
# cannot say which thing is where; so that T5's words are learned too, they have to carry everything half of the time.
NO_POOLED_CAPTION = 0.5
# Padding is not masked in FLUX, so each length is something to learn: mostly the recommended one and half of it.
TEXT_LENGTHS = {32: 0.45, 64: 0.5, 128: 0.05}
TOKEN = 16  # pixels, the side of the square that one token stands for
CELL_REACH = 22  # pixels from the centre of a cell: its thing is inside, whatever its jitter


def to_tensor(images: list[np.ndarray]) -> torch.Tensor:
    """Convert uint8 images to ``[B, 3, height, width]`` in −1 … 1, channels last in memory."""
    return (torch.from_numpy(np.stack(images)).float() / 127.5 - 1).permute(0, 3, 1, 2)


def draw_crowded_batch(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Return images full of things, ``[batch, 3, 128, 128]`` in −1 … 1.

    Training scenes are nine tenths background; an autoencoder trained on those alone had drawn all things grey after
    1,400 steps.
    """
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    return to_tensor([draw(grammar.crowded_scene(rng), rng) for rng in rngs])


def draw_batch(
    seed: np.random.SeedSequence, batch: int, weights: tuple[float, float, float] = THINGS
) -> tuple[torch.Tensor, list[Scene]]:
    """Return images of training scenes, ``[batch, 3, 128, 128]`` in −1 … 1, and the scenes.

    Args:
        weights: probabilities of one, two, three things.
    """
    images, scenes = [], []
    for child in seed.spawn(batch):
        rng = np.random.default_rng(child)
        scenes.append(grammar.training_scene(rng, weights))
        images.append(draw(scenes[-1], rng))
    return to_tensor(images), scenes


def draw_thinned_batch(seed: np.random.SeedSequence, batch: int, grey: float) -> torch.Tensor:
    """Return images with one thing up to a thing in every cell, ``[batch, 3, 128, 128]`` in −1 … 1.

    A lone thing on grey is the hardest: all else is zero there, so normalized over the whole image a thing is many
    times as large as on white. An autoencoder that had seen full images alone told red from blue there, and no more,
    and did not learn it later from scenes: with all numbers of things in between it does.

    Args:
        grey: this part of the images is grey besides those that are by chance.
    """
    images = []
    for child in seed.spawn(batch):
        rng = np.random.default_rng(child)
        scene = grammar.crowded_scene(rng)
        count = int(rng.integers(1, len(scene.things) + 1))
        kept = tuple(scene.things[i] for i in rng.permutation(len(scene.things))[:count])
        background = "grey" if rng.random() < grey else scene.background
        images.append(draw(replace(scene, things=kept, background=background), rng))
    return to_tensor(images)


@torch.no_grad()
def measure_latents(vae: AutoencoderKL, seed: int, *, batches: int = 16, batch: int = 16) -> None:
    """Write the mean and 1 / standard deviation of the latents of training images into the VAE's config."""
    device = next(vae.parameters()).device
    latents = torch.cat(
        [
            vae.encode(draw_batch(step_seed(seed, STATISTICS, i), batch)[0].to(device)).latent_dist.mean
            for i in range(batches)
        ]
    )
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode ``[B, 3, height, width]`` in −1 … 1 to packed latents, unit normal, ``[B, S, 4 C]``."""
    latents = vae.encode(images.to(vae.device)).latent_dist.mean
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    packed: torch.Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


def tokens_of_cell(cell: str, reach: int) -> torch.Tensor:
    """Return a boolean mask ``[rows, columns]`` of the tokens whose middle is less than ``reach`` pixels from the
    cell's, along both sides.
    """
    tokens = torch.arange(TOKEN // 2, SIDE, TOKEN)
    near = [(tokens - centre).abs() < reach for centre in CELL_CENTRES]
    row, column = divmod(list(grammar.CELLS).index(cell), 3)
    return near[row][:, None] & near[column]


def cell_weights(scene: Scene, weight: float) -> torch.Tensor:
    """Return ``[S, 1]``: ``weight`` for the tokens that a thing may touch, 1 for others, then scaled to a mean of 1.

    A weight that follows the caption alone leaves the best answer what it is; where the caption leaves the cell out, it
    pulls a little towards things.
    """
    weights = torch.ones(SIDE // TOKEN, SIDE // TOKEN)
    for thing in scene.things:
        weights[tokens_of_cell(thing.cell, CELL_REACH + TOKEN // 2)] = weight
    return (weights / weights.mean()).reshape(-1, 1)


@dataclass(frozen=True)
class DecoderLoss:
    """Error of the images decoded from fixed latents with some noise: mostly of training scenes, and there of things.

    A small thing on plain grey is what the encoder knows least: normalized over the whole image, its latents are two to
    three times as large as on white.
    """

    seed: int
    batch: int

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of one step, a scalar."""
        seed = step_seed(self.seed, DECODER_STAGE, step)
        generator = torch_generator(seed)
        device = next(model.parameters()).device
        crowded = self.batch // 4
        images, scenes = draw_batch(seed, self.batch - crowded, DECODER_THINGS)
        weights = torch.stack(
            [cell_weights(scene, DECODER_CELL_WEIGHT).reshape(1, SIDE // TOKEN, SIDE // TOKEN) for scene in scenes]
        )
        weights = F.interpolate(weights, scale_factor=TOKEN)
        if crowded:
            images = torch.cat([images, draw_crowded_batch(seed, crowded)])
            weights = torch.cat([weights, torch.ones(crowded, 1, SIDE, SIDE)])
        images, weights = images.to(device), weights.to(device)
        with torch.no_grad():
            latents = model.encode(images).latent_dist.mean
        levels = DECODER_NOISE * torch.rand(self.batch, 1, 1, 1, generator=generator)
        noise = (levels * torch.randn(latents.shape, generator=generator)).to(device)
        error = model.decode(latents + noise / model.config.scaling_factor).sample - images
        return ((error.abs() + error.square()) * weights).mean()


def build_pool(
    encode: Callable[[torch.Tensor], torch.Tensor],
    seed: int,
    count: int,
    things: tuple[float, float, float],
    weight: float,
) -> Pool:
    """Draw and encode ``count`` training scenes. ``weight`` is the weight of cells that hold a thing."""
    scenes, data = [], []
    for start in range(0, count, 64):
        images, part = draw_batch(step_seed(seed, FLOW_STAGE, start), min(64, count - start), things)
        scenes += part
        data.append(encode(images).cpu())
    return Pool(scenes, torch.cat(data), torch.stack([cell_weights(scene, weight) for scene in scenes]))


def tokenize(
    tokenizers: Tokenizers, captions: list[str], pooled: list[str], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CLIP ids of ``pooled``, ``[B, 77]``, and T5 ids of ``captions``, ``[B, length]``, padded as FluxPipeline
    pads them.
    """
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    clip_ids = tokenizers.clip(pooled, max_length=tokenizers.clip.model_max_length, **options).input_ids
    return clip_ids, tokenizers.t5(captions, max_length=length, **options).input_ids


@dataclass(frozen=True)
class Captions:
    """The conditions of the denoiser: ids of captions for both encoders, padded to one length."""

    tokenizers: Tokenizers
    no_pooled_caption: float = NO_POOLED_CAPTION

    def __call__(self, scenes: list[Scene], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return CLIP ids ``[B, 77]`` and T5 ids ``[B, S_text]``."""
        captions = vary([grammar.caption(scene, rng) for scene in scenes], rng)
        longest = max(len(ids) for ids in self.tokenizers.t5(captions).input_ids)
        length = max(longest, int(rng.choice(list(TEXT_LENGTHS), p=list(TEXT_LENGTHS.values()))))
        pooled = ["" if rng.random() < self.no_pooled_caption else text for text in captions]
        return tokenize(self.tokenizers, captions, pooled, min(padded for padded in TEXT_LENGTHS if padded >= length))
