"""The two losses: the autoencoder's reconstruction, and flow matching in its latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import nn

from benchmarks.tiny_flux import grammar
from benchmarks.tiny_flux.draw import draw
from benchmarks.tiny_flux.loop import step_seed, torch_generator
from benchmarks.tiny_flux.models import SHIFT, Tokenizers

VAE_STAGE, FLOW_STAGE, STATISTICS, DECODER_STAGE = 0, 1, 2, 4  # in each seed, so that stages draw different scenes
KL_WEIGHT = 1e-4  # per latent element, against a reconstruction loss per pixel element
# CLIP sees an empty caption in half of the pictures: its pooled embedding is the shorter way for colours and backgrounds, and
# the words' way, which places need, is learned with them.
NO_POOLED_CAPTION = 0.5
NO_CAPTION = 0.06  # of the captions are empty, for guidance with a negative prompt
DECODER_NOISE = 0.1  # standard deviations of the latents: about how far off the denoiser may be
THINGS = (0.7, 0.2, 0.1)  # of the scenes have one, two, three things …
DECODER_THINGS = (0.6, 0.25, 0.15)  # … and of those that the decoder sees
CAPITAL = 0.25  # of the captions start with a capital
# Padding is not masked in FLUX, so each length is something to learn: mostly the recommended one, at times others.
TEXT_LENGTHS = {48: 0.62, 64: 0.30, 128: 0.05, 512: 0.03}


def to_tensor(pictures: list[np.ndarray]) -> torch.Tensor:
    """uint8 pictures to ``[B, 3, height, width]`` in −1 … 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_crowded_batch(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Pictures full of things, ``[batch, 3, 128, 128]`` in −1 … 1.

    Training scenes are nine tenths background; an autoencoder trained on those alone had drawn all things grey after
    1,400 steps.
    """
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    return to_tensor([draw(grammar.crowded_scene(rng), rng) for rng in rngs])


def draw_batch(
    seed: np.random.SeedSequence, batch: int, weights: tuple[float, float, float] = THINGS
) -> tuple[torch.Tensor, list[str]]:
    """Pictures of training scenes, ``[batch, 3, 128, 128]`` in −1 … 1, and their captions.

    Args:
        weights: probabilities of one, two, three things.
    """
    pictures, captions = [], []
    for child in seed.spawn(batch):
        rng = np.random.default_rng(child)
        scene = grammar.training_scene(rng, weights)
        pictures.append(draw(scene, rng))
        captions.append(grammar.caption(scene, rng))
    return to_tensor(pictures), captions


@dataclass(frozen=True)
class VaeLoss:
    """Absolute and squared error of the reconstruction and a light pull of the latents towards a unit normal."""

    seed: int
    batch: int

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of one step, a scalar."""
        seed = step_seed(self.seed, VAE_STAGE, step)
        generator = torch_generator(seed)
        device = next(model.parameters()).device
        pictures = draw_crowded_batch(seed, self.batch).to(device).contiguous(memory_format=torch.channels_last)
        posterior = model.encode(pictures).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(device)
        decoded = model.decode(posterior.mean + posterior.std * noise).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        error = decoded - pictures
        return error.abs().mean() + error.square().mean() + KL_WEIGHT * kl


@dataclass(frozen=True)
class DecoderLoss:
    """Error of the pictures decoded from fixed latents with a little noise: half of them crowded, half training scenes."""

    seed: int
    batch: int

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of one step, a scalar."""
        seed = step_seed(self.seed, DECODER_STAGE, step)
        generator = torch_generator(seed)
        device = next(model.parameters()).device
        half = self.batch // 2
        pictures = torch.cat([draw_crowded_batch(seed, half), draw_batch(seed, self.batch - half, DECODER_THINGS)[0]])
        pictures = pictures.to(device).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            latents = model.encode(pictures).latent_dist.mean
        noise = torch.randn(latents.shape, generator=generator).to(device)
        error = model.decode(latents + noise * DECODER_NOISE / model.config.scaling_factor).sample - pictures
        return error.abs().mean() + error.square().mean()


@torch.no_grad()
def measure_latents(vae: AutoencoderKL, seed: int, *, batches: int = 16, batch: int = 16) -> None:
    """Write the mean and 1 / standard deviation of the latents of training pictures into the VAE's config."""
    device = next(vae.parameters()).device
    latents = torch.cat(
        [
            vae.encode(draw_batch(step_seed(seed, STATISTICS, i), batch)[0].to(device)).latent_dist.mean
            for i in range(batches)
        ]
    )
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@dataclass(frozen=True)
class FlowLoss:
    """Flow matching on the latents: squared error of the predicted velocity, noise − data.

    Noise levels are logit-normal, then shifted by `SHIFT` towards noise, the distribution that SD3 and FLUX describe.
    """

    vae: AutoencoderKL
    tokenizers: Tokenizers
    seed: int
    batch: int
    autocast: bool  # bfloat16 inside encoder and model

    def tokenize(self, captions: list[str], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """CLIP ids ``[B, 77]`` and T5 ids ``[B, S_text]``, padded as FluxPipeline pads them."""
        captions = [text.capitalize() if rng.random() < CAPITAL else text for text in captions]
        captions = ["" if rng.random() < NO_CAPTION else text for text in captions]
        length = int(rng.choice(list(TEXT_LENGTHS), p=list(TEXT_LENGTHS.values())))
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        pooled = ["" if rng.random() < NO_POOLED_CAPTION else text for text in captions]
        clip_ids = self.tokenizers.clip(pooled, max_length=self.tokenizers.clip.model_max_length, **options).input_ids
        return clip_ids, self.tokenizers.t5(captions, max_length=length, **options).input_ids

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of one step, a scalar."""
        seed = step_seed(self.seed, FLOW_STAGE, step)
        generator, rng = torch_generator(seed), np.random.default_rng(seed)
        device = next(model.parameters()).device
        pictures, captions = draw_batch(seed, self.batch)
        clip_ids, t5_ids = self.tokenize(captions, rng)
        if t5_ids.shape[1] > 128:  # twice the tokens: half the pictures
            pictures, clip_ids, t5_ids = (x[: max(1, self.batch // 2)] for x in (pictures, clip_ids, t5_ids))
        precision = torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)
        with torch.no_grad(), precision:
            pictures = pictures.to(device).contiguous(memory_format=torch.channels_last)
            latents = self.vae.encode(pictures).latent_dist.mean.float()
        latents = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        B, C, H, W = latents.shape
        data = FluxPipeline._pack_latents(latents, B, C, H, W)
        noise = torch.randn(data.shape, generator=generator).to(device)
        s = torch.randn(B, generator=generator).sigmoid()
        sigma = (SHIFT * s / (1 + (SHIFT - 1) * s)).to(device)
        noisy = torch.lerp(data, noise, sigma[:, None, None])
        img_ids = FluxPipeline._prepare_latent_image_ids(B, H // 2, W // 2, device, torch.float32)
        with precision:
            velocity = model(noisy, sigma, clip_ids.to(device), t5_ids.to(device), img_ids)
        return (velocity.float() - (noise - data)).square().mean()
