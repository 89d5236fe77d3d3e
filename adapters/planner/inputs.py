"""Make inputs of diffusers' transformers for a given image or video size, as empty tensors. For diffusers 0.42."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GenerationSizes:
    """Sizes of one generation: pixels, frames (1 for an image) and text tokens; and the dtype of its inputs.

    A latent pixel has ``spatial`` pixels along each side, and a latent frame after the first has ``temporal`` frames.
    """

    height: int
    width: int
    frames: int
    text: int
    spatial: int = 8
    temporal: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def latents(self) -> tuple[int, int, int]:
        """Number of frames, height and width of the latents."""
        return (self.frames - 1) // self.temporal + 1, self.height // self.spatial, self.width // self.spatial

    @property
    def tokens(self) -> int:
        """Number of tokens of an image or of a latent frame, each of 2 × 2 latent pixels."""
        _, height, width = self.latents
        return (height // 2) * (width // 2)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)


MakeInputs = Callable[[Any, GenerationSizes], dict[str, Any]]


def _common(sizes: GenerationSizes, hidden: tuple[int, ...], text_dim: int, samples: int = 1) -> dict[str, Any]:
    """Return the arguments that all transformers take. ``hidden`` is the shape of one sample of the hidden states."""
    return {
        "hidden_states": sizes.empty(samples, *hidden),
        "encoder_hidden_states": sizes.empty(samples, sizes.text, text_dim),
        "timestep": sizes.empty(samples),
    }


def _flux(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
        "img_ids": sizes.empty(sizes.tokens, 3),
        "txt_ids": sizes.empty(sizes.text, 3),
    }


def _flux2(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
        "img_ids": sizes.empty(1, sizes.tokens, 4),
        "txt_ids": sizes.empty(1, sizes.text, 4),
    }


def _qwen_image(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    _, height, width = sizes.latents
    return {
        **_common(sizes, (sizes.tokens, config.in_channels), config.joint_attention_dim),
        "img_shapes": [[(1, height // 2, width // 2)]],
    }


def _hunyuan_video(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        **_common(sizes, (config.in_channels, *sizes.latents), config.text_embed_dim),
        "encoder_attention_mask": sizes.empty(1, sizes.text, dtype=torch.int64),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
    }


def _wan(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return _common(sizes, (config.in_channels, *sizes.latents), config.text_dim)


def _cogvideox(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    frames, height, width = sizes.latents
    angles = sizes.empty(frames * sizes.tokens, config.attention_head_dim)
    return {
        **_common(sizes, (frames, config.in_channels, height, width), config.text_embed_dim, samples=2),
        "image_rotary_emb": (angles, angles) if config.use_rotary_positional_embeddings else None,
    }


def _mochi(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        **_common(sizes, (config.in_channels, *sizes.latents), config.text_embed_dim, samples=2),
        "encoder_attention_mask": sizes.empty(2, sizes.text, dtype=torch.bool),
    }


def _stable_diffusion_3(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    _, height, width = sizes.latents
    return {
        **_common(sizes, (config.in_channels, height, width), config.joint_attention_dim, samples=2),
        "pooled_projections": sizes.empty(2, config.pooled_projection_dim),
    }


INPUTS: Mapping[str, MakeInputs] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "QwenImageTransformer2DModel": _qwen_image,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "WanTransformer3DModel": _wan,
    "CogVideoXTransformer3DModel": _cogvideox,
    "MochiTransformer3DModel": _mochi,
    "SD3Transformer2DModel": _stable_diffusion_3,
}
