"""Tiny transformers of images. Those in the second half join text and image to one sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor

from zoo.tiny.base import (
    HEAD_DIM,
    IMAGE_WIDTH,
    SECOND_TEXT_WIDTH,
    TEXT_WIDTH,
    WIDTH,
    TinyModel,
    grid,
    image,
    inputs,
    noise,
    num_patches,
    residuals,
    rotary,
    samples,
    tokens,
    valid,
)

# -- Relatives of FLUX: packed tokens and their positions.

packed_inputs = partial(
    inputs,
    tokens(16),
    0.6,
    img_ids=lambda frames, height, width: grid(1, frames * height, width),
    txt_ids=torch.arange(9.0)[:, None].expand(-1, 3),
)
controlled_inputs = partial(packed_inputs, controlnet_block_samples=residuals(2, WIDTH, patch=1))
PACKED = {"in_channels": 16, "out_channels": 16}
BRIA = {"in_channels": 16, "pooled_projection_dim": None}
FLUX3 = {"in_channels": 16, "axes_dims_rope": (8, 8, 8, 8)}


def joint_mask(frames: int, height: int, width: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return a mask ``[2, text + image]``. In the second sample 4 of 9 text tokens are valid."""
    return torch.cat([valid((9, 4), dtype=dtype), torch.ones(2, frames * height * width, dtype=dtype)], dim=1)


def fibo_mask(frames: int, height: int, width: int) -> dict[str, Tensor]:
    return {"attention_mask": joint_mask(frames, height, width)[:, None, None, :]}


flux3_inputs = partial(
    inputs, tokens(16), 0.6, img_ids=lambda *sizes: grid(*sizes, 1), txt_ids=torch.arange(9.0)[:, None].expand(-1, 4)
)


# -- CogView.

_MASK = valid((9, 4), dtype=torch.int64)
_SIZE = torch.tensor([[96.0, 160.0]] * 2)
_SIZES = {"target_size": _SIZE, "crop_coords": torch.zeros(2, 2)}
cogview_inputs = inputs(image, original_size=_SIZE, **_SIZES)
glm_inputs = inputs(
    image,
    prior_token_id=lambda *sizes: torch.arange(2 * num_patches(*sizes)).view(2, -1) % 16,
    prior_token_drop=torch.tensor([False, True]),
    **_SIZES,
)
COGVIEW = {"sample_size": 32, "pos_embed_max_size": 32}


