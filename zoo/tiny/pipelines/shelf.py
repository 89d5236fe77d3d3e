"""Tiny pipelines on the transformers of :data:`zoo.tiny.transformers.registry.SHELF`. They are given embeddings of text
and return latents.
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
from torch import Tensor

from zoo.tiny.pipelines.audio import AUDIO_PIPELINES
from zoo.tiny.pipelines.components import (
    IMAGE,
    IMAGE_WIDTH,
    SIZE,
    SMALL,
    SMALL_IMAGE,
    SMALL_MASK,
    TEXT,
    TEXT_WIDTH,
    VIDEO,
    TinyPipeline,
    embeddings,
    first,
    kl_vae,
    masks,
    random_image,
    random_model,
    small_vae,
    tiny_pipe,
    wan_vae,
)
from zoo.tiny.pipelines.cosmos import COSMOS_PIPELINES
from zoo.tiny.pipelines.image import EDIT_PIPELINES
from zoo.tiny.transformers.registry import MODELS


def _of_both(name: str, *shape: int, seeds: tuple[int, int]) -> dict[str, Tensor]:
    """Return ``prompt_{name}`` and ``negative_prompt_{name}``, noise of ``[1, *shape]``."""
    kinds = zip(("prompt", "negative_prompt"), seeds, strict=True)
    return {
        f"{kind}_{name}": torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for kind, seed in kinds
    }


# -- Z-Image: lists of samples


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
    return tiny_pipe(cls, "z-image", vae=small_vae(), controlnet=controlnet)


_Z_IMAGE = {
    **SMALL,
    "prompt": None,
    "prompt_embeds": [TEXT["prompt_embeds"][0]],
    "negative_prompt_embeds": [TEXT["negative_prompt_embeds"][0, :5]],
}


# -- Kandinsky 5


def kandinsky5_image(cls: str = "Kandinsky5T2IPipeline", **config: Any) -> Any:
    pipe = tiny_pipe(cls, "kandinsky 5", config=config)
    # The pipeline takes no other sizes than these.
    pipe.resolutions = [(80, 48)]
    return pipe


def kandinsky5_video(cls: str = "Kandinsky5T2VPipeline") -> Any:
    return tiny_pipe(cls, "kandinsky 5", vae=kl_vae("AutoencoderKLHunyuanVideo"))


_POOLED = embeddings(1, IMAGE_WIDTH)
_KANDINSKY = {"prompt": None}
for _kind in ("", "negative_"):
    _KANDINSKY |= {
        f"{_kind}prompt_embeds_qwen": TEXT[f"{_kind}prompt_embeds"],
        f"{_kind}prompt_embeds_clip": _POOLED[f"{_kind}prompt_embeds"][:, 0],
        f"{_kind}prompt_cu_seqlens": torch.tensor([0, 9], dtype=torch.int32),
    }


# -- HunyuanImage, HunyuanDiT

_HUNYUAN_IMAGE = {
    **TEXT,
    **masks("embeds_mask", torch.int64),
    **_of_both("embeds_2", 4, 16, seeds=(3, 4)),
    **masks("embeds_mask_2", torch.int64, (3, 3), 4),
}


def hunyuan_image(*, guided: bool = False) -> Any:
    guiders = {name: AdaptiveProjectedMixGuidance(guidance_scale=3.0) for name in ("guider", "ocr_guider")}
    sizes = {"block_out_channels": (32,) * 4, "layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 32}
    channels = {"in_channels": 3, "out_channels": 3, "latent_channels": 4}
    vae = random_model("AutoencoderKLHunyuanImage", 2, **channels, **sizes)
    return tiny_pipe("HunyuanImagePipeline", "hunyuanimage", vae=vae, **(guiders if guided else {}))


def hunyuan_image_refiner() -> Any:
    """Build the refiner, which concatenates the given image and its latents along channels."""
    sizes = {"block_out_channels": (8,) * 5, "layers_per_block": 1, "latent_channels": 2}
    vae = random_model("AutoencoderKLHunyuanImageRefiner", 2, **sizes)
    return tiny_pipe("HunyuanImageRefinerPipeline", "hunyuanimage refiner", vae=vae, config={"in_channels": 8})


_HUNYUAN_DIT = {
    **SIZE,
    **TEXT,
    **masks("attention_mask"),
    **_of_both("embeds_2", 5, 16, seeds=(5, 6)),
    **masks("attention_mask_2", torch.int64, (5, 2), 5),
    "use_resolution_binning": False,
}


def hunyuan_dit(cls: str = "HunyuanDiTPipeline", **components: Any) -> Any:
    unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return tiny_pipe(cls, "hunyuandit", scheduler=DDIMScheduler(), **unchecked, **components)


def hunyuan_dit_controlled() -> Any:
    cls, config = "HunyuanDiT2DControlNetModel", MODELS["hunyuandit"].config
    taken = inspect.signature(getattr(diffusers, cls)).parameters
    shared = {name: value for name, value in config.items() if name in taken}
    controlnet = random_model(cls, 8, transformer_num_layers=config["num_layers"], **shared)
    return hunyuan_dit("HunyuanDiTControlNetPipeline", controlnet=controlnet)


# -- further families


def ideogram() -> Any:
    """Build Ideogram 4. Its second transformer has no text; ``encode_prompt`` replaces Qwen 3 VL."""
    second = MODELS["ideogram 4"].build(2)
    vae = kl_vae("AutoencoderKLFlux2")
    pipe = tiny_pipe("Ideogram4Pipeline", "ideogram 4", vae=vae, unconditional_transformer=second)

    def encode_prompt(*, grid_h: int, grid_w: int, **_: Any) -> tuple[Tensor, ...]:
        image = grid_h * grid_w
        text = torch.cat([TEXT["prompt_embeds"], torch.zeros(1, image, TEXT_WIDTH)], dim=1)
        return text, *pipe._prepare_ids([7], grid_h, grid_w, 9, torch.device("cpu"))

    pipe.encode_prompt = encode_prompt
    return pipe


def prx() -> Any:
    with warnings.catch_warnings():
        # diffusers' own use of a class that it calls deprecated.
        warnings.filterwarnings("ignore", "`LoraLoaderMixin` is deprecated")
        return tiny_pipe("PRXPipeline", "prx")


class _ChatTemplate:
    """A processor. Qwen-Image 2.1 asks it how many tokens the system's message has."""

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0]]

    @property
    def tokenizer(self) -> Any:
        return self

    def encode(self, text: str) -> list[int]:
        return [1]


