"""The training data of the tiny video pipeline: videos and captions drawn from seeds, and their latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from transformers import T5TokenizerFast

from zoo.training.loop import step_seed
from zoo.training.losses import FLOW_STAGE, STATISTICS, Pool, vary
from zoo.video import grammar
from zoo.video.draw import FRAMES, draw, draw_crowded
from zoo.video.grammar import Scene

# Zeros follow the end of a caption, and nothing masks them, so the model must learn each length. Wan's default is 512.
TEXT_LENGTHS = {16: 0.75, 32: 0.17, 226: 0.05, 512: 0.03}


def to_tensor(videos: list[np.ndarray]) -> torch.Tensor:
    """Convert uint8 videos ``[frames, height, width, 3]`` to ``[B, 3, frames, height, width]`` in −1 … 1."""
    return torch.from_numpy(np.stack(videos)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def draw_batch(seed: np.random.SeedSequence, batch: int) -> tuple[torch.Tensor, list[Scene]]:
    """Return videos of training scenes, ``[batch, 3, 17, 64, 64]`` in −1 … 1, and the scenes."""
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    scenes = [grammar.random_scene(rng, held_out=False) for rng in rngs]
    return to_tensor([draw(scene, rng) for scene, rng in zip(scenes, rngs, strict=True)]), scenes


def draw_mixed_batch(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Return videos ``[batch, 3, 17, 64, 64]`` for the autoencoder: half of them full of things, half
    training scenes.
    """
    half = batch // 2
    crowded = to_tensor([draw_crowded(np.random.default_rng(child)) for child in seed.spawn(half)])
    return torch.cat([crowded, draw_batch(seed, batch - half)[0]])


def draw_crowded_images(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Return frames full of things, each a video of one frame, ``[batch, 3, 1, 64, 64]``; colours are learned from
    these soonest.
    """
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    return to_tensor([draw_crowded(rng, range(FRAMES // 2, FRAMES // 2 + 1)) for rng in rngs])


@torch.no_grad()
def encode(vae: AutoencoderKLWan, videos: torch.Tensor) -> torch.Tensor:
    """Encode ``[B, 3, 17, 64, 64]`` in −1 … 1 to latents as the transformer gets them, ``[B, C, 5, 8, 8]``."""
    latents = vae.encode(videos.to(vae.device)).latent_dist.mean
    mean, std = (
        torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std


def measure_latents(vae: AutoencoderKLWan, seed: int, *, batches: int = 16, batch: int = 16) -> None:
    """Write mean and standard deviation of each channel of the latents of training videos into the VAE's config."""
    channels = vae.config.z_dim
    vae.register_to_config(latents_mean=[0.0] * channels, latents_std=[1.0] * channels)
    latents = torch.cat(
        [encode(vae, draw_batch(step_seed(seed, STATISTICS, i), batch)[0]).transpose(0, 1) for i in range(batches)],
        dim=1,
    ).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())


def build_pool(vae: AutoencoderKLWan, seed: int, count: int) -> Pool:
    """Draw and encode ``count`` training scenes, all of equal weight."""
    scenes, data = [], []
    for start in range(0, count, 32):
        videos, part = draw_batch(step_seed(seed, FLOW_STAGE, start), min(32, count - start))
        scenes += part
        data.append(encode(vae, videos).cpu())
    return Pool(scenes, torch.cat(data), torch.ones(count, 1, 1, 1, 1))


@dataclass(frozen=True)
class Captions:
    """The conditions of the denoiser: ids and mask of captions, padded to one length."""

    tokenizer: T5TokenizerFast

    def __call__(self, scenes: list[Scene], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask, each ``[B, S_text]``."""
        captions = vary([grammar.caption(scene, rng) for scene in scenes], rng)
        length = int(rng.choice(list(TEXT_LENGTHS), p=list(TEXT_LENGTHS.values())))
        tokens = self.tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return tokens.input_ids, tokens.attention_mask
