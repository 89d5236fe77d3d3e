"""Tiny pipelines of images, and of image editing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from diffusers import DDIMScheduler, DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor
from torch.nn import functional

from zoo.flux.models import CLIP_WIDTH, T5_WIDTH
from zoo.tiny.base import IMAGE_WIDTH, TEXT_WIDTH, noise
from zoo.tiny.pipelines import encoders, options
from zoo.tiny.pipelines.components import TinyPipeline, kl_vae, random_model, small_vae, tiny_pipe, wan_vae
from zoo.tiny.pipelines.options import IMAGE, MASK, PROMPT, SIZE, SMALL, SMALL_IMAGE, SMALL_MASK, TEXT
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision
from zoo.tiny.transformers.registry import MODELS

# -- Qwen-Image.


def qwen_image(cls: str, **components: Any) -> DiffusionPipeline:
    """Build Qwen-Image, or the pipeline that separates an image with transparency into layers."""
    layers = cls == "QwenImageLayeredPipeline"
    config = {"use_additional_t_cond": True, "use_layer3d_rope": True, "in_channels": 32, "out_channels": 8}
    # These are colours and transparency.
    channels = {"input_channels": 4 if layers else 3, "latent_channels": 8 if layers else 4}
    components |= {"config": config if layers else None, "vae": wan_vae("AutoencoderKLQwenImage", **channels)}
    tokenizer = encoders.word_tokenizer()
    return tiny_pipe(cls, "qwen-image", text_encoder=encoders.qwen_vl(tokenizer), tokenizer=tokenizer, **components)


def qwen_image_edit(cls: str) -> DiffusionPipeline:
    """Build a pipeline that scales given images to a megapixel. Its VAE sees 1/16 of their height and width."""
    return encode_a_sixteenth(qwen_image(cls))


def encode_a_sixteenth(pipe: Any) -> DiffusionPipeline:
    """Make the VAE of ``pipe`` encode a sixteenth of the height and width of images. Return ``pipe``."""
    encode = pipe.vae.encode

    def encode_smaller(pixels: Tensor) -> Any:
        pool = functional.avg_pool2d if pixels.ndim == 4 else functional.avg_pool3d
        return encode(pool(pixels, (1, 16, 16)[-(pixels.ndim - 2) :]))

    pipe.vae.encode = encode_smaller
    pipe.vae_scale_factor *= 16
    pipe.image_processor = VaeImageProcessor(vae_scale_factor=2 * pipe.vae_scale_factor)
    return pipe


def qwen_controlled(cls: str) -> DiffusionPipeline:
    mask_channels = 4 if "Inpaint" in cls else 0
    config = {**MODELS["qwen-image"].config, "num_layers": 1, "extra_condition_channels": mask_channels}
    config.pop("guidance_embeds", None)
    return qwen_image(cls, controlnet=random_model("QwenImageControlNetModel", 8, **config))


# -- Pipelines that take embeddings instead of text.


def stable_diffusion_3(cls: str) -> DiffusionPipeline:
    """Build 3.5 medium, with a ControlNet if the class takes one."""
    inpainting, parts = "Inpaint" in cls, {}
    if "ControlNet" in cls:
        controlled = {**MODELS["sd3"].config, "num_layers": 2, "extra_conditioning_channels": int(inpainting)}
        parts["controlnet"] = random_model("SD3ControlNetModel", 8, qk_norm="rms_norm", **controlled)
    # Inpainting accepts no other number of channels.
    channels = 16 if inpainting and not parts else 4
    config = {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1), "in_channels": channels, "out_channels": channels}
    return tiny_pipe(cls, "sd3", config=config, vae=small_vae(channels), **parts)


def hidream(cls: str) -> DiffusionPipeline:
    pipe = tiny_pipe(cls, "hidream", config={"caption_channels": [TEXT_WIDTH, TEXT_WIDTH]}, vae=small_vae())
    # The pipeline scales the requested size to an area that follows from this size.
    pipe.default_sample_size = 8
    return pipe


def pixart(cls: str, **components: Any) -> DiffusionPipeline:
    config = {"caption_channels": T5_WIDTH, "sample_size": 64}
    components |= {"scheduler": DDIMScheduler(), **encoders.t5()}
    return tiny_pipe(cls, "pixart", config=config, vae=small_vae(), **components)


# -- FLUX.


def visual_cloze(cls: str) -> DiffusionPipeline:
    """Build VisualCloze, which runs FLUX.1 Fill."""
    channels = 16  # A token has this number of channels.
    # The channels are noise, the images without the missing ones, and their mask with 8 × 8 pixels per token.
    config = {"in_channels": 2 * channels + 64, "out_channels": channels}
    config |= {"joint_attention_dim": T5_WIDTH, "pooled_projection_dim": CLIP_WIDTH}
    text = {**encoders.clip(), **encoders.t5("_2")}
    return tiny_pipe(cls, "flux", config=config, vae=small_vae(), resolution=48, **text)


def flux2(cls: str) -> DiffusionPipeline:
    # The text encoder of FLUX.2 [dev], Mistral 3, and its processor cannot be made small in process.
    dev = cls == "Flux2Pipeline"
    text = {} if dev else encoders.decoder("Qwen3ForCausalLM", head_dim=32)
    config = {"joint_attention_dim": 3 * TEXT_WIDTH, "guidance_embeds": dev}
    return tiny_pipe(cls, "flux2", config=config, vae=kl_vae("AutoencoderKLFlux2"), **text)


_SHORT_TEXT = {"max_sequence_length": 13}
_SMALL_VAE = {"vae": small_vae}
_QWEN = {**SIZE, "negative_prompt": "a blue square"}
# There are 3 × 5 image tokens of 8 × 8 pixels. Nine of 13 text tokens are valid, and five of the negative ones.
_EMBEDDINGS = options.instead_of_text(13, TEXT_WIDTH)
_SMALL = {**SMALL, **_EMBEDDINGS}
_MASKED = {**_SMALL, **options.masks("attention_mask", total=13)}
_QWEN_EDIT = {**_EMBEDDINGS, **options.masks("embeds_mask", torch.int64, (9, 13), 13), "image": IMAGE}
_LAYERS = {"prompt": PROMPT, "image": IMAGE.convert("RGBA"), "layers": 2, "resolution": 1024, "output_type": "pt"}
_OF_T5 = options.embeddings(5, TEXT_WIDTH, "embeds_t5")
_LLAMA = options.embeddings(9, TEXT_WIDTH, "embeds_llama3")
_OF_LLAMA = {name: embeds[None].repeat(4, 1, 1, 1) for name, embeds in _LLAMA.items()}
# The rows are one example of a task, and the question.
_EXAMPLES = [
    [options.random_image(48, 80, seed=1), options.random_image(48, 80, seed=2)],
    [options.random_image(48, 80, seed=3), None],
]
_CLOZE = {"task_prompt": "a large red circle", "content_prompt": PROMPT, "image": _EXAMPLES, **_SHORT_TEXT}

_qwen = partial(TinyPipeline, qwen_image, **_QWEN)
_qwen_controlled = partial(TinyPipeline, qwen_controlled, **_QWEN, control_image=IMAGE)
_qwen_edit = partial(TinyPipeline, qwen_image_edit, **_QWEN_EDIT)
_klein = partial(TinyPipeline, flux2, **SIZE, **_SHORT_TEXT, text_encoder_out_layers=(1, 2, 3))
_sd3 = partial(TinyPipeline, stable_diffusion_3, **_SMALL, **options.pooled())
_pixart = partial(TinyPipeline, pixart, **SMALL, **_SHORT_TEXT, clean_caption=False, use_resolution_binning=False)
_cloze = partial(TinyPipeline, visual_cloze, **_CLOZE, without=("prompt",))

IMAGE_PIPELINES: dict[str, TinyPipeline] = {
    "qwen-image": _qwen("QwenImagePipeline"),
    "qwen-image, image": _qwen("QwenImageImg2ImgPipeline", image=IMAGE, strength=0.9),
    "qwen-image, inpainting": _qwen("QwenImageInpaintPipeline", image=IMAGE, mask_image=MASK, strength=0.9),
    "qwen-image, controlnet": _qwen_controlled("QwenImageControlNetPipeline"),
    "qwen-image, controlnet, inpainting": _qwen_controlled("QwenImageControlNetInpaintPipeline", control_mask=MASK),
    "qwen-image, editing": _qwen_edit("QwenImageEditPipeline"),
    "qwen-image, editing, inpainting": _qwen_edit("QwenImageEditInpaintPipeline", mask_image=MASK, strength=0.9),
    "qwen-image, editing two images": _qwen_edit(
        "QwenImageEditPlusPipeline", image=[IMAGE, options.random_image(48, 48, seed=2)]
    ),
    "qwen-image, layers": _qwen_edit("QwenImageLayeredPipeline", **_LAYERS),
    "flux2": TinyPipeline(
        flux2, "Flux2Pipeline", SIZE, prompt=None, prompt_embeds=options.embeddings(13, 3 * TEXT_WIDTH)["prompt_embeds"]
    ),
    "flux2 klein": _klein("Flux2KleinPipeline"),
    "flux2 klein, inpainting": _klein("Flux2KleinInpaintPipeline", image=IMAGE, mask_image=MASK),
    "stable diffusion 3": _sd3("StableDiffusion3Pipeline"),
    "stable diffusion 3, image": _sd3("StableDiffusion3Img2ImgPipeline", image=SMALL_IMAGE, strength=0.9),
    "stable diffusion 3, inpainting": _sd3(
        "StableDiffusion3InpaintPipeline", image=SMALL_IMAGE, mask_image=SMALL_MASK, strength=0.9
    ),
    "stable diffusion 3, controlnet": _sd3("StableDiffusion3ControlNetPipeline", control_image=SMALL_IMAGE),
    "stable diffusion 3, controlnet, inpainting": _sd3(
        "StableDiffusion3ControlNetInpaintingPipeline", control_image=SMALL_IMAGE, control_mask=SMALL_MASK
    ),
    "hidream": TinyPipeline(hidream, "HiDreamImagePipeline", SMALL, options.pooled(), _OF_T5, _OF_LLAMA, prompt=None),
    "auraflow": TinyPipeline("auraflow", "AuraFlowPipeline", _MASKED, parts=_SMALL_VAE),
    "pixart": _pixart("PixArtSigmaPipeline"),
    "pixart alpha": _pixart("PixArtAlphaPipeline"),
    "pixart, perturbed": _pixart("PixArtSigmaPAGPipeline", parts={"pag_applied_layers": "blocks.1"}),
    "lumina2": TinyPipeline("lumina2", "Lumina2Pipeline", _MASKED, SIZE, parts=_SMALL_VAE),
    "visual cloze": _cloze("VisualClozePipeline", upsampling_height=48, upsampling_width=80),
    "visual cloze, generation": _cloze("VisualClozeGenerationPipeline"),
}


# -- Z-Image Omni: each prompt is a list of its parts before, between and after the images.


def z_image_omni(cls: str) -> DiffusionPipeline:
    """Build the pipeline. It gives its VAE bfloat16, whatever dtype the VAE has."""
    siglip = encoders.from_transformers("Siglip2VisionModel", 7, **encoders.VISION, num_patches=16)
    processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    parts = {"vae": small_vae().bfloat16(), "siglip": siglip, "siglip_processor": processor}
    return tiny_pipe(cls, "z-image", config={"siglip_feat_dim": IMAGE_WIDTH}, **parts)


def _parts_of_prompts(prompt: tuple[int, ...], negative: tuple[int, ...]) -> dict[str, Any]:
    """Return embeddings of both prompts, whose parts have these numbers of tokens."""
    lengths = {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
    return {"prompt": None, **{name: [[noise(n, TEXT_WIDTH) for n in parts]] for name, parts in lengths.items()}}


# -- JoyImage.

_MASKS = options.masks("embeds_mask", torch.int64)


def joyimage(cls: str) -> DiffusionPipeline:
    pipe = tiny_pipe(cls, "joyimage", vae=wan_vae())
    # The pipeline chooses sizes of a megapixel.
    pipe.vae_image_processor.get_default_height_width = lambda *_: (48, 80)
    return pipe


def joyimage_plus(cls: str) -> DiffusionPipeline:
    """Build the pipeline with a function instead of Qwen 3 VL: it fails on embeddings without a prompt."""
    pipe = tiny_pipe(cls, "joyimage plus", vae=wan_vae())
    pipe.image_processor.get_default_height_width = lambda *_: (48, 80)

    def encode(prompt: list[str], **_: Any) -> tuple[Tensor, Tensor]:
        kind = "prompt" if "circle" in prompt[0] else "negative_prompt"
        return TEXT[f"{kind}_embeds"], _MASKS[f"{kind}_embeds_mask"]

    pipe.encode_prompt_multiple_images = encode
    return pipe


# -- LongCat-Image.


def longcat_image(cls: str, text_processor: Any = None) -> DiffusionPipeline:
    tokenizer = encoders.word_tokenizer()
    marks = {"vision_start_token_id": "<|vision_start|>", "image_token_id": "<|image_pad|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    ids |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {"text_encoder": encoders.qwen_vl(tokenizer, **ids), "tokenizer": tokenizer}
    # The pipeline accepts no other number of channels.
    config, vae = {"in_channels": 64}, small_vae(16)
    pipe = tiny_pipe(cls, "longcat-image", config=config, vae=vae, **text, text_processor=text_processor)
    # The pipeline pads each prompt to this number of tokens.
    pipe.tokenizer_max_length = 13
    return pipe


class _Images:
    """The part of Qwen's processor that the pipeline uses. The processor itself needs torchvision."""

    image_processor = transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 84)