def qwen_image_21() -> Any:
    return tiny_pipe("QwenImage21Pipeline", "qwen-image 2.1", vae=None, processor=_ChatTemplate())


_MASKED = {**TEXT, **masks("attention_mask")}
_EMBEDS_MASKED = {**TEXT, **masks("embeds_mask")}
# 4 × 6 image tokens of 16 × 16 pixels, and 3 × 5 of 32 × 32.
_MEDIUM, _LARGE = {"height": 64, "width": 96}, {"height": 96, "width": 160}
_QWEN_21 = {**_MEDIUM, **_EMBEDS_MASKED, "true_cfg_scale": 3.0}
_SANA = {**_LARGE, **_MASKED, "negative_prompt": None, "use_resolution_binning": False}
_SANA_VIDEO = {**_MEDIUM, **_MASKED, "negative_prompt": None, "frames": 9, "use_resolution_binning": False}
_FROM_IMAGE = {"image": SMALL_IMAGE, "strength": 0.9}
_ANYFLOW = {**VIDEO, **TEXT, "guidance_scale": 3.0}
# Text embeddings of each block, and those from which the model makes tokens.
_FIBO_2 = {
    **_MEDIUM,
    "prompt": None,
    "prompt_embeds": _of_both("embeds", 2, 9, TEXT_WIDTH, seeds=(9, 9))["prompt_embeds"],
    "negative_prompt_embeds": _of_both("embeds", 2, 5, TEXT_WIDTH, seeds=(5, 5))["prompt_embeds"],
    "prompt_embeds_mask": first(9),
    "negative_prompt_embeds_mask": first(5, 5),
}

