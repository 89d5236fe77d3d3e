"""Tiny transformers that join text and image to one sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zoo.tiny.base import TinyModel, grid, image, inputs, noise, num_patches, tokens, valid

# -- Z-Image: lists of samples


def z_image_inputs(frames: int, height: int, width: int, *, controlled: bool = False) -> dict[str, Any]:
    """Return inputs whose text and image are each padded to a multiple of 32 tokens."""
    total = 32 + -(-num_patches(frames, height, width) // 32) * 32
    return {
        "x": [noise(4, 1, frames * height, width, seed=i) for i in range(2)],
        "t": torch.tensor([0.6, 0.6]),
        "cap_feats": [noise(9, 24), noise(4, 24)],
        **({"controlnet_block_samples": {0: noise(2, total, 48)}} if controlled else {}),
    }


def z_image_edit_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return samples that have a given image, and the one that is generated."""
    return {
        "x": [[noise(4, 1, 4, 4, seed=i), noise(4, 1, frames * height, width, seed=i)] for i in range(2)],
        "t": torch.tensor([0.6, 0.6]),
        "cap_feats": [[noise(5, 24, seed=i), noise(9, 24, seed=i), noise(3, 24, seed=i)] for i in range(2)],
        "siglip_feats": [None, None],
        "image_noise_mask": [[0, 1]] * 2,
    }


Z_IMAGE = {"axes_dims": [4, 6, 6], "axes_lens": [160, 64, 64]}

# -- Bria FIBO 2: the model makes tokens of the texts, fewer of the shorter one

fibo2_inputs = partial(
    inputs, image, 0.6, encoder_hidden_states=noise(2, 2, 9, 24), encoder_attention_mask=valid((9, 4))
)
FIBO2 = {"injection_layer_ids": (1,), "max_num_gist_tokens": 7, "axes_lens": (16, 64, 64)}


def ideogram_inputs(frames: int, height: int, width: int, *, by_token: bool = False) -> dict[str, Any]:
    """Return text, padded on the left, and image in tensors of one length."""
    positions = grid(frames, height, width).long()
    total = 9 + len(positions)
    timestep = torch.tensor([0.6, 0.6])
    return {
        "hidden_states": noise(2, total, 16),
        "timestep": timestep[:, None] * (torch.arange(total) >= 9) if by_token else timestep,
        "encoder_hidden_states": noise(2, total, 24),
        "position_ids": torch.cat([torch.arange(9)[:, None].expand(-1, 3), 20 + positions]).expand(2, -1, -1),
        "segment_ids": valid((total, total - 5), total, torch.int64).flip(1),
        "indicator": torch.tensor([3] * 9 + [2] * len(positions)).expand(2, -1),
    }


IDEOGRAM = {"in_channels": 16, "mrope_section": (4, 2, 2)}


def omnigen_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return text with a given image of four tokens, the time, and the image. Text is causal; the rest sees
    all tokens.
    """
    total = 10 + num_patches(frames, height, width)
    mask = torch.ones(total, total).tril()
    mask[10:] = 1.0
    return {
        "hidden_states": image(frames, height, width),
        "timestep": torch.tensor([0.6, 0.6]),
        "input_ids": torch.arange(18).view(2, 9),
        "input_img_latents": [noise(1, 4, 4, 4)],
        "input_image_sizes": {0: [[2, 6]]},
        "attention_mask": mask.expand(2, -1, -1),
        "position_ids": torch.arange(total).expand(2, -1),
    }


STREAM_MODELS = {
    "z-image": TinyModel("ZImageTransformer2DModel", z_image_inputs, **Z_IMAGE),
    "z-image, controlnet": TinyModel("ZImageTransformer2DModel", partial(z_image_inputs, controlled=True), **Z_IMAGE),
    "z-image, editing": TinyModel("ZImageTransformer2DModel", z_image_edit_inputs, **Z_IMAGE),
    "bria fibo 2": TinyModel("BriaFibo2Transformer2DModel", fibo2_inputs(), **FIBO2),
    "bria fibo 2, editing": TinyModel(
        "BriaFibo2Transformer2DModel",
        fibo2_inputs(context_latents=[noise(2, 4, 4, 6, seed=i) for i in range(2)]),
        **FIBO2,
    ),
    "krea 2": TinyModel(
        "Krea2Transformer2DModel",
        inputs(
            tokens(16),
            0.6,
            encoder_hidden_states=noise(2, 9, 3, 24),
            position_ids=lambda *sizes: torch.cat([torch.zeros(9, 3), grid(*sizes)]),
            encoder_attention_mask=valid((9, 4)),
        ),
        in_channels=16,
        num_attention_heads=4,
    ),
    "ernie-image": TinyModel(
        "ErnieImageTransformer2DModel",
        lambda *sizes: {
            "hidden_states": image(*sizes),
            "timestep": torch.tensor([600.0, 600.0]),
            "text_bth": noise(2, 9, 24),
            "text_lens": torch.tensor([9, 4]),
        },
        patch_size=2,
        rope_axes_dim=(4, 6, 6),
    ),
    "ideogram 4": TinyModel("Ideogram4Transformer2DModel", ideogram_inputs, **IDEOGRAM),
    "ideogram 4, a time step for each token": TinyModel(
        "Ideogram4Transformer2DModel", partial(ideogram_inputs, by_token=True), **IDEOGRAM
    ),
    "omnigen": TinyModel(
        "OmniGenTransformer2DModel",
        omnigen_inputs,
        num_key_value_heads=3,
        pad_token_id=0,
        max_position_embeddings=128,
        original_max_position_embeddings=64,
        rope_scaling={"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        pos_embed_max_size=24,
    ),
}
