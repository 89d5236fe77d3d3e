"""Tiny pipelines of images, and of image editing."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor
from torch.nn import functional

from zoo.flux.models import CLIP_WIDTH, T5_WIDTH
from zoo.tiny.base import noise
from zoo.tiny.pipelines.components import (
    IMAGE,
    IMAGE_WIDTH,
    LATENT_CHANNELS,
    MASK,
    PROMPT,
    SIZE,
    SMALL,
    SMALL_IMAGE,
    SMALL_MASK,
    TEXT,
    TEXT_WIDTH,
    VISION,
    TinyPipeline,
    clip_and_t5,
    decoder,
    embeddings,
    from_transformers,
    kl_vae,
    masks,
    pooled,
    qwen_vl,
    random_image,
    random_model,
    small_vae,
    t5,
    tiny_pipe,
    wan_vae,
    word_tokenizer,
)
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision
from zoo.tiny.transformers.registry import MODELS

# -- Qwen-Image


def qwen_image(cls: str = "QwenImagePipeline", *, layers: bool = False, **components: Any) -> Any:
    """Build Qwen-Image; with ``layers`` the pipeline separates an image with transparency into layers."""
    config = {"use_additional_t_cond": True, "use_layer3d_rope": True, "in_channels": 32, "out_channels": 8}
    # Colours, and transparency.
    channels = {"input_channels": 4 if layers else 3, "latent_channels": 8 if layers else 4}
    tokenizer = word_tokenizer()
    return tiny_pipe(
        cls,
        "qwen-image",
        config=config if layers else None,
        vae=wan_vae("AutoencoderKLQwenImage", **channels),
        text_encoder=qwen_vl(tokenizer),
        tokenizer=tokenizer,
        **components,
    )


def qwen_image_edit(cls: str, *, layers: bool = False) -> Any:
    """Build a pipeline that scales given images to a megapixel; its VAE sees 1/16 of their height and width."""
    return encode_a_sixteenth(qwen_image(cls, layers=layers))


def encode_a_sixteenth(pipe: Any) -> Any:
    """Let the VAE of ``pipe`` encode a sixteenth of the height and width of images. Returns ``pipe``."""
    encode = pipe.vae.encode

    def encode_smaller(pixels: torch.Tensor) -> Any:
        pool = functional.avg_pool2d if pixels.ndim == 4 else functional.avg_pool3d
        return encode(pool(pixels, (1, 16, 16)[-(pixels.ndim - 2) :]))

    pipe.vae.encode = encode_smaller
    pipe.vae_scale_factor *= 16
    pipe.image_processor = VaeImageProcessor(vae_scale_factor=2 * pipe.vae_scale_factor)
    return pipe


def qwen_controlled(cls: str, mask_channels: int = 0) -> Any:
    config = {**MODELS["qwen-image"].config, "num_layers": 1, "extra_condition_channels": mask_channels}
    config.pop("guidance_embeds", None)
    return qwen_image(cls, controlnet=random_model("QwenImageControlNetModel", 8, **config))


# -- pipelines that are given embeddings, not text


def stable_diffusion_3(cls: str = "StableDiffusion3Pipeline", *, mask_channels: int = 0) -> Any:
    """Build 3.5 medium, with a ControlNet if the class takes one."""
    parts, config = {}, {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}
    if "ControlNet" in cls:
        controlled = {**MODELS["sd3"].config, "num_layers": 2, "extra_conditioning_channels": mask_channels}
        parts["controlnet"] = random_model("SD3ControlNetModel", 8, qk_norm="rms_norm", **controlled)
    # Inpainting takes no other number.
    channels = 16 if "Inpaint" in cls and "ControlNet" not in cls else 4
    config |= {"in_channels": channels, "out_channels": channels}
    return tiny_pipe(cls, "sd3", config=config, vae=small_vae(channels), **parts)


def hidream() -> Any:
    config = {"caption_channels": [TEXT_WIDTH, TEXT_WIDTH]}
    pipe = tiny_pipe("HiDreamImagePipeline", "hidream", config=config, vae=small_vae())
    # The pipeline scales what it is asked for to an area that follows from this size.
    pipe.default_sample_size = 8
    return pipe


def pixart(cls: str = "PixArtSigmaPipeline", **components: Any) -> Any:
    config = {"caption_channels": T5_WIDTH, "sample_size": 64}
    scheduler = diffusers.DDIMScheduler()
    return tiny_pipe(cls, "pixart", config=config, vae=small_vae(), scheduler=scheduler, **t5(), **components)


# -- FLUX


def visual_cloze(cls: str) -> Any:
    """Build VisualCloze, which runs FLUX.1 Fill."""
    channels = 4 * LATENT_CHANNELS
    config = {
        # Noise, the images without the missing ones, and their mask: 8 × 8 pixels of a token.
        "in_channels": 2 * channels + 64,
        "out_channels": channels,
        "joint_attention_dim": T5_WIDTH,
        "pooled_projection_dim": CLIP_WIDTH,
    }
    return tiny_pipe(cls, "flux", config=config, vae=small_vae(), resolution=48, **clip_and_t5())


def flux2(cls: str) -> Any:
    # The text encoder of FLUX.2 [dev], Mistral 3, and its processor cannot be made small in process.
    dev = cls == "Flux2Pipeline"
    text = {} if dev else decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=12)
    config = {"joint_attention_dim": 3 * TEXT_WIDTH, "guidance_embeds": dev}
    return tiny_pipe(cls, "flux2", config=config, vae=kl_vae("AutoencoderKLFlux2"), **text)


_SHORT_TEXT = {"max_sequence_length": 13}
_IMAGE = {"image": IMAGE}
_QWEN = {**SIZE, "negative_prompt": "a blue square"}
# 3 × 5 image tokens of 8 × 8 pixels; nine of 13 text tokens are valid, and five of the negative ones.
_EMBEDDINGS = embeddings(13, TEXT_WIDTH)
_SMALL = {**SMALL, **_EMBEDDINGS}
_MASKED = {**_SMALL, **masks("attention_mask", total=13)}
_SD3 = {**_SMALL, **pooled()}
_PIXART = {**SMALL, **_SHORT_TEXT, "clean_caption": False, "use_resolution_binning": False}
_QWEN_EDIT = {**_EMBEDDINGS, **masks("embeds_mask", torch.int64, (9, 13), 13)}
_KLEIN = {**SIZE, **_SHORT_TEXT, "text_encoder_out_layers": (1, 2, 3)}
# One example of a task, and the question.
_EXAMPLES = {
    "task_prompt": "a large red circle",
    "content_prompt": PROMPT,
    "image": [[random_image(48, 80, seed=1), random_image(48, 80, seed=2)], [random_image(48, 80, seed=3), None]],
    **_SHORT_TEXT,
}


def _hidream_embeddings() -> dict[str, Any]:
    of_t5, of_llama = embeddings(5, TEXT_WIDTH), embeddings(9, TEXT_WIDTH)
    arguments: dict[str, Any] = {"prompt": None}
    for kind in ("prompt_embeds", "negative_prompt_embeds"):
        arguments |= {f"{kind}_t5": of_t5[kind], f"{kind}_llama3": of_llama[kind][None].repeat(4, 1, 1, 1)}
    return arguments


IMAGE_PIPELINES: dict[str, TinyPipeline] = {
    "qwen-image": TinyPipeline(qwen_image, _QWEN),
    "qwen-image, image": TinyPipeline(lambda: qwen_image("QwenImageImg2ImgPipeline"), _QWEN, _IMAGE, strength=0.9),
    "qwen-image, inpainting": TinyPipeline(
        lambda: qwen_image("QwenImageInpaintPipeline"), _QWEN, _IMAGE, mask_image=MASK, strength=0.9
    ),
    "qwen-image, controlnet": TinyPipeline(
        lambda: qwen_controlled("QwenImageControlNetPipeline"), _QWEN, control_image=IMAGE
    ),
    "qwen-image, controlnet, inpainting": TinyPipeline(
        lambda: qwen_controlled("QwenImageControlNetInpaintPipeline", mask_channels=4),
        {**_QWEN, "control_image": IMAGE, "control_mask": MASK},
    ),
    "qwen-image, editing": TinyPipeline(lambda: qwen_image_edit("QwenImageEditPipeline"), _IMAGE, _QWEN_EDIT),
    "qwen-image, editing, inpainting": TinyPipeline(
        lambda: qwen_image_edit("QwenImageEditInpaintPipeline"), _IMAGE, _QWEN_EDIT, mask_image=MASK, strength=0.9
    ),
    "qwen-image, editing two images": TinyPipeline(
        lambda: qwen_image_edit("QwenImageEditPlusPipeline"), _QWEN_EDIT, image=[IMAGE, random_image(48, 48, seed=2)]
    ),
    "qwen-image, layers": TinyPipeline(
        lambda: qwen_image_edit("QwenImageLayeredPipeline", layers=True),
        _QWEN_EDIT,
        prompt=PROMPT,
        image=IMAGE.convert("RGBA"),
        layers=2,
        resolution=1024,
        output_type="pt",
    ),
    "flux2": TinyPipeline(
        lambda: flux2("Flux2Pipeline"), SIZE, prompt=None, prompt_embeds=embeddings(13, 3 * TEXT_WIDTH)["prompt_embeds"]
    ),
    "flux2 klein": TinyPipeline(lambda: flux2("Flux2KleinPipeline"), _KLEIN),
    "flux2 klein, inpainting": TinyPipeline(
        lambda: flux2("Flux2KleinInpaintPipeline"), _KLEIN, _IMAGE, mask_image=MASK
    ),
    "stable diffusion 3": TinyPipeline(stable_diffusion_3, _SD3),
    "stable diffusion 3, image": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3Img2ImgPipeline"), _SD3, image=SMALL_IMAGE, strength=0.9
    ),
    "stable diffusion 3, inpainting": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3InpaintPipeline"),
        {**_SD3, "image": SMALL_IMAGE, "mask_image": SMALL_MASK, "strength": 0.9},
    ),
    "stable diffusion 3, controlnet": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3ControlNetPipeline"), _SD3, control_image=SMALL_IMAGE
    ),
    "stable diffusion 3, controlnet, inpainting": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3ControlNetInpaintingPipeline", mask_channels=1),
        {**_SD3, "control_image": SMALL_IMAGE, "control_mask": SMALL_MASK},
    ),
    "hidream": TinyPipeline(hidream, SMALL, pooled(), _hidream_embeddings()),
    "auraflow": TinyPipeline(lambda: tiny_pipe("AuraFlowPipeline", "auraflow", vae=small_vae()), _MASKED),
    "pixart": TinyPipeline(pixart, _PIXART),
    "pixart alpha": TinyPipeline(lambda: pixart("PixArtAlphaPipeline"), _PIXART),
    "pixart, perturbed": TinyPipeline(lambda: pixart("PixArtSigmaPAGPipeline", pag_applied_layers="blocks.1"), _PIXART),
    "lumina2": TinyPipeline(lambda: tiny_pipe("Lumina2Pipeline", "lumina2", vae=small_vae()), _MASKED, SIZE),
    "visual cloze": TinyPipeline(
        lambda: visual_cloze("VisualClozePipeline"),
        {**_EXAMPLES, "upsampling_height": 48, "upsampling_width": 80},
        without=("prompt",),
    ),
    "visual cloze, generation": TinyPipeline(
        lambda: visual_cloze("VisualClozeGenerationPipeline"), _EXAMPLES, without=("prompt",)
    ),
}


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