def dit_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return square images."""
    timestep, labels = torch.tensor([600, 600]), torch.tensor([3, 7])
    return {"hidden_states": noise(2, 4, width, width), "timestep": timestep, "class_labels": labels}


# -- HunyuanImage, HunyuanDiT, JoyImage.

hunyuan_image_inputs = partial(
    inputs,
    timestep=600.0,
    encoder_attention_mask=valid((9, 2), dtype=torch.int64),
    guidance=torch.tensor([6000.0, 6000.0]),
)
GLYPHS = {
    "encoder_hidden_states_2": noise(2, 4, SECOND_TEXT_WIDTH),
    "encoder_attention_mask_2": valid((1, 4), 4, torch.int64),
}
HUNYUAN_IMAGE = {"guidance_embeds": True}
_T5 = {
    "encoder_hidden_states_t5": noise(2, 5, SECOND_TEXT_WIDTH),
    "text_embedding_mask_t5": valid((5, 2), 5, torch.int64),
}
_META = torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]] * 2)
_STYLE = {"image_meta_size": _META, "style": torch.zeros(2, dtype=torch.int64)}
hunyuan_dit_inputs = partial(inputs, image, 600.0, text_embedding_mask=_MASK, image_rotary_emb=rotary, **_T5, **_STYLE)
HUNYUAN_DIT = {"patch_size": 2, "sample_size": 16, "num_layers": 4, "mlp_ratio": 2.0, "cross_attention_dim": TEXT_WIDTH}


def joyimage_plus_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return patches. The second sample has fewer images."""
    shape = (1, height // 2, width // 2)
    return samples(
        noise(2, num_patches(frames, height, width), 4, 1, 2, 2),
        encoder_hidden_states_mask=valid((9, 4), dtype=torch.float32),
        shape_list=[[shape] * frames, [shape]],
    )


# -- Qwen-Image 2.1.


def qwen21_inputs(frames: int, height: int, width: int, *, images: int = 0, cached: bool = False) -> dict[str, Any]:
    """Return text around ``images`` given images of 2 × 2 tokens. Each image takes one position of the text.

    Args:
        cached: A later step, which is given the keys of the text and of the given images.
    """
    rows, prefix = frames * height, 9 + 4 * images
    text = torch.tensor([False] * 5 + [True] * images + [False] * 4)
    cache = QwenImage21KVCache(2) if cached else None
    for layer in [] if cache is None else cache.layer_caches:
        layer.store(noise(2, prefix, 3, HEAD_DIM, seed=1), noise(2, prefix, 3, HEAD_DIM, seed=2))
    return samples(
        noise(2, 4 * images + rows * width, 16),
        0.6,
        encoder_hidden_states=noise(2, len(text), TEXT_WIDTH),
        encoder_hidden_states_mask=valid((len(text), len(text) - 2), len(text)),
        img_shapes=[[*[(1, 2, 2)] * images, (1, rows, width)]] * 2,
        img_mask=torch.cat([text, torch.ones(rows * width // 4, dtype=torch.bool)]).expand(2, -1),
        kv_cache=cache,
        kv_cache_mode="cached" if cached else None,
    )


QWEN21 = {**PACKED, "mlp_ratio": 2}

# -- Sana.


def sana_inputs(frames: int, height: int, width: int, *, pixels: int = 1, **more: Any) -> dict[str, Any]:
    """Return an image as high as all frames together. Each token is ``pixels`` × ``pixels`` latents."""
    latents = image(frames, height * pixels, width * pixels)
    return inputs(latents, encoder_attention_mask=_MASK, **more)(frames, height, width)


SANA = {"num_layers": 3, "mlp_ratio": 2.0, "sample_size": 8}

_chroma = partial(TinyModel, "ChromaTransformer2DModel", **PACKED)
_flux3 = partial(TinyModel, "Flux3Transformer2DModel", **FLUX3)
_hunyuan_image = partial(TinyModel, "HunyuanImageTransformer2DModel", **HUNYUAN_IMAGE)
_hunyuan_dit = partial(TinyModel, "HunyuanDiT2DModel", **HUNYUAN_DIT, text_len=9, text_len_t5=5)
_sana = partial(TinyModel, "SanaTransformer2DModel", **SANA)
_qwen21 = partial(TinyModel, "QwenImage21Transformer2DModel", **QWEN21)

IMAGE_MODELS = {
    # The pipeline passes a mask of numbers, which attention adds.
    "chroma": _chroma(packed_inputs(attention_mask=partial(joint_mask, dtype=torch.float32))),
    "chroma, controlnet": _chroma(
        controlled_inputs(controlnet_single_block_samples=lambda *sizes: residuals(2, WIDTH, patch=1)(*sizes)[::-1])
    ),
    "ovis": TinyModel("OvisImageTransformer2DModel", packed_inputs(), **PACKED),
    "longcat-image": TinyModel("LongCatImageTransformer2DModel", packed_inputs(), in_channels=16),
    "bria": TinyModel("BriaTransformer2DModel", controlled_inputs(), BRIA),
    "bria fibo": TinyModel(
        "BriaFiboTransformer2DModel",
        packed_inputs(
            text_encoder_layers=[noise(2, 9, IMAGE_WIDTH, seed=i) for i in range(4)], joint_attention_kwargs=fibo_mask
        ),
        BRIA,
    ),
    "cogview3+": TinyModel("CogView3PlusTransformer2DModel", cogview_inputs, COGVIEW),
    "cogview4": TinyModel("CogView4Transformer2DModel", cogview_inputs, COGVIEW, rope_axes_dim=(16, 16)),
    "glm-image": TinyModel("GlmImageTransformer2DModel", glm_inputs),
    "flux3": _flux3(flux3_inputs()),
    "flux3, given images": _flux3(
        flux3_inputs(image_cond_hidden_states=noise(2, 5, 16, seed=1), image_cond_ids=torch.ones(5, 4).cumsum(0))
    ),
    "dit": TinyModel("DiTTransformer2DModel", dit_inputs, out_channels=8, sample_size=8, num_embeds_ada_norm=10),
    "prx": TinyModel(
        "PRXTransformer2DModel", inputs(image, 0.6, attention_mask=valid((9, 4))), mlp_ratio=2.0, axes_dim=[16, 16]
    ),
    "hunyuanimage": _hunyuan_image(hunyuan_image_inputs(image, **GLYPHS), patch_size=(2, 2), rope_axes_dim=(16, 16)),
    "hunyuanimage refiner": _hunyuan_image(
        hunyuan_image_inputs(lambda *sizes: noise(2, 4, *sizes)), patch_size=(1, 1, 1), text_embed_2_dim=None
    ),
    "hunyuandit": _hunyuan_dit(hunyuan_dit_inputs()),
    "hunyuandit, controlnet": _hunyuan_dit(hunyuan_dit_inputs(controlnet_block_samples=residuals(1, WIDTH))),
    # These are the generated image and given ones.
    "joyimage": TinyModel(
        "JoyImageEditTransformer3DModel",
        inputs(lambda frames, height, width: noise(2, frames, 4, 1, height, width)),
        {"rope_dim_list": [8, 12, 12], "rope_type": "mrope"},
    ),
    "joyimage plus": TinyModel("JoyImageEditPlusTransformer3DModel", joyimage_plus_inputs, rope_dim_list=[8, 12, 12]),
    "nucleus": TinyModel(
        "NucleusMoEImageTransformer2DModel",
        inputs(tokens(16), 0.6, encoder_hidden_states_mask=valid((9, 4)), img_shapes=lambda *sizes: [sizes, sizes]),
        {**PACKED, "num_layers": 6, "num_attention_heads": 4, "capacity_factors": 2.0},
    ),
    "sana": _sana(partial(sana_inputs, controlnet_block_samples=lambda f, h, w: (noise(2, f * h * w, WIDTH),))),
    "sana sprint, positions of patches": _sana(
        partial(sana_inputs, pixels=2, guidance=torch.tensor([0.45, 0.45])),
        {"patch_size": 2, "interpolation_scale": 2, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"},
    ),
    "qwen-image 2.1": _qwen21(partial(qwen21_inputs, images=1)),
    "qwen-image 2.1, no image": _qwen21(qwen21_inputs, causal_condition=False),
    "qwen-image 2.1, cached": _qwen21(partial(qwen21_inputs, images=2, cached=True)),
}


# -- Z-Image: lists of samples.


def z_image_inputs(frames: int, height: int, width: int, *, controlled: bool = False) -> dict[str, Any]:
    """Return inputs whose text and image are each padded to a multiple of 32 tokens."""
    total = 32 + -(-num_patches(frames, height, width) // 32) * 32
    return {
        "x": [noise(4, 1, frames * height, width, seed=i) for i in range(2)],
        "t": torch.tensor([0.6, 0.6]),
        "cap_feats": [noise(9, TEXT_WIDTH), noise(4, TEXT_WIDTH)],
        **({"controlnet_block_samples": {0: noise(2, total, WIDTH)}} if controlled else {}),
    }


def z_image_edit_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return samples with a given image and the generated one."""
    return {
        "x": [[noise(4, 1, 4, 4, seed=i), noise(4, 1, frames * height, width, seed=i)] for i in range(2)],
        "t": torch.tensor([0.6, 0.6]),
        "cap_feats": [[noise(n, TEXT_WIDTH, seed=i) for n in (5, 9, 3)] for i in range(2)],
        "siglip_feats": [None, None],
        "image_noise_mask": [[0, 1]] * 2,
    }


Z_IMAGE = {"axes_dims": [8, 12, 12], "axes_lens": [160, 64, 64]}

# -- Bria FIBO 2: the model makes tokens of the texts, fewer of the shorter one.

fibo2_inputs = partial(
    inputs, image, 0.6, encoder_hidden_states=noise(2, 2, 9, TEXT_WIDTH), encoder_attention_mask=valid((9, 4))
)
FIBO2 = {"injection_layer_ids": (1,), "max_num_gist_tokens": 7, "axes_lens": (16, 64, 64)}


def ideogram_inputs(frames: int, height: int, width: int, *, by_token: bool = False) -> dict[str, Any]:
    """Return text, padded on the left, and image, in tensors of one length."""
    positions = grid(frames, height, width).long()
    total = 9 + len(positions)
    timestep = torch.tensor([0.6, 0.6])
    return {
        "hidden_states": noise(2, total, 16),
        "timestep": timestep[:, None] * (torch.arange(total) >= 9) if by_token else timestep,
        "encoder_hidden_states": noise(2, total, TEXT_WIDTH),
        "position_ids": torch.cat([torch.arange(9)[:, None].expand(-1, 3), 20 + positions]).expand(2, -1, -1),
        "segment_ids": valid((total, total - 5), total, torch.int64).flip(1),
        "indicator": torch.tensor([3] * 9 + [2] * len(positions)).expand(2, -1),
    }


IDEOGRAM = {"in_channels": 16, "mrope_section": (8, 4, 4)}


def ernie_inputs(*size: int) -> dict[str, Any]:
    text = {"text_bth": noise(2, 9, TEXT_WIDTH), "text_lens": torch.tensor([9, 4])}
    return {"hidden_states": image(*size), "timestep": torch.tensor([600.0, 600.0]), **text}


def omnigen_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Return text with a given image of four tokens, the time, and the image. The text is causal, and nothing else."""
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


_KREA = {"encoder_hidden_states": noise(2, 9, 3, TEXT_WIDTH), "encoder_attention_mask": valid((9, 4))}
krea_inputs = inputs(tokens(16), 0.6, position_ids=lambda *sizes: torch.cat([torch.zeros(9, 3), grid(*sizes)]), **_KREA)
_z_image = partial(TinyModel, "ZImageTransformer2DModel", **Z_IMAGE)
_fibo2 = partial(TinyModel, "BriaFibo2Transformer2DModel", **FIBO2)
_ideogram = partial(TinyModel, "Ideogram4Transformer2DModel", **IDEOGRAM)
_ROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}

STREAM_MODELS = {
    "z-image": _z_image(z_image_inputs),
    "z-image, controlnet": _z_image(partial(z_image_inputs, controlled=True)),
    "z-image, editing": _z_image(z_image_edit_inputs),
    "bria fibo 2": _fibo2(fibo2_inputs()),
    "bria fibo 2, editing": _fibo2(fibo2_inputs(context_latents=[noise(2, 4, 4, 6, seed=i) for i in range(2)])),
    "krea 2": TinyModel("Krea2Transformer2DModel", krea_inputs, in_channels=16, num_attention_heads=4),
    "ernie-image": TinyModel("ErnieImageTransformer2DModel", ernie_inputs, patch_size=2),
    "ideogram 4": _ideogram(ideogram_inputs),
    "ideogram 4, a time step for each token": _ideogram(partial(ideogram_inputs, by_token=True)),
    "omnigen": TinyModel(
        "OmniGenTransformer2DModel",
        omnigen_inputs,
        {"num_key_value_heads": 3, "pad_token_id": 0, "pos_embed_max_size": 24, "rope_scaling": _ROPE},
        {"max_position_embeddings": 128, "original_max_position_embeddings": 64},
    ),
}
