"""Tiny pipelines on UNets: Stable Diffusion 1.5, XL, Stable Video Diffusion; random weights, two levels of rows."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from torch import nn

from zoo.flux.models import CLIP_WIDTH
from zoo.tiny.base import fill
from zoo.tiny.pipelines.components import (
    IMAGE_WIDTH,
    VISION,
    TinyPipeline,
    flux_encoders,
    from_transformers,
    random_image,
    random_mask,
    random_model,
    tokenizers,
    whole_pipe,
)

_BLOCKS: dict[str, Any] = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "cross_attention_dim": CLIP_WIDTH,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
_SD: dict[str, Any] = {
    **_BLOCKS,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_XL: dict[str, Any] = {
    **_BLOCKS,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "cross_attention_dim": 2 * CLIP_WIDTH,
    "projection_class_embeddings_input_dim": CLIP_WIDTH + 6 * 8,
}
_NOISE: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def _vae(cls: str = "AutoencoderKL", **config: Any) -> nn.Module:
    """Return a VAE whose latent pixels are 8 × 8 pixels, the only size that the pipelines take."""
    types = {"down_block_types": ("DownEncoderBlock2D",) * 4}
    if cls == "AutoencoderKL":
        types["up_block_types"] = ("UpDecoderBlock2D",) * 4
        config = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 4}
    return random_model(cls, 2, latent_channels=4, **types, **config)


def _scheduler() -> Any:
    return diffusers.DDIMScheduler(**_NOISE, clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def stable_diffusion(
    cls: str = "StableDiffusionPipeline", *, unet: dict[str, Any] | None = None, **components: Any
) -> Any:
    """Build Stable Diffusion 1.5; ``unet`` holds changes to the config of the UNet."""
    return whole_pipe(
        cls,
        unet=random_model("UNet2DConditionModel", 1, **{**_SD, **(unet or {})}),
        vae=_vae(),
        text_encoder=flux_encoders()["clip"],
        tokenizer=tokenizers().clip,
        scheduler=components.pop("scheduler", None) or _scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **components,
    )


def stable_diffusion_xl(cls: str = "StableDiffusionXLPipeline", **components: Any) -> Any:
    encoder = flux_encoders()["clip"]
    projecting = fill(transformers.CLIPTextModelWithProjection(encoder.config), seed=4)
    return whole_pipe(
        cls,
        unet=random_model("UNet2DConditionModel", 1, **_XL),
        vae=_vae(),
        text_encoder=encoder,
        text_encoder_2=projecting,
        tokenizer=tokenizers().clip,
        tokenizer_2=tokenizers().clip,
        scheduler=_scheduler(),
        add_watermarker=False,
        **components,
    )


def _conditioned(config: dict[str, Any], seed: int = 5) -> nn.Module:
    """Return a ControlNet for a UNet of ``config``."""
    taken = {name: value for name, value in config.items() if name not in ("sample_size", "up_block_types")}
    return random_model("ControlNetModel", seed, **taken, conditioning_embedding_out_channels=(4, 4, 8, 8))


def controlled(several: bool = False, **pipe: Any) -> Any:
    nets = [_conditioned(_SD), _conditioned(_SD, seed=6)]
    return stable_diffusion(
        "StableDiffusionControlNetPipeline", controlnet=MultiControlNetModel(nets) if several else nets[0], **pipe
    )


def controlled_xl(cls: str = "StableDiffusionXLControlNetPipeline") -> Any:
    return stable_diffusion_xl(cls, controlnet=_conditioned(_XL))


def with_ip_adapter() -> Any:
    """Build a pipeline whose cross-attentions see 4 tokens of an image."""
    pipe = stable_diffusion()
    generator = torch.Generator().manual_seed(9)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {
        "image_proj": {
            "proj.weight": noise(4 * CLIP_WIDTH, IMAGE_WIDTH),
            "proj.bias": noise(4 * CLIP_WIDTH),
            "norm.weight": 1 + noise(CLIP_WIDTH),
            "norm.bias": noise(CLIP_WIDTH),
        },
        "ip_adapter": {
            f"{2 * index + 1}.{name}.weight": noise(width, CLIP_WIDTH)
            for index, width in enumerate(_widths_in_order(pipe.unet))
            for name in ("to_k_ip", "to_v_ip")
        },
    }
    pipe.unet._load_ip_adapter_weights(state, low_cpu_mem_usage=False)
    return pipe


def with_t2i_adapter() -> Any:
    adapter = random_model(
        "T2IAdapter", 8, adapter_type="full_adapter", channels=[8, 16], num_res_blocks=1, downscale_factor=8
    )
    return stable_diffusion("StableDiffusionAdapterPipeline", adapter=adapter)


def _widths_in_order(unet: Any) -> list[int]:
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    return [unet.get_submodule(name.removesuffix(".processor")).to_q.out_features for name in names]


def stable_video_diffusion() -> Any:
    unet = random_model(
        "UNetSpatioTemporalConditionModel",
        1,
        sample_size=16,
        layers_per_block=1,
        cross_attention_dim=CLIP_WIDTH,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        projection_class_embeddings_input_dim=24,
        addition_time_embed_dim=8,
    )
    vision = {**VISION, "projection_dim": CLIP_WIDTH, "image_size": 224, "patch_size": 112}
    return whole_pipe(
        "StableVideoDiffusionPipeline",
        unet=unet,
        vae=_vae("AutoencoderKLTemporalDecoder", block_out_channels=(32,) * 4),
        # SVD takes no other size of images.
        image_encoder=from_transformers("CLIPVisionModelWithProjection", "CLIPVisionConfig", 7, **vision),
        feature_extractor=transformers.CLIPImageProcessorPil(),
        scheduler=diffusers.EulerDiscreteScheduler(
            **_NOISE,
            prediction_type="v_prediction",
            timestep_type="continuous",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
        ),
    )


# 17 × 11 latents: an odd number of rows, on two levels.
_HEIGHT, _WIDTH = 136, 88
_SIZE = {"height": _HEIGHT, "width": _WIDTH}
_GUIDED = {"negative_prompt": "a blue square", "guidance_scale": 4.0}
_IMAGE = random_image(_HEIGHT, _WIDTH)
_MASK = random_mask(_HEIGHT, _WIDTH)
_TEXT = {**_SIZE, **_GUIDED}
# Embeddings of a negative image and of an image.
_IP_ADAPTER = {"ip_adapter_image_embeds": [torch.linspace(-1, 2, 2 * IMAGE_WIDTH).reshape(2, 1, IMAGE_WIDTH)]}
# Hides the image prompt from the upper left of the image.
_WHERE = torch.ones(1, 1, _HEIGHT, _WIDTH).index_fill(2, torch.arange(40), 0).index_fill(3, torch.arange(30), 0)
_PIX2PIX = {"image": _IMAGE, **_GUIDED, "image_guidance_scale": 1.5}

UNET_PIPELINES: dict[str, TinyPipeline] = {
    "sd": TinyPipeline(stable_diffusion, _TEXT),
    "sd, image": TinyPipeline(
        lambda: stable_diffusion("StableDiffusionImg2ImgPipeline"), _GUIDED, image=_IMAGE, strength=0.9
    ),
    "sd, inpaint": TinyPipeline(
        lambda: stable_diffusion("StableDiffusionInpaintPipeline", unet={"in_channels": 9}),
        {"image": _IMAGE, "mask_image": _MASK, **_TEXT},
    ),
    "sd, three branches": TinyPipeline(
        lambda: stable_diffusion("StableDiffusionInstructPix2PixPipeline", unet={"in_channels": 8}), _PIX2PIX
    ),
    "sd, perturbed": TinyPipeline(
        lambda: stable_diffusion("StableDiffusionPAGPipeline", pag_applied_layers=["down"]), _TEXT, pag_scale=2.0
    ),
    "sd, control": TinyPipeline(controlled, _TEXT, image=_IMAGE),
    "sd, controls": TinyPipeline(
        lambda: controlled(several=True),
        _TEXT,
        image=[_IMAGE, random_image(_HEIGHT, _WIDTH, seed=2)],
        controlnet_conditioning_scale=[0.7, 1.2],
    ),
    "sd, control guesses": TinyPipeline(controlled, _TEXT, image=_IMAGE, guess_mode=True),
    "sd, image prompt": TinyPipeline(with_ip_adapter, _TEXT, _IP_ADAPTER),
    "sd, image prompt in places": TinyPipeline(
        with_ip_adapter, _TEXT, _IP_ADAPTER, cross_attention_kwargs={"ip_adapter_masks": [_WHERE]}
    ),
    "sd, t2i adapter": TinyPipeline(with_t2i_adapter, _TEXT, image=_IMAGE),
    "xl": TinyPipeline(stable_diffusion_xl, _TEXT),
    "xl, image": TinyPipeline(
        lambda: stable_diffusion_xl("StableDiffusionXLImg2ImgPipeline"), _GUIDED, image=_IMAGE, strength=0.9
    ),
    "xl, inpaint": TinyPipeline(
        lambda: stable_diffusion_xl("StableDiffusionXLInpaintPipeline"),
        {"image": _IMAGE, "mask_image": _MASK, **_TEXT, "strength": 0.9},
    ),
    "xl, control": TinyPipeline(controlled_xl, _TEXT, image=_IMAGE),
    "svd": TinyPipeline(stable_video_diffusion, _SIZE, image=_IMAGE, num_frames=3, without=("prompt",)),
}