def longcat_image_edit(cls: str) -> DiffusionPipeline:
    """Build a pipeline that scales given images to a megapixel. Its VAE sees 1/16 of each side, Qwen six tokens."""
    return encode_a_sixteenth(longcat_image(cls, _Images()))


# -- OmniGen, Bria FIBO.


def omnigen(cls: str) -> DiffusionPipeline:
    stand_in_for_torchvision()
    tokenizer = encoders.word_tokenizer()
    return tiny_pipe(cls, "omnigen", tokenizer=tokenizer, config={"vocab_size": len(tokenizer)})


def bria_fibo(cls: str) -> DiffusionPipeline:
    """Build the pipeline. Its text is the last two layers of the encoder, concatenated, and each block gets one
    layer.
    """
    llama = encoders.decoder("LlamaModel", hidden_size=IMAGE_WIDTH)
    return tiny_pipe(
        cls, "bria fibo", vae=wan_vae(), config={"in_channels": 4, "joint_attention_dim": 2 * IMAGE_WIDTH}, **llama
    )


_z_image_omni = partial(TinyPipeline, z_image_omni, "ZImageOmniPipeline", SMALL)
_joyimage = partial(TinyPipeline, joyimage, "JoyImageEditPipeline", SIZE, TEXT, _MASKS)
_omnigen = partial(TinyPipeline, omnigen, "OmniGenPipeline", SIZE)
# The pipeline encodes an empty prompt as a token of Llama that the tokenizer here does not have.
_bria_fibo = partial(TinyPipeline, bria_fibo, height=96, width=160, negative_prompt="a blue square")
# There are three branches: with text and image, with neither, and with the image.
_OMNIGEN_IMAGE = {"prompt": "<img><|image_1|></img> a large red circle", "input_images": [IMAGE]}

