"""Tiny transformers of images, beside those of `zoo.tiny.transformers.registry`: FLUX's relatives, CogView,
HunyuanImage, DiT.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from zoo.tiny.base import TinyModel, noise, valid


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

FLUX3: dict[str, Any] = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "timestep_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def flux3_inputs(frames: int, height: int, width: int, *, condition: int = 0) -> dict[str, Any]:
    grid = torch.cartesian_prod(*[torch.arange(float(size)) for size in (frames, height, width, 1)])
    more = {
        "image_cond_hidden_states": noise(2, condition, 16, seed=1),
        "image_cond_ids": torch.ones(condition, 4).cumsum(0),
    }
    return {
        "hidden_states": noise(2, len(grid), 16),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([0.6, 0.6]),
        "img_ids": grid,
        "txt_ids": torch.arange(9.0)[:, None].expand(-1, 4),
        **(more if condition else {}),
    }


def glm_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    inputs = {name: x for name, x in cogview_inputs(frames, height, width).items() if name != "original_size"}
    tokens = frames * (height // 2) * (width // 2)
    drop = torch.tensor([False, True])
    return {**inputs, "prior_token_id": torch.arange(2 * tokens).view(2, -1) % 16, "prior_token_drop": drop}


def dit_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Its images are square."""
    return {
        "hidden_states": noise(2, 4, width, width),
        "timestep": torch.tensor([600, 600]),
        "class_labels": torch.tensor([3, 7]),
    }


def prx_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": noise(2, 9, 24),
        "attention_mask": valid((9, 4), 9),
    }


def hunyuan_image_inputs(frames: int, height: int, width: int, *, refiner: bool = False) -> dict[str, Any]:
    glyphs = {"encoder_hidden_states_2": noise(2, 4, 16), "encoder_attention_mask_2": valid((1, 4), 4, torch.int64)}
    return {
        "hidden_states": noise(2, 4, frames, height, width) if refiner else noise(2, 4, frames * height, width),
        "timestep": torch.tensor([600.0, 600.0]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 2), 9, torch.int64),
        "guidance": torch.tensor([6000.0, 6000.0]),
        **({} if refiner else glyphs),
    }


HUNYUAN_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "guidance_embeds": True,
}


def hunyuan_dit_inputs(frames: int, height: int, width: int, *, controlled: bool = False) -> dict[str, Any]:
    tokens = frames * (height // 2) * (width // 2)
    angles = noise(tokens, 16)
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "timestep": torch.tensor([600.0, 600.0]),
        "encoder_hidden_states": noise(2, 9, 24),
        "text_embedding_mask": valid((9, 4), 9, torch.int64),
        "encoder_hidden_states_t5": noise(2, 5, 16),
        "text_embedding_mask_t5": valid((5, 2), 5, torch.int64),
        "image_meta_size": torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]] * 2),
        "style": torch.zeros(2, dtype=torch.int64),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "controlnet_block_samples": [noise(2, tokens, 48)] if controlled else None,
    }


HUNYUAN_DIT: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 16,
    "hidden_size": 48,
    "num_layers": 4,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 24,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 20,
    "text_len": 9,
    "text_len_t5": 5,
}


