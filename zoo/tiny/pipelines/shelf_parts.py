"""What pipelines on the transformers of `zoo.tiny.transformers.registry.SHELF` are made of, and sizes and text for
their calls.
"""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from zoo.tiny.base import TinyModel
from zoo.tiny.pipelines.parts import IMAGE_WIDTH, TEXT_WIDTH, build_vae, embeddings, random_model, whole_pipe
from zoo.tiny.random_weights import fill
from zoo.tiny.transformers.image import IMAGE_MODELS
from zoo.tiny.transformers.joint import STREAM_MODELS
from zoo.tiny.transformers.video import VIDEO_MODELS

MODELS: dict[str, TinyModel] = {**IMAGE_MODELS, **STREAM_MODELS, **VIDEO_MODELS}

# 3 × 5 image tokens: of 16 × 16 pixels, or of 8 × 8.
SIZE = {"height": 48, "width": 80}
SMALL = {"height": 24, "width": 40}
VIDEO = {**SIZE, "num_frames": 9}
TEXT = embeddings(9, TEXT_WIDTH)
POOLED = embeddings(1, IMAGE_WIDTH)


def first(length: int, total: int = 9) -> Tensor:
    """A mask ``[1, total]`` of text of so many tokens."""
    return (torch.arange(total) < length)[None]


def masks(name: str, suffix: str = "", dtype: torch.dtype = torch.bool) -> dict[str, Tensor]:
    """All tokens of the prompt are valid, and five of the negative one."""
    return {f"prompt_{name}{suffix}": first(9).to(dtype), f"negative_prompt_{name}{suffix}": first(5).to(dtype)}


def image_vae(latent_channels: int = 4) -> nn.Module:
    """Of 8 × 8 pixels."""
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = random_model("AutoencoderKL", 2, latent_channels=latent_channels, **sizes, **blocks)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return vae


def small_vae() -> nn.Module:
    """Of 4 × 4 pixels."""
    vae = fill(build_vae(4), seed=2)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return vae


_OF_TEXT = [f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2")] + ["processor"]


def on_shelf(cls: str, model: str, *, config: dict[str, Any] | None = None, **components: Any) -> Any:
    """A pipeline on a model of the shelf; without what makes text embeddings.

    Args:
        config: what of the model's is otherwise.
    """
    tiny = MODELS[model]
    transformer = random_model(tiny.cls, 1, **{**tiny.config, **(config or {})})
    takes = inspect.signature(getattr(diffusers, cls)).parameters
    parts = dict.fromkeys(name for name in _OF_TEXT if name in takes)
    return whole_pipe(cls, transformer=transformer, **{"vae": image_vae(), **parts, **components})


def wan_vae(cls: str = "AutoencoderKLWan") -> nn.Module:
    latents = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.2, 0.9] * 2}
    return random_model(cls, 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, z_dim=4, **latents)


def flux2_vae() -> nn.Module:
    return random_model("AutoencoderKLFlux2", 2, block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=4)