SHELF_PIPELINES: dict[str, TinyPipeline] = {
    "z-image": TinyPipeline(lambda: tiny_pipe("ZImagePipeline", "z-image", vae=small_vae()), _Z_IMAGE),
    "chroma": TinyPipeline(lambda: tiny_pipe("ChromaPipeline", "chroma", vae=small_vae()), SMALL, _MASKED),
    "cogview4": TinyPipeline(lambda: tiny_pipe("CogView4Pipeline", "cogview4"), SIZE, TEXT),
    "cogview3+": TinyPipeline(
        lambda: tiny_pipe("CogView3PlusPipeline", "cogview3+", scheduler=CogVideoXDDIMScheduler()), SIZE, TEXT
    ),
    "hunyuanimage": TinyPipeline(hunyuan_image, SIZE, _HUNYUAN_IMAGE),
    "hunyuanimage, guided": TinyPipeline(lambda: hunyuan_image(guided=True), SIZE, _HUNYUAN_IMAGE),
    "ovis": TinyPipeline(
        lambda: tiny_pipe("OvisImagePipeline", "ovis", vae=small_vae()), SMALL, TEXT, negative_prompt=None
    ),
    "bria": TinyPipeline(lambda: tiny_pipe("BriaPipeline", "bria", vae=small_vae()), SMALL, TEXT),
    "kandinsky 5, one image": TinyPipeline(kandinsky5_image, SIZE, _KANDINSKY),
    "kandinsky 5": TinyPipeline(kandinsky5_video, VIDEO, _KANDINSKY),
    "krea 2": TinyPipeline(
        lambda: tiny_pipe("Krea2Pipeline", "krea 2", vae=wan_vae("AutoencoderKLQwenImage")),
        {**SIZE, "prompt": None, **_of_both("embeds", 9, 3, TEXT_WIDTH, seeds=(0, 1)), **masks("embeds_mask")},
    ),
    "easyanimate": TinyPipeline(
        lambda: tiny_pipe(
            "EasyAnimatePipeline", "easyanimate", vae=kl_vae("AutoencoderKLMagvit"), config={"text_embed_dim_t5": None}
        ),
        {**VIDEO, **_MASKED},
    ),
    "ernie-image": TinyPipeline(
        lambda: tiny_pipe("ErnieImagePipeline", "ernie-image", vae=None, config={"patch_size": 1}), _Z_IMAGE, SIZE
    ),
    "prx": TinyPipeline(prx, SIZE, _MASKED, use_resolution_binning=False),
    "dit": TinyPipeline(
        lambda: tiny_pipe(
            "DiTPipeline", "dit", scheduler=DDIMScheduler(), config={"sample_size": 10, "num_embeds_ada_norm": 1000}
        ),
        {"class_labels": [3], "output_type": "np"},
        without=("prompt",),
    ),
    "anyflow": TinyPipeline(
        lambda: tiny_pipe("AnyFlowPipeline", "anyflow", vae=wan_vae(), scheduler=FlowMapEulerDiscreteScheduler()),
        _ANYFLOW,
    ),
    "anyflow far": TinyPipeline(
        lambda: tiny_pipe(
            "AnyFlowFARPipeline", "anyflow far", vae=wan_vae(), scheduler=FlowMapEulerDiscreteScheduler()
        ),
        {**_ANYFLOW, "chunk_partition": [1, 2]},
    ),
    "nucleus": TinyPipeline(
        lambda: tiny_pipe(
            "NucleusMoEImagePipeline", "nucleus", config={"out_channels": 4}, vae=wan_vae("AutoencoderKLQwenImage")
        ),
        {**SIZE, **_EMBEDS_MASKED},
    ),
    "allegro": TinyPipeline(
        lambda: tiny_pipe("AllegroPipeline", "allegro", vae=None, scheduler=EulerAncestralDiscreteScheduler()),
        {**VIDEO, **_MASKED, "negative_prompt": None},
    ),
    "z-image, image": TinyPipeline(
        lambda: tiny_pipe("ZImageImg2ImgPipeline", "z-image", vae=small_vae()), _Z_IMAGE, _FROM_IMAGE
    ),
    "chroma, image": TinyPipeline(
        lambda: tiny_pipe("ChromaImg2ImgPipeline", "chroma", vae=small_vae()), SMALL, _MASKED, _FROM_IMAGE
    ),
    "z-image, inpainting": TinyPipeline(
        lambda: tiny_pipe("ZImageInpaintPipeline", "z-image", vae=small_vae()),
        {**_Z_IMAGE, **_FROM_IMAGE, "mask_image": SMALL_MASK},
    ),
    "z-image, controlnet": TinyPipeline(z_image_controlled, _Z_IMAGE, control_image=SMALL_IMAGE),
    "cogview4, control": TinyPipeline(
        lambda: tiny_pipe("CogView4ControlPipeline", "cogview4", config={"in_channels": 8}),
        {**SIZE, **TEXT, "control_image": IMAGE},
    ),
    "glm-image": TinyPipeline(
        lambda: tiny_pipe("GlmImagePipeline", "glm-image", vision_language_encoder=None),
        {**_MEDIUM, **TEXT, "prior_token_ids": torch.arange(24)[None] % 16},
    ),
    "kandinsky 5, image": TinyPipeline(
        lambda: kandinsky5_video("Kandinsky5I2VPipeline"), VIDEO, _KANDINSKY, num_frames=17, image=IMAGE
    ),
    "ideogram 4": TinyPipeline(ideogram, SIZE, max_sequence_length=9, guidance_schedule=None, guidance_scale=3.0),
    "hunyuandit": TinyPipeline(hunyuan_dit, _HUNYUAN_DIT),
    "hunyuandit, perturbed": TinyPipeline(
        lambda: hunyuan_dit("HunyuanDiTPAGPipeline", pag_applied_layers="blocks.1"), _HUNYUAN_DIT
    ),
    "hunyuandit, controlnet": TinyPipeline(hunyuan_dit_controlled, _HUNYUAN_DIT, control_image=IMAGE),
    "hunyuanimage, refined": TinyPipeline(
        hunyuan_image_refiner, _LARGE, TEXT, masks("embeds_mask", torch.int64), image=random_image(96, 160)
    ),
    "z-image, controlnet, inpainting": TinyPipeline(
        lambda: z_image_controlled("ZImageControlNetInpaintPipeline", channels=9),
        {**_Z_IMAGE, "image": SMALL_IMAGE, "mask_image": SMALL_MASK, "control_image": random_image(24, 40, seed=2)},
    ),
    "kandinsky 5, one image, image": TinyPipeline(
        lambda: kandinsky5_image("Kandinsky5I2IPipeline", visual_cond=True), SIZE, _KANDINSKY, image=IMAGE
    ),
    "bria fibo 2": TinyPipeline(
        lambda: tiny_pipe("BriaFibo2Pipeline", "bria fibo 2", vae=kl_vae("AutoencoderKLFlux2")), _FIBO_2
    ),
    "latte": TinyPipeline(
        lambda: tiny_pipe("LattePipeline", "latte", vae=None, scheduler=DDIMScheduler()),
        {**SIZE, **TEXT, "negative_prompt": None, "video_length": 3},
    ),
    "qwen-image 2.1": TinyPipeline(qwen_image_21, _QWEN_21),
    "qwen-image 2.1, no cached keys": TinyPipeline(qwen_image_21, _QWEN_21, use_kv_cache=False),
    "sana": TinyPipeline(lambda: tiny_pipe("SanaPipeline", "sana", vae=None), _SANA),
    "sana, perturbed": TinyPipeline(
        lambda: tiny_pipe("SanaPAGPipeline", "sana", vae=None, pag_applied_layers="transformer_blocks.1"), _SANA
    ),
    "sana video": TinyPipeline(lambda: tiny_pipe("SanaVideoPipeline", "sana video", vae=None), _SANA_VIDEO),
    **COSMOS_PIPELINES,
    **EDIT_PIPELINES,
    **AUDIO_PIPELINES,
}
