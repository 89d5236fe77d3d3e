"""Tiny pipelines of image editing: Z-Image Omni, JoyImage, LongCat-Image, OmniGen, Bria FIBO."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from zoo.tiny.base import noise
from zoo.tiny.pipelines.image import encode_a_sixteenth
from zoo.tiny.pipelines.parts import (
    IMAGE,
    IMAGE_WIDTH,
    PROMPT,
    SIZE,
    SMALL,
    TEXT,
    TEXT_WIDTH,
    VISION,
    TinyPipeline,
    decoder,
    from_transformers,
    masks,
    qwen_vl,
    random_image,
    small_vae,
    tiny_pipe,
    wan_vae,
    word_tokenizer,
)
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision

# -- Z-Image Omni: each prompt is a list of its parts before, between and after the images


def z_image_omni() -> Any:
    """Build the pipeline. It gives its VAE bfloat16, whatever dtype the VAE has."""
    return tiny_pipe(
        "ZImageOmniPipeline",
        "z-image",
        vae=small_vae().bfloat16(),
        siglip=from_transformers("Siglip2VisionModel", "Siglip2VisionConfig", 7, **VISION, num_patches=16),
        siglip_processor=transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16),
        config={"siglip_feat_dim": IMAGE_WIDTH},
    )


def _parts_of_prompts(prompt: tuple[int, ...], negative: tuple[int, ...]) -> dict[str, Any]:
    """Return embeddings of both prompts, whose parts have these numbers of tokens."""
    lengths = {"prompt": prompt, "negative_prompt": negative}
    of_each = {f"{kind}_embeds": [[noise(n, TEXT_WIDTH) for n in parts]] for kind, parts in lengths.items()}
    return {"prompt": None, **of_each}


# -- JoyImage

_MASKS = masks("embeds_mask", torch.int64)


def joyimage() -> Any:
    pipe = tiny_pipe("JoyImageEditPipeline", "joyimage", vae=wan_vae())
    # The pipeline chooses sizes of a megapixel.
    pipe.vae_image_processor.get_default_height_width = lambda *_: (48, 80)
    return pipe


def joyimage_plus() -> Any:
    """Build the pipeline with a function instead of Qwen 3 VL: it fails on embeddings without a prompt."""
    pipe = tiny_pipe("JoyImageEditPlusPipeline", "joyimage plus", vae=wan_vae())
    pipe.image_processor.get_default_height_width = lambda *_: (48, 80)

    def encode(prompt: list[str], **_: Any) -> tuple[Tensor, Tensor]:
        kind = "prompt" if "circle" in prompt[0] else "negative_prompt"
        return TEXT[f"{kind}_embeds"], _MASKS[f"{kind}_embeds_mask"]

    pipe.encode_prompt_multiple_images = encode
    return pipe


# -- LongCat-Image


def longcat_image(cls: str = "LongCatImagePipeline", text_processor: Any = None) -> Any:
    tokenizer = word_tokenizer()
    marks = {"vision_start_token_id": "<|vision_start|>", "image_token_id": "<|image_pad|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    ids |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    pipe = tiny_pipe(
        cls,
        "longcat-image",
        # The pipeline takes no other number of channels.
        vae=small_vae(16),
        text_encoder=qwen_vl(tokenizer, 24, **ids),
        tokenizer=tokenizer,
        text_processor=text_processor,
        config={"in_channels": 64},
    )
    # The pipeline pads each prompt to this number of tokens.
    pipe.tokenizer_max_length = 13
    return pipe


class _Images:
    """The part of Qwen's processor that the pipeline uses. The processor itself needs torchvision."""

    image_processor = transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 84)


def longcat_image_edit() -> Any:
    """Build a pipeline that scales given images to a megapixel. Its VAE sees 1/16 of each side, Qwen six tokens."""
    return encode_a_sixteenth(longcat_image("LongCatImageEditPipeline", _Images()))


# -- OmniGen


def omnigen() -> Any:
    stand_in_for_torchvision()
    tokenizer = word_tokenizer()
    return tiny_pipe("OmniGenPipeline", "omnigen", tokenizer=tokenizer, config={"vocab_size": len(tokenizer)})


# -- Bria FIBO


def bria_fibo(cls: str = "BriaFiboPipeline") -> Any:
    """Build the pipeline. Its text is the last two layers of the encoder, concatenated; each block gets one layer."""
    llama = decoder("LlamaModel", "LlamaConfig", hidden_size=20)
    return tiny_pipe(cls, "bria fibo", vae=wan_vae(), config={"in_channels": 4, "joint_attention_dim": 40}, **llama)


# The pipeline encodes an empty prompt as a token of Llama that the tokenizer here does not have.
_FIBO = {"height": 96, "width": 160, "negative_prompt": "a blue square"}

EDIT_PIPELINES: dict[str, TinyPipeline] = {
    "z-image omni": TinyPipeline(z_image_omni, SMALL, _parts_of_prompts((9,), (5,))),
    "z-image omni, image": TinyPipeline(
        z_image_omni, SMALL, _parts_of_prompts((5, 9, 3), (5, 4, 3)), image=[random_image(64, 72)]
    ),
    "joyimage": TinyPipeline(joyimage, SIZE, TEXT, _MASKS),
    "joyimage, image": TinyPipeline(joyimage, SIZE, TEXT, _MASKS, image=IMAGE),
    "joyimage plus": TinyPipeline(joyimage_plus, SIZE, images=[IMAGE, random_image(48, 80, seed=2)]),
    # Rewriting prompts is Qwen's work alone.
    "longcat-image": TinyPipeline(longcat_image, SMALL, enable_prompt_rewrite=False),
    "longcat-image, editing": TinyPipeline(longcat_image_edit, image=IMAGE),
    "omnigen": TinyPipeline(omnigen, SIZE),
    # Three branches: of text and image, of neither, and of the image.
    "omnigen, image": TinyPipeline(
        omnigen,
        SIZE,
        prompt="<img><|image_1|></img> a large red circle",
        input_images=[IMAGE],
        max_input_image_size=128,
    ),
    "bria fibo": TinyPipeline(bria_fibo, _FIBO),
    "bria fibo, editing": TinyPipeline(
        lambda: bria_fibo("BriaFiboEditPipeline"),
        {**_FIBO, "prompt": {"edit_instruction": PROMPT}, "image": random_image(96, 160)},
    ),
}
