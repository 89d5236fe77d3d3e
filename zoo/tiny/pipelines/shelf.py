"""Tiny pipelines on the transformers of :data:`zoo.tiny.transformers.registry.SHELF`. They take embeddings of text and
return latents.
"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import CogVideoXDDIMScheduler, DDIMScheduler, DiffusionPipeline, FlowMapEulerDiscreteScheduler
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import Tensor

from zoo.tiny.base import SECOND_TEXT_WIDTH, TEXT_WIDTH, WIDTH
from zoo.tiny.pipelines import options
from zoo.tiny.pipelines.audio import AUDIO_PIPELINES
from zoo.tiny.pipelines.components import TinyPipeline, kl_vae, random_model, small_vae, tiny_pipe, wan_vae
from zoo.tiny.pipelines.cosmos import COSMOS_PIPELINES
from zoo.tiny.pipelines.image import EDIT_PIPELINES
from zoo.tiny.pipelines.options import IMAGE, MEDIUM, SIZE, SMALL, SMALL_IMAGE, SMALL_MASK, TEXT, VIDEO
from zoo.tiny.transformers.registry import MODELS

# -- Z-Image: lists of samples.


def z_image_controlled(cls: str) -> DiffusionPipeline:
    sizes = {"dim": WIDTH, "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3}
    layers = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0]}
    layers |= {"control_in_dim": 9 if "Inpaint" in cls else 4, "add_control_noise_refiner": "control_noise_refiner"}
    controlnet = random_model("ZImageControlNetModel", 8, **layers, **sizes)
    return tiny_pipe(cls, "z-image", vae=small_vae(), controlnet=controlnet)


_LISTS = {"prompt": None, **options.listed(TEXT)}


# -- Kandinsky 5.


def kandinsky5_image(cls: str, **config: Any) -> DiffusionPipeline:
    pipe = tiny_pipe(cls, "kandinsky 5", config=config)
    # The pipeline accepts no other sizes.
    pipe.resolutions = [(80, 48)]
    return pipe


_KANDINSKY = {
    "prompt": None,
    **options.embeddings(9, TEXT_WIDTH, "embeds_qwen"),
    **options.pooled("prompt_embeds_clip"),
    **options.of_both(prompt_cu_seqlens=lambda _: torch.tensor([0, 9], dtype=torch.int32)),
}


# -- HunyuanImage, HunyuanDiT.

_HUNYUAN_IMAGE = {
    **TEXT,
    **options.masks("embeds_mask", torch.int64),
    **options.of_both(prompt_embeds_2=lambda i: options.random_tensor(1, 4, SECOND_TEXT_WIDTH, seed=3 + i)),
    **options.masks("embeds_mask_2", torch.int64, (3, 3), 4),
}
_HUNYUAN_DIT = {
    **SIZE,
    **TEXT,
    **options.masks("attention_mask"),
    **options.of_both(prompt_embeds_2=lambda i: options.random_tensor(1, 5, SECOND_TEXT_WIDTH, seed=5 + i)),
    **options.masks("attention_mask_2", torch.int64, (5, 2), 5),
    "use_resolution_binning": False,
}


def hunyuan_image(cls: str, *, guided: bool = False) -> DiffusionPipeline:
    guiders = {name: AdaptiveProjectedMixGuidance(guidance_scale=3.0) for name in ("guider", "ocr_guider")}
    sizes = {"block_out_channels": (32,) * 4, "layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 32}
    channels = {"in_channels": 3, "out_channels": 3, "latent_channels": 4}
    vae = random_model("AutoencoderKLHunyuanImage", 2, **channels, **sizes)
    return tiny_pipe(cls, "hunyuanimage", vae=vae, **(guiders if guided else {}))


def hunyuan_image_refiner(cls: str) -> DiffusionPipeline:
    """Build the refiner, which concatenates the given image and its latents along channels."""
    sizes = {"block_out_channels": (8,) * 5, "layers_per_block": 1, "latent_channels": 2}
    vae = random_model("AutoencoderKLHunyuanImageRefiner", 2, **sizes)
    return tiny_pipe(cls, "hunyuanimage refiner", vae=vae, config={"in_channels": 8})


def hunyuan_dit(cls: str, **components: Any) -> DiffusionPipeline:
    """Build the pipeline, with a ControlNet if the class takes one."""
    unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if "ControlNet" in cls:
        controlnet, config = "HunyuanDiT2DControlNetModel", MODELS["hunyuandit"].config
        taken = inspect.signature(getattr(diffusers, controlnet)).parameters
        shared = {name: value for name, value in config.items() if name in taken}
        shared["transformer_num_layers"] = config["num_layers"]
        components["controlnet"] = random_model(controlnet, 8, **shared)
    return tiny_pipe(cls, "hunyuandit", scheduler=DDIMScheduler(), **unchecked, **components)


# -- Further families.


def ideogram(cls: str) -> DiffusionPipeline:
    """Build Ideogram 4. Its second transformer has no text; ``encode_prompt`` replaces Qwen 3 VL."""
    second = MODELS["ideogram 4"].build(2)
    pipe = tiny_pipe(cls, "ideogram 4", vae=kl_vae("AutoencoderKLFlux2"), unconditional_transformer=second)

    def encode_prompt(*, grid_h: int, grid_w: int, **_: Any) -> tuple[Tensor, ...]:
        image = grid_h * grid_w
        text = torch.cat([TEXT["prompt_embeds"], torch.zeros(1, image, TEXT_WIDTH)], dim=1)
        return text, *pipe._prepare_ids([7], grid_h, grid_w, 9, torch.device("cpu"))

    pipe.encode_prompt = encode_prompt
    return pipe


def prx(cls: str) -> DiffusionPipeline:
    with warnings.catch_warnings():
        # diffusers itself uses a class that it calls deprecated.
        warnings.filterwarnings("ignore", "`LoraLoaderMixin` is deprecated")
        return tiny_pipe(cls, "prx")


class _ChatTemplate:
    """A processor, from which Qwen-Image 2.1 learns how many tokens the system's message has."""

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0]]

    @property
    def tokenizer(self) -> _ChatTemplate:
        return self

    def encode(self, text: str) -> list[int]:
        return [1]