EDIT_PIPELINES: dict[str, TinyPipeline] = {
    "z-image omni": _z_image_omni(_parts_of_prompts((9,), (5,))),
    "z-image omni, image": _z_image_omni(_parts_of_prompts((5, 9, 3), (5, 4, 3)), image=[options.random_image(64, 72)]),
    "joyimage": _joyimage(),
    "joyimage, image": _joyimage(image=IMAGE),
    "joyimage plus": TinyPipeline(
        joyimage_plus, "JoyImageEditPlusPipeline", SIZE, images=[IMAGE, options.random_image(48, 80, seed=2)]
    ),
    # Rewriting prompts would run Qwen only, so it is switched off.
    "longcat-image": TinyPipeline(longcat_image, "LongCatImagePipeline", SMALL, enable_prompt_rewrite=False),
    "longcat-image, editing": TinyPipeline(longcat_image_edit, "LongCatImageEditPipeline", image=IMAGE),
    "omnigen": _omnigen(),
    "omnigen, image": _omnigen(_OMNIGEN_IMAGE, max_input_image_size=128),
    "bria fibo": _bria_fibo("BriaFiboPipeline"),
    "bria fibo, editing": _bria_fibo(
        "BriaFiboEditPipeline", prompt={"edit_instruction": PROMPT}, image=options.random_image(96, 160)
    ),
}
