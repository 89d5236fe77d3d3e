"""Tiny pipelines on the transformers of `zoo.tiny.transformers.registry.SHELF`: embeddings of text are given, latents
come back.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import diffusers
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMapEulerDiscreteScheduler,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import Tensor, nn

from zoo.tiny.pipelines.audio import AUDIO_PIPELINES
from zoo.tiny.pipelines.cosmos import COSMOS_PIPELINES
from zoo.tiny.pipelines.edit import EDIT_PIPELINES
from zoo.tiny.pipelines.parts import TEXT_WIDTH, TinyPipeline, random_image, random_model
from zoo.tiny.pipelines.shelf_parts import (
    MODELS,
    POOLED,
    SIZE,
    SMALL,
    TEXT,
    VIDEO,
    first,
    flux2_vae,
    masks,
    on_shelf,
    small_vae,
    wan_vae,
)

# -- Z-Image: lists of samples

_LISTS = {f"{kind}_embeds": [TEXT[f"{kind}_embeds"][0, :n]] for kind, n in (("prompt", 9), ("negative_prompt", 5))}
_Z_IMAGE = {**SMALL, "prompt": None, **_LISTS}


def z_image(cls: str = "ZImagePipeline", **components: Any) -> Any:
    return on_shelf(cls, "z-image", vae=small_vae(), **components)


def z_image_controlled(cls: str = "ZImageControlNetPipeline", *, channels: int = 4) -> Any:
    controlnet = random_model(
        "ZImageControlNetModel",
        8,
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner",
        dim=48,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
    )
    return z_image(cls, controlnet=controlnet)


# -- Kandinsky 5

_KANDINSKY = {
    "prompt": None,
    **{
        f"{kind}{key}": value
        for kind in ("", "negative_")
        for key, value in {
            "prompt_embeds_qwen": TEXT[f"{kind}prompt_embeds"],
            "prompt_embeds_clip": POOLED[f"{kind}prompt_embeds"][:, 0],
            "prompt_cu_seqlens": torch.tensor([0, 9], dtype=torch.int32),
        }.items()
    },
}


def kandinsky5_image(cls: str = "Kandinsky5T2IPipeline", **config: Any) -> Any:
    pipe = on_shelf(cls, "kandinsky 5", config=config)
    # It takes no other.
    pipe.resolutions = [(80, 48)]
    return pipe


def kandinsky5_video(cls: str = "Kandinsky5T2VPipeline") -> Any:
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    vae = random_model("AutoencoderKLHunyuanVideo", 2, latent_channels=4, **sizes)
    return on_shelf(cls, "kandinsky 5", vae=vae)


# -- HunyuanImage

_GLYPHS = {
    f"{kind}{key}": value
    for kind, seed in (("", 3), ("negative_", 4))
    for key, value in {
        "prompt_embeds_2": torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(seed)),
        "prompt_embeds_mask_2": first(3, 4).long(),
    }.items()
}
_HUNYUAN_IMAGE = {**SIZE, **TEXT, **masks("embeds_mask", dtype=torch.int64), **_GLYPHS}


def hunyuan_image(*, guided: bool = False) -> Any:
    guiders = {name: AdaptiveProjectedMixGuidance(guidance_scale=3.0) for name in ("guider", "ocr_guider")}
    sizes = {"block_out_channels": (32,) * 4, "layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 32}
    return on_shelf(
        "HunyuanImagePipeline",
        "hunyuanimage",
        vae=random_model("AutoencoderKLHunyuanImage", 2, in_channels=3, out_channels=3, latent_channels=4, **sizes),
        **(guiders if guided else {}),
    )


def hunyuan_image_refiner() -> Any:
    """It sees the image that is refined beside its latents."""
    sizes = {"block_out_channels": (8,) * 5, "layers_per_block": 1}
    vae = random_model("AutoencoderKLHunyuanImageRefiner", 2, latent_channels=2, **sizes)
    return on_shelf("HunyuanImageRefinerPipeline", "hunyuanimage refiner", vae=vae, config={"in_channels": 8})


def _magvit() -> nn.Module:
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return random_model("AutoencoderKLMagvit", 2, latent_channels=4, **sizes)


def ideogram() -> Any:
    """Its second transformer has no text. ``encode_prompt`` is in place of Qwen 3 VL."""
    tiny = MODELS["ideogram 4"]
    second = random_model(tiny.cls, 2, **tiny.config)
    pipe = on_shelf("Ideogram4Pipeline", "ideogram 4", vae=flux2_vae(), unconditional_transformer=second)

    def encode_prompt(*, grid_h: int, grid_w: int, **_: Any) -> tuple[Tensor, ...]:
        image = grid_h * grid_w
        text = torch.cat([TEXT["prompt_embeds"], torch.zeros(1, image, TEXT_WIDTH)], dim=1)
        return text, *pipe._prepare_ids([7], grid_h, grid_w, 9, torch.device("cpu"))

    pipe.encode_prompt = encode_prompt
    return pipe


_OF_T5 = {
    f"{kind}{key}": value
    for kind, seed, length in (("", 5, 5), ("negative_", 6, 2))
    for key, value in {
        "prompt_embeds_2": torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(seed)),
        "prompt_attention_mask_2": first(length, 5).long(),
    }.items()
}


def hunyuan_dit(cls: str = "HunyuanDiTPipeline", **components: Any) -> Any:
    unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return on_shelf(cls, "hunyuandit", scheduler=DDIMScheduler(), **unchecked, **components)


def hunyuan_dit_controlled() -> Any:
    cls, config = "HunyuanDiT2DControlNetModel", MODELS["hunyuandit"].config
    takes = inspect.signature(getattr(diffusers, cls)).parameters
    shared = {name: value for name, value in config.items() if name in takes}
    controlnet = random_model(cls, 8, transformer_num_layers=config["num_layers"], **shared)
    return hunyuan_dit("HunyuanDiTControlNetPipeline", controlnet=controlnet)


def prx() -> Any:
    with warnings.catch_warnings():
        # diffusers' own use of a class that it calls deprecated.
        warnings.filterwarnings("ignore", "`LoraLoaderMixin` is deprecated")
        return on_shelf("PRXPipeline", "prx")


class _ChatTemplate:
    """Qwen-Image 2.1 asks a processor how long the system's message is."""

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0]]

    @property
    def tokenizer(self) -> Any:
        return self

    def encode(self, text: str) -> list[int]:
        return [1]