def joyimage_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """The image that is generated, and given ones."""
    return {
        "hidden_states": noise(2, frames, 4, 1, height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
    }


def joyimage_plus_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Patches; the second sample has fewer images."""
    shape = (1, height // 2, width // 2)
    return {
        "hidden_states": noise(2, frames * shape[1] * shape[2], 4, 1, 2, 2),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_hidden_states_mask": valid((9, 4), 9, torch.float32),
        "shape_list": [[shape] * frames, [shape]],
    }


JOYIMAGE: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "text_dim": 24,
    "mlp_width_ratio": 2.0,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}


def nucleus_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, frames * height * width, 16),
        "img_shapes": [(frames, height, width)] * 2,
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_hidden_states_mask": valid((9, 4), 9),
        "timestep": torch.tensor([0.6, 0.6]),
    }


def qwen21_inputs(frames: int, height: int, width: int, *, images: int = 0, cached: bool = False) -> dict[str, Any]:
    """Text around ``images`` given ones of 2 × 2 tokens, each of which stands in one place of the text.

    Args:
        cached: a later step, for which keys of the text and of given images are known.
    """
    rows, prefix = frames * height, 9 + 4 * images
    text = torch.tensor([False] * 5 + [True] * images + [False] * 4)
    cache = QwenImage21KVCache(2) if cached else None
    for layer in [] if cache is None else cache.layer_caches:
        layer.store(noise(2, prefix, 3, 16, seed=1), noise(2, prefix, 3, 16, seed=2))
    return {
        "hidden_states": noise(2, 4 * images + rows * width, 16),
        "encoder_hidden_states": noise(2, len(text), 24),
        "encoder_hidden_states_mask": valid((len(text), len(text) - 2), len(text)),
        "timestep": torch.tensor([0.6, 0.6]),
        "img_shapes": [[*[(1, 2, 2)] * images, (1, rows, width)]] * 2,
        "img_mask": torch.cat([text, torch.ones(rows * width // 4, dtype=torch.bool)]).expand(2, -1),
        "kv_cache": cache,
        "kv_cache_mode": "cached" if cached else None,
    }


QWEN21: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "context_in_dim": 24,
    "mlp_ratio": 2,
    "axes_dims_rope": (4, 6, 6),
}


def sana_inputs(
    frames: int, height: int, width: int, *, pixels: int = 1, guided: bool = False, blocks: int = 0
) -> dict[str, Any]:
    """An image of as many rows of tokens as all frames have together, each of ``pixels`` × ``pixels``."""
    rows = frames * height
    return {
        "hidden_states": noise(2, 4, rows * pixels, width * pixels),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 4), 9, torch.int64),
        "timestep": torch.tensor([600, 600]),
        "guidance": torch.tensor([0.45, 0.45]) if guided else None,
        "controlnet_block_samples": tuple(noise(2, rows * width, 36, seed=i) for i in range(blocks)) or None,
    }


SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 3,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 18,
    "cross_attention_dim": 36,
    "caption_channels": 24,
    "sample_size": 8,
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
    "glm-image": TinyModel(
        "GlmImageTransformer2DModel",
        glm_inputs,
        {
            **{name: value for name, value in COGVIEW.items() if name not in ("pos_embed_max_size", "sample_size")},
            "prior_vq_quantizer_codebook_size": 16,
        },
    ),
    "flux3": TinyModel(
        "Flux3Transformer2DModel",
        flux3_inputs,
        FLUX3,
    ),
    "flux3, given images": TinyModel("Flux3Transformer2DModel", partial(flux3_inputs, condition=5), FLUX3),
    "dit": TinyModel(
        "DiTTransformer2DModel",
        dit_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "num_embeds_ada_norm": 10,
        },
    ),
    "prx": TinyModel(
        "PRXTransformer2DModel",
        prx_inputs,
        {
            "in_channels": 4,
            "context_in_dim": 24,
            "hidden_size": 48,
            "mlp_ratio": 2.0,
            "num_heads": 3,
            "depth": 2,
            "axes_dim": [8, 8],
        },
    ),
    "hunyuanimage": TinyModel(
        "HunyuanImageTransformer2DModel",
        hunyuan_image_inputs,
        {**HUNYUAN_IMAGE, "patch_size": (2, 2), "rope_axes_dim": (6, 6), "text_embed_2_dim": 16},
    ),
    "hunyuanimage refiner": TinyModel(
        "HunyuanImageTransformer2DModel",
        partial(hunyuan_image_inputs, refiner=True),
        {**HUNYUAN_IMAGE, "patch_size": (1, 1, 1), "rope_axes_dim": (4, 4, 4)},
    ),
    "hunyuandit": TinyModel("HunyuanDiT2DModel", hunyuan_dit_inputs, HUNYUAN_DIT),
    "hunyuandit, controlnet": TinyModel("HunyuanDiT2DModel", partial(hunyuan_dit_inputs, controlled=True), HUNYUAN_DIT),
    "joyimage": TinyModel("JoyImageEditTransformer3DModel", joyimage_inputs, {**JOYIMAGE, "rope_type": "mrope"}),
    "joyimage plus": TinyModel("JoyImageEditPlusTransformer3DModel", joyimage_plus_inputs, JOYIMAGE),
    "nucleus": TinyModel(
        "NucleusMoEImageTransformer2DModel",
        nucleus_inputs,
        {
            "in_channels": 16,
            "num_layers": 6,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 6, 6),
            "num_experts": 4,
            "moe_intermediate_dim": 16,
            "capacity_factors": 2.0,
        },
    ),
    "sana": TinyModel("SanaTransformer2DModel", partial(sana_inputs, blocks=1), SANA),
    "sana sprint, positions of patches": TinyModel(
        "SanaTransformer2DModel",
        partial(sana_inputs, pixels=2, guided=True),
        {
            **SANA,
            "patch_size": 2,
            "interpolation_scale": 2,
            "guidance_embeds": True,
            "qk_norm": "rms_norm_across_heads",
        },
    ),
    "qwen-image 2.1": TinyModel("QwenImage21Transformer2DModel", partial(qwen21_inputs, images=1), QWEN21),
    "qwen-image 2.1, no image": TinyModel(
        "QwenImage21Transformer2DModel", qwen21_inputs, {**QWEN21, "causal_condition": False}
    ),
    "qwen-image 2.1, cached": TinyModel(
        "QwenImage21Transformer2DModel", partial(qwen21_inputs, images=2, cached=True), QWEN21
    ),
}
