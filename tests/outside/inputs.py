"""The models of the table: how each is built, and the inputs of one call at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.outside import official, others
from zoo.tiny.base import fill, noise

# Calls of the first two sizes propose a plan, and a call of the last size is compared. Neither 2 nor 3 ranks divide 35
# patches, 175 patches of a video, or 37 token ids.
GRIDS = ((5, 5), (5, 9), (5, 7))
FRAMES = 5
LENGTHS = (29, 43, 37)
IMAGE_TOKENS, VIDEO_TOKENS = 5 * 7, FRAMES * 5 * 7

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {**_SMALL, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 128}


@dataclass(frozen=True)
class Builder:
    """A function that builds a model, and a function that returns its inputs at size 0, 1 or 2 of :data:`GRIDS`."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]


def ids(size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(LENGTHS[size])
    return {"input_ids": torch.randint(3, 64, (2, LENGTHS[size]), generator=generator)}


def padded(size: int) -> dict[str, Any]:
    """Return token ids of two prompts. The second is five tokens shorter, padded on the right."""
    mask = torch.ones(2, LENGTHS[size], dtype=torch.long)
    mask[1, -5:] = 0
    return {**ids(size), "attention_mask": mask}


def flux(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    return {
        "img": noise(2, height * width, 16),
        "img_ids": F.pad(official.grid(height, width).float(), (1, 0)).expand(2, -1, -1),
        "txt": noise(2, 9, 20),
        "txt_ids": torch.zeros(2, 9, 3),
        "timesteps": noise(2),
        "y": noise(2, 12),
    }


def wan(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    video = noise(4, FRAMES, 2 * height, 2 * width)
    return {"x": [video], "t": noise(1), "context": [noise(7, 20)], "seq_len": FRAMES * height * width}


def hunyuan(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    angles = noise(FRAMES * height * width, official.HEAD_DIM // 2)
    return {
        "x": noise(1, 4, FRAMES, 2 * height, 2 * width),
        "t": noise(1),
        "text_states": noise(1, 7, 20),
        "text_mask": (torch.arange(7) < 5)[None],
        "text_states_2": noise(1, 12),
        "freqs_cos": angles.cos(),
        "freqs_sin": angles.sin(),
    }


def mochi(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    mask = (torch.arange(9) < 7)[None]
    return {
        "x": noise(1, 4, FRAMES, 2 * height, 2 * width),
        "sigma": noise(1),
        "y_feat": [noise(1, 9, 20)],
        "y_mask": [mask],
        "packed_indices": official.compute_packed_indices(mask, FRAMES * height * width),
    }


def sd35(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    return {"x": noise(2, 4, 2 * height, 2 * width), "t": noise(2), "y": noise(2, 12), "context": noise(2, 9, 20)}


def dit(size: int) -> dict[str, Any]:
    return {"x": noise(2, 4, 14, 14), "t": noise(2), "y": torch.tensor([1, 2])}


def timm(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    return {"x": noise(2, 3, 4 * height, 4 * (width - 1))}


def comfy(size: int) -> dict[str, Any]:
    height, width = GRIDS[size]
    x = noise(2, 4, 2 * height, 2 * width)
    return {"x": x, "timestep": noise(2), "context": noise(2, 9, 20), "y": noise(2, 12)}


def of_transformers(cls: str, config: str, options: dict[str, Any], inputs: Callable[[int], dict[str, Any]]) -> Builder:
    return Builder(lambda: getattr(transformers, cls)(getattr(transformers, config)(**options)), inputs)


BUILDERS = {
    "Qwen3": of_transformers("Qwen3Model", "Qwen3Config", {**_DECODER, "head_dim": 8}, ids),
    "ModernBERT, sliding window": of_transformers(
        "ModernBertModel",
        "ModernBertConfig",
        {**_TEXT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 24, "global_attn_every_n_layers": 2},
        ids,
    ),
    "Llama, padded": of_transformers("LlamaModel", "LlamaConfig", _DECODER, padded),
    "Llama, decoding": of_transformers("LlamaForCausalLM", "LlamaConfig", _DECODER, ids),
    "Llama, training": of_transformers("LlamaForCausalLM", "LlamaConfig", _DECODER, ids),
    "FLUX": Builder(official.Flux, flux),
    "Wan 2.1": Builder(official.WanModel, wan),
    "HunyuanVideo": Builder(official.HYVideoDiffusionTransformer, hunyuan),
    "Mochi": Builder(official.AsymmDiTJoint, mochi),
    "Stable Diffusion 3.5": Builder(official.MMDiTX, sd35),
    "DiT": Builder(official.DiT, dit),
    "timm ViT": Builder(others.VisionTransformer, timm),
    "ComfyUI's FLUX": Builder(others.ComfyFlux, comfy),
}


def build(name: str) -> nn.Module:
    """Return the model in eval mode, with random parameters that are equal in every process."""
    return fill(BUILDERS[name].make(), seed=1)


def inputs_of(name: str, size: int = -1) -> dict[str, Any]:
    return BUILDERS[name].inputs(size % len(GRIDS))