def _qwen_21() -> Any:
    return on_shelf("QwenImage21Pipeline", "qwen-image 2.1", vae=None, processor=_ChatTemplate())


_QWEN_21 = {"height": 64, "width": 96, **TEXT, **masks("embeds_mask"), "true_cfg_scale": 3.0}


_LAYERS = {
    f"{kind}_embeds": torch.randn(1, 9, 3, TEXT_WIDTH, generator=torch.Generator().manual_seed(seed))
    for seed, kind in enumerate(("prompt", "negative_prompt"))
}
_HUNYUAN_DIT = {**SIZE, **TEXT, **masks("attention_mask"), **_OF_T5, "use_resolution_binning": False}
# Of each block that is given text, and of what makes tokens of it.
_BUNDLES = {
    f"{kind}_embeds": torch.randn(1, 2, tokens, TEXT_WIDTH, generator=torch.Generator().manual_seed(tokens))
    for kind, tokens in (("prompt", 9), ("negative_prompt", 5))
}


# 3 × 5 image tokens of 32 × 32 pixels.
_SANA = {
    "height": 96,
    "width": 160,
    **TEXT,
    "negative_prompt": None,
    **masks("attention_mask"),
    "use_resolution_binning": False,
}

SHELF_PIPELINES: dict[str, TinyPipeline] = {
    "z-image": TinyPipeline(z_image, _Z_IMAGE),
    "chroma": TinyPipeline(
        lambda: on_shelf("ChromaPipeline", "chroma", vae=small_vae()), {**SMALL, **TEXT, **masks("attention_mask")}
    ),
    "cogview4": TinyPipeline(lambda: on_shelf("CogView4Pipeline", "cogview4"), {**SIZE, **TEXT}),
    "cogview3+": TinyPipeline(
        lambda: on_shelf("CogView3PlusPipeline", "cogview3+", scheduler=CogVideoXDDIMScheduler()), {**SIZE, **TEXT}
    ),
    "hunyuanimage": TinyPipeline(hunyuan_image, _HUNYUAN_IMAGE),
    "hunyuanimage, guided": TinyPipeline(lambda: hunyuan_image(guided=True), _HUNYUAN_IMAGE),
    "ovis": TinyPipeline(
        lambda: on_shelf("OvisImagePipeline", "ovis", vae=small_vae()), {**SMALL, **TEXT, "negative_prompt": None}
    ),
    "bria": TinyPipeline(lambda: on_shelf("BriaPipeline", "bria", vae=small_vae()), {**SMALL, **TEXT}),
    "kandinsky 5, one image": TinyPipeline(kandinsky5_image, {**SIZE, **_KANDINSKY}),
    "kandinsky 5": TinyPipeline(kandinsky5_video, {**SIZE, **_KANDINSKY, "num_frames": 9}),
    "krea 2": TinyPipeline(
        lambda: on_shelf("Krea2Pipeline", "krea 2", vae=wan_vae("AutoencoderKLQwenImage")),
        {**SIZE, "prompt": None, **_LAYERS, **masks("embeds_mask")},
    ),
    "easyanimate": TinyPipeline(
        lambda: on_shelf("EasyAnimatePipeline", "easyanimate", vae=_magvit(), config={"text_embed_dim_t5": None}),
        {**VIDEO, **TEXT, **masks("attention_mask")},
    ),
    "ernie-image": TinyPipeline(
        lambda: on_shelf("ErnieImagePipeline", "ernie-image", vae=None, config={"patch_size": 1}),
        {
            **SIZE,
            "prompt": None,
            "prompt_embeds": [TEXT["prompt_embeds"][0]],
            "negative_prompt_embeds": [TEXT["negative_prompt_embeds"][0, :5]],
        },
    ),
    "prx": TinyPipeline(
        prx,
        {**SIZE, **TEXT, **masks("attention_mask"), "use_resolution_binning": False},
    ),
    "dit": TinyPipeline(
        lambda: on_shelf(
            "DiTPipeline", "dit", scheduler=DDIMScheduler(), config={"sample_size": 10, "num_embeds_ada_norm": 1000}
        ),
        {"class_labels": [3], "output_type": "np"},
        without=("prompt",),
    ),
    "anyflow": TinyPipeline(
        lambda: on_shelf("AnyFlowPipeline", "anyflow", vae=wan_vae(), scheduler=FlowMapEulerDiscreteScheduler()),
        {**VIDEO, **TEXT, "guidance_scale": 3.0},
    ),
    "anyflow far": TinyPipeline(
        lambda: on_shelf("AnyFlowFARPipeline", "anyflow far", vae=wan_vae(), scheduler=FlowMapEulerDiscreteScheduler()),
        {**VIDEO, **TEXT, "guidance_scale": 3.0, "chunk_partition": [1, 2]},
    ),
    "nucleus": TinyPipeline(
        lambda: on_shelf(
            "NucleusMoEImagePipeline", "nucleus", config={"out_channels": 4}, vae=wan_vae("AutoencoderKLQwenImage")
        ),
        {**SIZE, **TEXT, **masks("embeds_mask")},
    ),
    "allegro": TinyPipeline(
        lambda: on_shelf("AllegroPipeline", "allegro", vae=None, scheduler=EulerAncestralDiscreteScheduler()),
        {**VIDEO, **TEXT, **masks("attention_mask"), "negative_prompt": None},
    ),
    "z-image, image": TinyPipeline(
        lambda: z_image("ZImageImg2ImgPipeline"), {**_Z_IMAGE, "image": random_image(24, 40), "strength": 0.9}
    ),
    "chroma, image": TinyPipeline(
        lambda: on_shelf("ChromaImg2ImgPipeline", "chroma", vae=small_vae()),
        {**SMALL, **TEXT, **masks("attention_mask"), "image": random_image(24, 40), "strength": 0.9},
    ),
    "z-image, inpainting": TinyPipeline(
        lambda: z_image("ZImageInpaintPipeline"),
        {
            **_Z_IMAGE,
            "image": random_image(24, 40),
            "mask_image": random_image(24, 40, seed=1).convert("L"),
            "strength": 0.9,
        },
    ),
    "z-image, controlnet": TinyPipeline(z_image_controlled, {**_Z_IMAGE, "control_image": random_image(24, 40)}),
    "cogview4, control": TinyPipeline(
        lambda: on_shelf("CogView4ControlPipeline", "cogview4", config={"in_channels": 8}),
        {**SIZE, **TEXT, "control_image": random_image(48, 80)},
    ),
    "glm-image": TinyPipeline(
        lambda: on_shelf("GlmImagePipeline", "glm-image", vision_language_encoder=None),
        {"height": 64, "width": 96, **TEXT, "prior_token_ids": torch.arange(24)[None] % 16},
    ),
    "kandinsky 5, image": TinyPipeline(
        lambda: kandinsky5_video("Kandinsky5I2VPipeline"),
        {**VIDEO, **_KANDINSKY, "num_frames": 17, "image": random_image(48, 80)},
    ),
    "ideogram 4": TinyPipeline(
        ideogram, {**SIZE, "max_sequence_length": 9, "guidance_schedule": None, "guidance_scale": 3.0}
    ),
    "hunyuandit": TinyPipeline(hunyuan_dit, _HUNYUAN_DIT),
    "hunyuandit, perturbed": TinyPipeline(
        lambda: hunyuan_dit("HunyuanDiTPAGPipeline", pag_applied_layers="blocks.1"), _HUNYUAN_DIT
    ),
    "hunyuandit, controlnet": TinyPipeline(
        hunyuan_dit_controlled, {**_HUNYUAN_DIT, "control_image": random_image(48, 80)}
    ),
    "hunyuanimage, refined": TinyPipeline(
        hunyuan_image_refiner,
        {
            "height": 96,
            "width": 160,
            **TEXT,
            **masks("embeds_mask", dtype=torch.int64),
            "image": random_image(96, 160),
        },
    ),
    "z-image, controlnet, inpainting": TinyPipeline(
        lambda: z_image_controlled("ZImageControlNetInpaintPipeline", channels=9),
        {
            **_Z_IMAGE,
            "image": random_image(24, 40),
            "mask_image": random_image(24, 40, seed=1).convert("L"),
            "control_image": random_image(24, 40, seed=2),
        },
    ),
    "kandinsky 5, one image, image": TinyPipeline(
        lambda: kandinsky5_image("Kandinsky5I2IPipeline", visual_cond=True),
        {**SIZE, **_KANDINSKY, "image": random_image(48, 80)},
    ),
    "bria fibo 2": TinyPipeline(
        lambda: on_shelf("BriaFibo2Pipeline", "bria fibo 2", vae=flux2_vae()),
        {
            "height": 64,
            "width": 96,
            "prompt": None,
            **_BUNDLES,
            "prompt_embeds_mask": first(9),
            "negative_prompt_embeds_mask": first(5, 5),
        },
    ),
    "latte": TinyPipeline(
        lambda: on_shelf("LattePipeline", "latte", vae=None, scheduler=DDIMScheduler()),
        {**SIZE, **TEXT, "negative_prompt": None, "video_length": 3},
    ),
    "qwen-image 2.1": TinyPipeline(_qwen_21, _QWEN_21),
    "qwen-image 2.1, no cached keys": TinyPipeline(_qwen_21, {**_QWEN_21, "use_kv_cache": False}),
    "sana": TinyPipeline(lambda: on_shelf("SanaPipeline", "sana", vae=None), _SANA),
    "sana, perturbed": TinyPipeline(
        lambda: on_shelf("SanaPAGPipeline", "sana", vae=None, pag_applied_layers="transformer_blocks.1"), _SANA
    ),
    "sana video": TinyPipeline(
        lambda: on_shelf("SanaVideoPipeline", "sana video", vae=None),
        {
            "height": 64,
            "width": 96,
            **TEXT,
            "negative_prompt": None,
            **masks("attention_mask"),
            "frames": 9,
            "use_resolution_binning": False,
        },
    ),
    **COSMOS_PIPELINES,
    **EDIT_PIPELINES,
    **AUDIO_PIPELINES,
}
