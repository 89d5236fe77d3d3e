"""A tiny pipeline as a value, and its parts except encoders: transformer, VAE, scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

from zoo.flux.models import SHIFT
from zoo.tiny.base import fill
from zoo.tiny.pipelines.options import PROMPT
from zoo.tiny.transformers.registry import MODELS

LATENT_CHANNELS = 4


class TinyPipeline:
    """A pipeline with random weights, and the arguments of a short call.

    Args:
        source: A function that builds the pipeline from the name of its class; or a name in
            :data:`zoo.tiny.transformers.registry.MODELS`, around which :func:`tiny_pipe` builds it.
        cls: Name of the pipeline's class.
        tables, options: Arguments of the call in addition to those that most pipelines take; later ones win.
        parts: Further arguments of the function that builds the pipeline. One that is a function or a class is called,
            each time the pipeline is built.
        without: Arguments that most pipelines take and this one does not.
    """

    def __init__(
        self,
        source: str | Callable[..., DiffusionPipeline],
        cls: str,
        *tables: dict[str, Any],
        parts: dict[str, Any] | None = None,
        without: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.source, self.cls, self.parts, self.without = source, cls, parts or {}, without
        self.options = {name: value for table in (*tables, options) for name, value in table.items()}

    def build(self) -> DiffusionPipeline:
        parts = {name: part() if callable(part) else part for name, part in self.parts.items()}
        if isinstance(self.source, str):
            return tiny_pipe(self.cls, self.source, **parts)
        return self.source(self.cls, **parts)

    def call(self, **options: Any) -> dict[str, Any]:
        """Return the arguments of a short call that returns latents: an odd number of few tokens, three steps, a
        seed.
        """
        defaults = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "latent", **self.options}
        arguments = {**defaults, "generator": torch.Generator().manual_seed(7), **options}
        return {name: value for name, value in arguments.items() if name not in self.without}


# -- VAEs.


def random_model(cls: str, seed: int, **config: Any) -> nn.Module:
    return fill(getattr(diffusers, cls)(**config), seed)


def image_vae() -> nn.Module:
    """Return a VAE whose latent pixels are 8 × 8 pixels."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = kl_vae("AutoencoderKL", **blocks)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return vae


def small_vae(latent_channels: int = LATENT_CHANNELS) -> nn.Module:
    """Return a VAE whose latent pixels are 4 × 4 pixels, so that 64 × 64 pixels give enough tokens for four ranks."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    sizes = {"block_out_channels": (16, 32, 64), "latent_channels": latent_channels, "sample_size": 128}
    without = dict.fromkeys(("mid_block_add_attention", "use_quant_conv", "use_post_quant_conv"), False)
    vae = random_model("AutoencoderKL", 2, norm_num_groups=8, **blocks, **sizes, **without)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return vae


def kl_vae(cls: str, **config: Any) -> nn.Module:
    """Return a VAE of one of the classes whose configs are similar to those of AutoencoderKL."""
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    return random_model(cls, 2, **{**sizes, **config})


def wan_vae(cls: str = "AutoencoderKLWan", latent_channels: int = 4, **config: Any) -> nn.Module:
    """Return a VAE of one of the classes whose configs are similar to those of AutoencoderKLWan."""
    config |= {
        "latents_mean": [0.1, -0.2, 0.3, 0.0] * (latent_channels // 4),
        "latents_std": [1.2, 0.9] * (latent_channels // 2),
    }
    return random_model(cls, 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, z_dim=latent_channels, **config)


# -- All families.

_TEXT_PARTS = [f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3", "_4")] + ["processor"]


def whole_pipe(cls: str, **components: Any) -> DiffusionPipeline:
    components.setdefault("scheduler", FlowMatchEulerDiscreteScheduler(shift=SHIFT))
    pipe = getattr(diffusers, cls)(**components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_pipe(cls: str, model: str, *, config: dict[str, Any] | None = None, **components: Any) -> DiffusionPipeline:
    """Build a pipeline around a tiny transformer. Text encoders that are not given are None.

    Args:
        model: Name in :data:`zoo.tiny.transformers.registry.MODELS`.
        config: Changes to the config of the model.
        components: Components of the pipeline; the VAE defaults to :func:`image_vae`.
    """
    taken = inspect.signature(getattr(diffusers, cls)).parameters
    components = dict.fromkeys(name for name in _TEXT_PARTS if name in taken) | components
    if "vae" not in components:
        components["vae"] = image_vae()
    return whole_pipe(cls, transformer=MODELS[model].build(**config or {}), **components)
