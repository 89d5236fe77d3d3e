"""Tiny pipelines whose models see given images beside their text: Z-Image Omni, JoyImage, LongCat-Image, OmniGen, Bria
FIBO.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from zoo.tiny.base import noise
from zoo.tiny.pipelines.parts import (
    DECODER,
    IMAGE_WIDTH,
    PROMPT,
    ROPE,
    TEXT_WIDTH,
    TinyPipeline,
    build_vae,
    random_image,
    word_tokenizer,
)
from zoo.tiny.pipelines.shelf_parts import SIZE, SMALL, TEXT, masks, on_shelf, small_vae, wan_vae
from zoo.tiny.random_weights import fill
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision

_IMAGE = random_image(48, 80)

# -- Z-Image Omni: each prompt is a list of its parts before, between and behind the images


def z_image_omni() -> Any:
    """The pipeline gives its VAE bfloat16, whatever that is of."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=2 * IMAGE_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=8,
        num_patches=16,
    )
    return on_shelf(
        "ZImageOmniPipeline",
        "z-image",
        vae=small_vae().bfloat16(),
        siglip=fill(transformers.Siglip2VisionModel(config), seed=7),
        siglip_processor=transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16),
        config={"siglip_feat_dim": IMAGE_WIDTH},
    )


def _parts_of_prompts(prompt: tuple[int, ...], negative: tuple[int, ...]) -> dict[str, Any]:
    """Of so many tokens each."""
    lengths = {"prompt": prompt, "negative_prompt": negative}
    of_each = {f"{kind}_embeds": [[noise(n, TEXT_WIDTH) for n in parts]] for kind, parts in lengths.items()}
    return {"prompt": None, **of_each}


# -- JoyImage

_MASKS = masks("embeds_mask", dtype=torch.int64)


def joyimage() -> Any:
    pipe = on_shelf("JoyImageEditPipeline", "joyimage", vae=wan_vae())
    # It takes no other than sizes of a megapixel.
    pipe.vae_image_processor.get_default_height_width = lambda *_: (48, 80)
    return pipe


def joyimage_plus() -> Any:
    """``encode_prompt_multiple_images`` is in place of Qwen 3 VL: given embeddings without a prompt, the pipeline
    itself fails.
    """
    pipe = on_shelf("JoyImageEditPlusPipeline", "joyimage plus", vae=wan_vae())
    pipe.image_processor.get_default_height_width = lambda *_: (48, 80)

    def encode(prompt: list[str], **_: Any) -> tuple[Tensor, Tensor]:
        kind = "prompt" if "circle" in prompt[0] else "negative_prompt"
        return TEXT[f"{kind}_embeds"], _MASKS[f"{kind}_embeds_mask"]

    pipe.encode_prompt_multiple_images = encode
    return pipe


# -- LongCat-Image


def _qwen_vl(tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.Qwen2_5_VLConfig(
        text_config={"vocab_size": len(tokenizer), "rope_parameters": ROPE, **DECODER, **marks},
        vision_config={
            "depth": 1,
            "hidden_size": 24,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
    )
    return fill(transformers.Qwen2_5_VLForConditionalGeneration(config), seed=5)


def longcat_image(cls: str = "LongCatImagePipeline", text_processor: Any = None) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    # It takes no other number of channels.
    vae = fill(build_vae(16), seed=2)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    pipe = on_shelf(
        cls,
        "longcat-image",
        vae=vae,
        text_encoder=_qwen_vl(tokenizer),
        tokenizer=tokenizer,
        text_processor=text_processor,
        config={"in_channels": 64},
    )
    # Each prompt is filled up to as many tokens.
    pipe.tokenizer_max_length = 13
    return pipe


class _Images:
    """What the pipeline takes of Qwen's processor, which needs torchvision."""

    image_processor = transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 84)


def longcat_image_edit() -> Any:
    """It scales what it is given to a megapixel. Here the VAE sees a sixteenth of the height and of the width, Qwen six
    tokens.
    """
    pipe = longcat_image("LongCatImageEditPipeline", _Images())
    encode = pipe.vae.encode
    pipe.vae.encode = lambda pixels: encode(functional.avg_pool2d(pixels, 16))
    pipe.vae_scale_factor *= 16
    pipe.image_processor = VaeImageProcessor(vae_scale_factor=2 * pipe.vae_scale_factor)
    return pipe


# -- OmniGen


def omnigen() -> Any:
    stand_in_for_torchvision()
    tokenizer = word_tokenizer()
    return on_shelf("OmniGenPipeline", "omnigen", tokenizer=tokenizer, config={"vocab_size": len(tokenizer)})


# -- Bria FIBO


def bria_fibo(cls: str = "BriaFiboPipeline") -> Any:
    """Text is the last two layers of its encoder beside each other, and to each block goes one of them."""
    tokenizer = word_tokenizer()
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **{**DECODER, "hidden_size": 20})
    return on_shelf(
        cls,
        "bria fibo",
        vae=wan_vae(),
        text_encoder=fill(transformers.LlamaModel(config), seed=5),
        tokenizer=tokenizer,
        config={"in_channels": 4, "joint_attention_dim": 40},
    )


# An empty prompt is a token of Llama's that the tokenizer here does not have.
_FIBO = {"height": 96, "width": 160, "negative_prompt": "a blue square"}

EDIT_PIPELINES: dict[str, TinyPipeline] = {
    "z-image omni": TinyPipeline(z_image_omni, {**SMALL, **_parts_of_prompts((9,), (5,))}),
    "z-image omni, image": TinyPipeline(
        z_image_omni, {**SMALL, **_parts_of_prompts((5, 9, 3), (5, 4, 3)), "image": [random_image(64, 72)]}
    ),
    "joyimage": TinyPipeline(joyimage, {**SIZE, **TEXT, **_MASKS}),
    "joyimage, image": TinyPipeline(joyimage, {**SIZE, **TEXT, **_MASKS, "image": _IMAGE}),
    "joyimage plus": TinyPipeline(joyimage_plus, {**SIZE, "images": [_IMAGE, random_image(48, 80, seed=2)]}),
    # Rewriting prompts is Qwen's work alone.
    "longcat-image": TinyPipeline(longcat_image, {**SMALL, "enable_prompt_rewrite": False}),
    "longcat-image, editing": TinyPipeline(longcat_image_edit, {"image": _IMAGE}),
    "omnigen": TinyPipeline(omnigen, SIZE),
    # Three branches: of text and image, of neither, and of the image.
    "omnigen, image": TinyPipeline(
        omnigen,
        {
            **SIZE,
            "prompt": "<img><|image_1|></img> a large red circle",
            "input_images": [_IMAGE],
            "max_input_image_size": 128,
        },
    ),
    "bria fibo": TinyPipeline(bria_fibo, _FIBO),
    "bria fibo, editing": TinyPipeline(
        lambda: bria_fibo("BriaFiboEditPipeline"),
        {**_FIBO, "prompt": {"edit_instruction": PROMPT}, "image": random_image(96, 160)},
    ),
}
