"""The two losses: an autoencoder's reconstruction, and flow matching in its latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from zoo.training.loop import step_seed, torch_generator

# In each seed, so that stages draw different scenes.
VAE_STAGE, FLOW_STAGE, STATISTICS, TEXT_STAGE, DECODER_STAGE = range(5)
KL_WEIGHT = 1e-4  # per latent element, against a reconstruction loss per pixel element
COLOURED = 0.3  # max − min over RGB in −1 … 1
NO_CAPTION = 0.06  # of the captions are empty, for guidance with a negative prompt
CAPITAL = 0.25  # of the captions start with a capital


class PlainAttention(TorchFunctionMode):
    """A mode that computes attention without a mask as two matrix products, which is 2.5 times as fast on a
    CPU at 300 tokens.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or kwargs.get("attn_mask") is not None or kwargs.get("is_causal"):
            return func(*args, **kwargs)
        query, key, value = args or (kwargs[name] for name in ("query", "key", "value"))
        return torch.softmax((query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2), -1) @ value


def vary(captions: list[str], rng: np.random.Generator) -> list[str]:
    """Return the captions, some of them capitalized, some empty."""
    captions = [text.capitalize() if rng.random() < CAPITAL else text for text in captions]
    return ["" if rng.random() < NO_CAPTION else text for text in captions]


@dataclass(frozen=True)
class VaeLoss:
    """Absolute and squared error of the reconstruction and a light pull of the latents towards a unit normal."""

    seed: int
    batch: int
    draw: Callable[[np.random.SeedSequence, int], torch.Tensor]  # seed and batch to pixels in −1 … 1
    thing_weight: float = 1.0  # of the error of pixels that have a colour; backgrounds are grey

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of one step, a scalar."""
        seed = step_seed(self.seed, VAE_STAGE, step)
        generator = torch_generator(seed)
        pixels = self.draw(seed, self.batch).to(next(model.parameters()).device)
        posterior = model.encode(pixels).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(pixels.device)
        decoded = model.decode(posterior.mean + posterior.std * noise).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        error = decoded - pixels
        coloured = pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True) > COLOURED
        weights = 1 + (self.thing_weight - 1) * coloured.float()
        return ((error.abs() + error.square()) * (weights / weights.mean())).mean() + KL_WEIGHT * kl


@dataclass(frozen=True)
class Pool:
    """Scenes that are drawn and encoded once, and then used with new captions and noise in each step."""

    scenes: list[Any]
    data: torch.Tensor  # [N, …], unit normal latents as the denoiser gets them
    weights: torch.Tensor  # [N, …], of the loss; broadcasts with data


@dataclass(frozen=True)
class FlowLoss:
    """Flow matching on latents: squared error of the predicted velocity, noise − data.

    Noise levels are logit-normal, then shifted towards noise, the distribution that SD3 and FLUX describe.
    """

    pool: Pool
    condition: Callable[[list[Any], np.random.Generator], tuple[torch.Tensor, ...]]  # scenes to what the model is told
    seed: int
    batch: int
    shift: float
    autocast: bool  # bfloat16 inside the model
    # A further loss of the same call: a function of model and scenes that returns a scalar.
    also: Callable[[Any, list[Any]], torch.Tensor] | None = None

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of one step, a scalar."""
        seed = step_seed(self.seed, FLOW_STAGE, step)
        generator, rng = torch_generator(seed), np.random.default_rng(seed)
        device = next(model.parameters()).device
        chosen = rng.integers(len(self.pool.scenes), size=self.batch)
        scenes = [self.pool.scenes[i] for i in chosen]
        condition = [x.to(device) for x in self.condition(scenes, rng)]
        data, weights = self.pool.data[chosen].to(device), self.pool.weights[chosen].to(device)
        noise = torch.randn(data.shape, generator=generator).to(device)
        s = torch.randn(self.batch, generator=generator).sigmoid()
        sigma = (self.shift * s / (1 + (self.shift - 1) * s)).to(device)
        noisy = torch.lerp(data, noise, sigma.view(-1, *[1] * (data.ndim - 1)))
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast), PlainAttention():
            velocity = model(noisy, sigma, *condition)
        loss = ((velocity.float() - (noise - data)).square() * weights).mean()
        return loss if self.also is None else loss + self.also(model, scenes)