_MASKED = {**TEXT, **options.masks("attention_mask")}
_EMBEDS_MASKED = {**TEXT, **options.masks("embeds_mask")}
# There are 3 × 5 image tokens of 32 × 32 pixels.
_LARGE = {"height": 96, "width": 160}
_CHANGED = {"image": SMALL_IMAGE, "strength": 0.9}
_QWEN_21 = {**MEDIUM, **_EMBEDS_MASKED, "true_cfg_scale": 3.0}
_SANA = {**_MASKED, "negative_prompt": None, "use_resolution_binning": False}
_PRIOR = {"prior_token_ids": torch.arange(24)[None] % 16}
_KREA = {
    **options.of_both(prompt_embeds=lambda i: options.random_tensor(1, 9, 3, TEXT_WIDTH, seed=i)),
    **options.masks("embeds_mask"),
}
# These are text embeddings of each block, and those from which the model makes tokens.
_FIBO_2 = options.of_both(
    prompt_embeds=lambda i: options.random_tensor(1, 2, 9 - 4 * i, TEXT_WIDTH, seed=9 - 4 * i),
    prompt_embeds_mask=lambda i: options.first(9 - 4 * i, 9 - 4 * i),
)
_NO_VAE, _SMALL_VAE = {"vae": None}, {"vae": small_vae}
_QWEN_VAE = {"vae": partial(wan_vae, "AutoencoderKLQwenImage")}
_QWEN_21_PARTS = {"vae": None, "processor": _ChatTemplate}
_FLOW_MAP = {"vae": wan_vae, "scheduler": FlowMapEulerDiscreteScheduler}
_EASYANIMATE = {"vae": partial(kl_vae, "AutoencoderKLMagvit"), "config": {"text_embed_dim_t5": None}}
_ALLEGRO = {"vae": None, "scheduler": diffusers.EulerAncestralDiscreteScheduler}
_DIT = {"scheduler": DDIMScheduler, "config": {"sample_size": 10, "num_embeds_ada_norm": 1000}}
_LATTE = {"vae": None, "scheduler": DDIMScheduler}
_FLUX2_VAE = {"vae": partial(kl_vae, "AutoencoderKLFlux2")}

_z_image = partial(TinyPipeline, "z-image", **SMALL, **_LISTS, parts=_SMALL_VAE)
_z_image_controlled = partial(TinyPipeline, z_image_controlled, **SMALL, **_LISTS, control_image=SMALL_IMAGE)
_chroma = partial(TinyPipeline, "chroma", **SMALL, **_MASKED, parts=_SMALL_VAE)
_hunyuan_image = partial(TinyPipeline, hunyuan_image, "HunyuanImagePipeline", SIZE, _HUNYUAN_IMAGE)
_anyflow = partial(TinyPipeline, **VIDEO, **TEXT, guidance_scale=3.0, parts=_FLOW_MAP)
_qwen_21 = partial(TinyPipeline, "qwen-image 2.1", "QwenImage21Pipeline", _QWEN_21, parts=_QWEN_21_PARTS)
_hunyuan_dit = partial(TinyPipeline, hunyuan_dit, **_HUNYUAN_DIT)
_refined = partial(TinyPipeline, hunyuan_image_refiner, "HunyuanImageRefinerPipeline", _LARGE, TEXT)
_kandinsky_video = partial(TinyPipeline, "kandinsky 5", parts={"vae": partial(kl_vae, "AutoencoderKLHunyuanVideo")})

