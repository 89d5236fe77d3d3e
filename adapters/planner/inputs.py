"""Make inputs of diffusers' transformers for a given image or video size, as empty tensors. For diffusers 0.42."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GenerationSizes:
    """Sizes of one generation.

    Args:
        height, width (`int`): Size of the image or video in pixels.
        frames (`int`): Number of frames; 1 for an image.
        text (`int`): Number of text tokens.
        spatial (`int`): Pixels per latent pixel along each side.
        temporal (`int`): Frames per latent frame, after the first.
        dtype (`torch.dtype`): Dtype of the inputs.
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

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)


MakeInputs = Callable[[Any, GenerationSizes], dict[str, Any]]


def _flux(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    _, height, width = sizes.latents
    tokens = (height // 2) * (width // 2)
    return {
        "hidden_states": sizes.empty(1, tokens, config.in_channels),
        "encoder_hidden_states": sizes.empty(1, sizes.text, config.joint_attention_dim),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "timestep": sizes.empty(1),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
        "img_ids": sizes.empty(tokens, 3),
        "txt_ids": sizes.empty(sizes.text, 3),
    }


def _flux2(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    _, height, width = sizes.latents
    tokens = (height // 2) * (width // 2)
    return {
        "hidden_states": sizes.empty(1, tokens, config.in_channels),
        "encoder_hidden_states": sizes.empty(1, sizes.text, config.joint_attention_dim),
        "timestep": sizes.empty(1),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
        "img_ids": sizes.empty(1, tokens, 4),
        "txt_ids": sizes.empty(1, sizes.text, 4),
    }


def _qwen_image(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    _, height, width = sizes.latents
    height, width = height // 2, width // 2
    return {
        "hidden_states": sizes.empty(1, height * width, config.in_channels),
        "encoder_hidden_states": sizes.empty(1, sizes.text, config.joint_attention_dim),
        "timestep": sizes.empty(1),
        "img_shapes": [[(1, height, width)]],
    }


def _hunyuan_video(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.empty(1, config.in_channels, *sizes.latents),
        "timestep": sizes.empty(1),
        "encoder_hidden_states": sizes.empty(1, sizes.text, config.text_embed_dim),
        "encoder_attention_mask": sizes.empty(1, sizes.text, dtype=torch.int64),
        "pooled_projections": sizes.empty(1, config.pooled_projection_dim),
        "guidance": sizes.empty(1) if config.guidance_embeds else None,
    }


def _wan(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.empty(1, config.in_channels, *sizes.latents),
        "timestep": sizes.empty(1),
        "encoder_hidden_states": sizes.empty(1, sizes.text, config.text_dim),
    }


def _cogvideox(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    frames, height, width = sizes.latents
    angles = sizes.empty(frames * (height // 2) * (width // 2), config.attention_head_dim)
    return {
        "hidden_states": sizes.empty(2, frames, config.in_channels, height, width),
        "encoder_hidden_states": sizes.empty(2, sizes.text, config.text_embed_dim),
        "timestep": sizes.empty(2),
        "image_rotary_emb": (angles, angles) if config.use_rotary_positional_embeddings else None,
    }


def _mochi(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    return {
        "hidden_states": sizes.empty(2, config.in_channels, *sizes.latents),
        "encoder_hidden_states": sizes.empty(2, sizes.text, config.text_embed_dim),
        "timestep": sizes.empty(2),
        "encoder_attention_mask": sizes.empty(2, sizes.text, dtype=torch.bool),
    }


def _stable_diffusion_3(config: Any, sizes: GenerationSizes) -> dict[str, Any]:
    _, height, width = sizes.latents
    return {
        "hidden_states": sizes.empty(2, config.in_channels, height, width),
        "encoder_hidden_states": sizes.empty(2, sizes.text, config.joint_attention_dim),
        "pooled_projections": sizes.empty(2, config.pooled_projection_dim),
        "timestep": sizes.empty(2),
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
