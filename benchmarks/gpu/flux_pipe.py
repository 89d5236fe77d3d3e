"""A pipeline of a few lines around FLUX.1's transformer, without diffusers: latents in, latents out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.flux import TINY, flux_inputs
from benchmarks.gpu.flux_model import FluxTransformer2DModel


class EulerScheduler:
    """Euler steps of rectified flow from noise (1) to an image (0)."""

    def __init__(self) -> None:
        self.timesteps = torch.empty(0)
        self.step_index = 0

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]
        self.step_index = 0

    def step(self, velocity: Tensor, latents: Tensor) -> Tensor:
        self.step_index += 1
        return latents - velocity / len(self.timesteps)


class SmallFluxPipeline:
    """Denoise latents with a transformer of FLUX.1's form."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer, self.scheduler = transformer, EulerScheduler()

    @torch.no_grad()
    def __call__(
        self,
        latents: Tensor,
        conditions: dict[str, Tensor],
        num_inference_steps: int,
        callback_on_step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Tensor:
        """Return the denoised latents.

        Args:
            latents: ``[B, S_image, C]``.
            conditions: the other arguments of the transformer, without the timestep.
        """
        self.scheduler.set_timesteps(num_inference_steps)
        for index, timestep in enumerate(self.scheduler.timesteps):
            time = timestep.to(latents).expand(latents.shape[0])
            velocity = self.transformer(hidden_states=latents, timestep=time, return_dict=False, **conditions)[0]
            latents = self.scheduler.step(velocity, latents)
            if callback_on_step_end is not None:
                callback_on_step_end(self, index, timestep, {"latents": latents})
        return latents


def small_flux(device: torch.device, *, blocks: tuple[int, int] = (3, 3)) -> SmallFluxPipeline:
    """Return a pipeline in float32 with the same random weights on every rank, without a zero among them."""
    config = {**TINY, "num_layers": blocks[0], "num_single_layers": blocks[1]}
    transformer = FluxTransformer2DModel(**config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return SmallFluxPipeline(transformer.eval().requires_grad_(False).to(device))


def small_call(device: torch.device, *, steps: int = 8, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of one generation: 20 image tokens and 5 text tokens, which no even number of ranks divides alike."""
    conditions = {name: x.float() for name, x in flux_inputs(device, tiny=True).items()}
    shape = conditions.pop("hidden_states").shape
    del conditions["timestep"]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return {"latents": noise, "conditions": conditions, "num_inference_steps": steps}