SHELF_PIPELINES: dict[str, TinyPipeline] = {
    "z-image": _z_image("ZImagePipeline"),
    "chroma": _chroma("ChromaPipeline"),
    "cogview4": TinyPipeline("cogview4", "CogView4Pipeline", SIZE, TEXT),
    "cogview3+": TinyPipeline(
        "cogview3+", "CogView3PlusPipeline", SIZE, TEXT, parts={"scheduler": CogVideoXDDIMScheduler}
    ),
    "hunyuanimage": _hunyuan_image(),
    "hunyuanimage, guided": _hunyuan_image(parts={"guided": True}),
    "ovis": TinyPipeline("ovis", "OvisImagePipeline", SMALL, TEXT, negative_prompt=None, parts=_SMALL_VAE),
    "bria": TinyPipeline("bria", "BriaPipeline", SMALL, TEXT, parts=_SMALL_VAE),
    "kandinsky 5, one image": TinyPipeline(kandinsky5_image, "Kandinsky5T2IPipeline", SIZE, _KANDINSKY),
    "kandinsky 5": _kandinsky_video("Kandinsky5T2VPipeline", VIDEO, _KANDINSKY),
    "krea 2": TinyPipeline("krea 2", "Krea2Pipeline", SIZE, _KREA, prompt=None, parts=_QWEN_VAE),
    "easyanimate": TinyPipeline("easyanimate", "EasyAnimatePipeline", VIDEO, _MASKED, parts=_EASYANIMATE),
    "ernie-image": TinyPipeline(
        "ernie-image", "ErnieImagePipeline", SIZE, _LISTS, parts={"vae": None, "config": {"patch_size": 1}}
    ),
    "prx": TinyPipeline(prx, "PRXPipeline", SIZE, _MASKED, use_resolution_binning=False),
    "dit": TinyPipeline("dit", "DiTPipeline", class_labels=[3], output_type="np", parts=_DIT, without=("prompt",)),
    "anyflow": _anyflow("anyflow", "AnyFlowPipeline"),
    "anyflow far": _anyflow("anyflow far", "AnyFlowFARPipeline", chunk_partition=[1, 2]),
    "nucleus": TinyPipeline(
        "nucleus", "NucleusMoEImagePipeline", SIZE, _EMBEDS_MASKED, parts={**_QWEN_VAE, "config": {"out_channels": 4}}
    ),
    "allegro": TinyPipeline("allegro", "AllegroPipeline", VIDEO, _MASKED, negative_prompt=None, parts=_ALLEGRO),
    "z-image, image": _z_image("ZImageImg2ImgPipeline", _CHANGED),
    "chroma, image": _chroma("ChromaImg2ImgPipeline", _CHANGED),
    "z-image, inpainting": _z_image("ZImageInpaintPipeline", _CHANGED, mask_image=SMALL_MASK),
    "z-image, controlnet": _z_image_controlled("ZImageControlNetPipeline"),
    "cogview4, control": TinyPipeline(
        "cogview4", "CogView4ControlPipeline", SIZE, TEXT, control_image=IMAGE, parts={"config": {"in_channels": 8}}
    ),
    "glm-image": TinyPipeline(
        "glm-image", "GlmImagePipeline", MEDIUM, TEXT, _PRIOR, parts={"vision_language_encoder": None}
    ),
    "kandinsky 5, image": _kandinsky_video("Kandinsky5I2VPipeline", VIDEO, _KANDINSKY, num_frames=17, image=IMAGE),
    "ideogram 4": TinyPipeline(
        ideogram, "Ideogram4Pipeline", SIZE, max_sequence_length=9, guidance_schedule=None, guidance_scale=3.0
    ),
    "hunyuandit": _hunyuan_dit("HunyuanDiTPipeline"),
    "hunyuandit, perturbed": _hunyuan_dit("HunyuanDiTPAGPipeline", parts={"pag_applied_layers": "blocks.1"}),
    "hunyuandit, controlnet": _hunyuan_dit("HunyuanDiTControlNetPipeline", control_image=IMAGE),
    "hunyuanimage, refined": _refined(options.masks("embeds_mask", torch.int64), image=options.random_image(96, 160)),
    "z-image, controlnet, inpainting": _z_image_controlled(
        "ZImageControlNetInpaintPipeline",
        {"image": SMALL_IMAGE, "mask_image": SMALL_MASK},
        control_image=options.random_image(24, 40, seed=2),
    ),
    "kandinsky 5, one image, image": TinyPipeline(
        kandinsky5_image, "Kandinsky5I2IPipeline", SIZE, _KANDINSKY, image=IMAGE, parts={"visual_cond": True}
    ),
    "bria fibo 2": TinyPipeline("bria fibo 2", "BriaFibo2Pipeline", MEDIUM, _FIBO_2, prompt=None, parts=_FLUX2_VAE),
    "latte": TinyPipeline("latte", "LattePipeline", SIZE, TEXT, negative_prompt=None, video_length=3, parts=_LATTE),
    "qwen-image 2.1": _qwen_21(),
    "qwen-image 2.1, no cached keys": _qwen_21(use_kv_cache=False),
    "sana": TinyPipeline("sana", "SanaPipeline", _LARGE, _SANA, parts=_NO_VAE),
    "sana, perturbed": TinyPipeline(
        "sana", "SanaPAGPipeline", _LARGE, _SANA, parts={"vae": None, "pag_applied_layers": "transformer_blocks.1"}
    ),
    "sana video": TinyPipeline("sana video", "SanaVideoPipeline", MEDIUM, _SANA, frames=9, parts=_NO_VAE),
    **COSMOS_PIPELINES,
    **EDIT_PIPELINES,
    **AUDIO_PIPELINES,
}
