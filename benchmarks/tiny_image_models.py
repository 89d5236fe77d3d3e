"""Tiny transformers of images, beside those of `benchmarks.tiny_models`: FLUX's relatives and CogView."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.tiny_model import TinyModel, noise, valid


def packed_inputs(frames: int, height: int, width: int, *, text: int = 9, **more: Any) -> dict[str, Any]:
    """Of FLUX's relatives: packed tokens and their positions. An image as high as all frames together."""
    grid = torch.cartesian_prod(torch.zeros(1), torch.arange(float(frames * height)), torch.arange(float(width)))
    return {
        "hidden_states": noise(2, len(grid), 16),
        "encoder_hidden_states": noise(2, text, 24),
        "timestep": torch.tensor([0.6, 0.6]),
        "img_ids": grid,
        "txt_ids": torch.arange(float(text))[:, None].expand(-1, 3),
        **more,
    }


PACKED: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}


def chroma_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """The pipeline gives a mask of numbers, which is added."""
    image = torch.ones(2, frames * height * width)
    return packed_inputs(
        frames, height, width, attention_mask=torch.cat([valid((9, 4), 9, torch.float32), image], dim=1)
    )


def controlled_inputs(frames: int, height: int, width: int, *, single: bool = False) -> dict[str, Any]:
    residuals = [noise(2, frames * height * width, 48, seed=i) for i in range(2)]
    more = {"controlnet_single_block_samples": residuals[::-1]} if single else {}
    return packed_inputs(frames, height, width, controlnet_block_samples=residuals, **more)


def fibo_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    mask = torch.cat([valid((9, 4), 9), torch.ones(2, frames * height * width, dtype=torch.bool)], dim=1)
    return packed_inputs(
        frames,
        height,
        width,
        text_encoder_layers=[noise(2, 9, 20, seed=i) for i in range(4)],
        joint_attention_kwargs={"attention_mask": mask[:, None, None, :]},
    )


def cogview_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """An image as high as all frames together."""
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([600, 600]),
        "original_size": torch.tensor([[96.0, 160.0]] * 2),
        "target_size": torch.tensor([[96.0, 160.0]] * 2),
        "crop_coords": torch.zeros(2, 2),
    }


COGVIEW: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "text_embed_dim": 24,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "pos_embed_max_size": 32,
    "sample_size": 32,
}
CHROMA: dict[str, Any] = {
    **PACKED,
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 24,
    "approximator_layers": 2,
}

IMAGE_MODELS = {
    "chroma": TinyModel("ChromaTransformer2DModel", chroma_inputs, CHROMA),
    "chroma, controlnet": TinyModel("ChromaTransformer2DModel", partial(controlled_inputs, single=True), CHROMA),
    "ovis": TinyModel("OvisImageTransformer2DModel", packed_inputs, {**PACKED, "out_channels": 16}),
    "longcat-image": TinyModel("LongCatImageTransformer2DModel", packed_inputs, PACKED),
    "bria": TinyModel("BriaTransformer2DModel", controlled_inputs, PACKED),
    "bria fibo": TinyModel("BriaFiboTransformer2DModel", fibo_inputs, {**PACKED, "text_encoder_dim": 20}),
    "cogview3+": TinyModel("CogView3PlusTransformer2DModel", cogview_inputs, COGVIEW),
    "cogview4": TinyModel("CogView4Transformer2DModel", cogview_inputs, {**COGVIEW, "rope_axes_dim": (16, 16)}),
}
