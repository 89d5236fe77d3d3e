"""Tiny pipelines on UNets: Stable Diffusion 1.5, XL, Stable Video Diffusion. They have random weights and two levels of
rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from torch import Tensor, nn

from zoo.flux.models import CLIP_WIDTH
from zoo.tiny.base import IMAGE_WIDTH, fill
from zoo.tiny.pipelines import encoders
from zoo.tiny.pipelines.components import TinyPipeline, random_model, whole_pipe
from zoo.tiny.pipelines.options import random_image, random_mask

_SIZES: dict[str, Any] = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
_SD: dict[str, Any] = {
    **_SIZES,
    "cross_attention_dim": CLIP_WIDTH,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_ADDITION = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
_XL: dict[str, Any] = {
    **_SIZES,
    **_ADDITION,
    "cross_attention_dim": 2 * CLIP_WIDTH,
    "attention_head_dim": (2, 4),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": CLIP_WIDTH + 6 * 8,
}
_NOISE: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def _vae(cls: str = "AutoencoderKL", **config: Any) -> nn.Module:
    """Return a VAE whose latent pixels are 8 × 8 pixels, the only size that the pipelines accept."""
    types = {"down_block_types": ("DownEncoderBlock2D",) * 4}
    if cls == "AutoencoderKL":
        types["up_block_types"] = ("UpDecoderBlock2D",) * 4
        config = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 4}
    return random_model(cls, 2, latent_channels=4, **types, **config)


def _parts(unet: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that Stable Diffusion 1.5 and XL have in common. ``unet`` is the config of the UNet."""
    scheduler = diffusers.DDIMScheduler(**_NOISE, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    net = random_model("UNet2DConditionModel", 1, **unet)
    return {"unet": net, "vae": _vae(), "scheduler": scheduler, **encoders.clip()}


def stable_diffusion(cls: str, *, unet: dict[str, Any] | None = None, **components: Any) -> DiffusionPipeline:
    """Build Stable Diffusion 1.5. ``unet`` has changes to the config of the UNet."""
    unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return whole_pipe(cls, **_parts({**_SD, **(unet or {})}), **unchecked, **components)


def stable_diffusion_xl(cls: str = "StableDiffusionXLPipeline", **components: Any) -> DiffusionPipeline:
    parts = _parts(_XL)
    projecting = fill(transformers.CLIPTextModelWithProjection(parts["text_encoder"].config), seed=4)
    parts |= {"text_encoder_2": projecting, "tokenizer_2": parts["tokenizer"], "add_watermarker": False}
    return whole_pipe(cls, **parts, **components)


def _control(config: dict[str, Any], seed: int = 5) -> nn.Module:
    """Return a ControlNet for a UNet of ``config``."""
    taken = {name: value for name, value in config.items() if name not in ("sample_size", "up_block_types")}
    return random_model("ControlNetModel", seed, **taken, conditioning_embedding_out_channels=(4, 4, 8, 8))


def with_ip_adapter(cls: str) -> DiffusionPipeline:
    """Build a pipeline whose cross-attentions see 4 tokens of an image."""
    pipe = stable_diffusion(cls)
    generator = torch.Generator().manual_seed(9)

    def noise(*shape: int) -> Tensor:
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


def _widths_in_order(unet: Any) -> list[int]:
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    return [unet.get_submodule(name.removesuffix(".processor")).to_q.out_features for name in names]


def _t2i_adapter() -> nn.Module:
    sizes = {"channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 8}
    return random_model("T2IAdapter", 8, adapter_type="full_adapter", **sizes)


def stable_video_diffusion(cls: str) -> DiffusionPipeline:
    blocks = {
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    }
    sizes = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (32, 64), "num_attention_heads": (2, 4)}
    widths = {"cross_attention_dim": CLIP_WIDTH, "addition_time_embed_dim": 8}
    widths |= {"projection_class_embeddings_input_dim": 24}
    unet = random_model("UNetSpatioTemporalConditionModel", 1, **blocks, **sizes, **widths)
    vision = {**encoders.VISION, "projection_dim": CLIP_WIDTH, "image_size": 224, "patch_size": 112}
    sigmas = {"use_karras_sigmas": True, "sigma_min": 0.002, "sigma_max": 700.0}
    types = {"prediction_type": "v_prediction", "timestep_type": "continuous"}
    return whole_pipe(
        cls,
        unet=unet,
        vae=_vae("AutoencoderKLTemporalDecoder", block_out_channels=(32,) * 4),
        # SVD accepts no other size of images.
        image_encoder=encoders.from_transformers("CLIPVisionModelWithProjection", 7, **vision),
        feature_extractor=transformers.CLIPImageProcessorPil(),
        scheduler=diffusers.EulerDiscreteScheduler(**_NOISE, **types, **sigmas),
    )


# These give 17 × 11 latents: an odd number of rows, on two levels.
_HEIGHT, _WIDTH = 136, 88
_GUIDED = {"negative_prompt": "a blue square", "guidance_scale": 4.0}
_TEXT = {"height": _HEIGHT, "width": _WIDTH, **_GUIDED}
_IMAGE = random_image(_HEIGHT, _WIDTH)
_PAINTED = {"image": _IMAGE, "mask_image": random_mask(_HEIGHT, _WIDTH)}
# These are embeddings of a negative image and of an image.
_IP_ADAPTER = {"ip_adapter_image_embeds": [torch.linspace(-1, 2, 2 * IMAGE_WIDTH).reshape(2, 1, IMAGE_WIDTH)]}
# The mask hides the image prompt from the upper left of the image.
_WHERE = torch.ones(1, 1, _HEIGHT, _WIDTH).index_fill(2, torch.arange(40), 0).index_fill(3, torch.arange(30), 0)


def _two_controls() -> MultiControlNetModel:
    return MultiControlNetModel([_control(_SD), _control(_SD, seed=6)])


_sd = partial(TinyPipeline, stable_diffusion)
_sd_control = partial(_sd, "StableDiffusionControlNetPipeline", _TEXT)
_ip_adapter = partial(TinyPipeline, with_ip_adapter, "StableDiffusionPipeline", _TEXT, _IP_ADAPTER)
_xl = partial(TinyPipeline, stable_diffusion_xl)
_ONE_CONTROL = {"controlnet": partial(_control, _SD)}

UNET_PIPELINES: dict[str, TinyPipeline] = {
    "sd": _sd("StableDiffusionPipeline", _TEXT),
    "sd, image": _sd("StableDiffusionImg2ImgPipeline", _GUIDED, image=_IMAGE, strength=0.9),
    "sd, inpaint": _sd("StableDiffusionInpaintPipeline", _TEXT, _PAINTED, parts={"unet": {"in_channels": 9}}),
    "sd, three branches": _sd(
        "StableDiffusionInstructPix2PixPipeline",
        {**_GUIDED, "image": _IMAGE, "image_guidance_scale": 1.5},
        parts={"unet": {"in_channels": 8}},
    ),
    "sd, perturbed": _sd("StableDiffusionPAGPipeline", _TEXT, pag_scale=2.0, parts={"pag_applied_layers": ["down"]}),
    "sd, control": _sd_control(image=_IMAGE, parts=_ONE_CONTROL),
    "sd, controls": _sd_control(
        image=[_IMAGE, random_image(_HEIGHT, _WIDTH, seed=2)],
        controlnet_conditioning_scale=[0.7, 1.2],
        parts={"controlnet": _two_controls},
    ),
    "sd, control guesses": _sd_control(image=_IMAGE, guess_mode=True, parts=_ONE_CONTROL),
    "sd, image prompt": _ip_adapter(),
    "sd, image prompt in places": _ip_adapter(cross_attention_kwargs={"ip_adapter_masks": [_WHERE]}),
    "sd, t2i adapter": _sd("StableDiffusionAdapterPipeline", _TEXT, image=_IMAGE, parts={"adapter": _t2i_adapter}),
    "xl": _xl("StableDiffusionXLPipeline", _TEXT),
    "xl, image": _xl("StableDiffusionXLImg2ImgPipeline", _GUIDED, image=_IMAGE, strength=0.9),
    "xl, inpaint": _xl("StableDiffusionXLInpaintPipeline", _TEXT, _PAINTED, strength=0.9),
    "xl, control": _xl(
        "StableDiffusionXLControlNetPipeline", _TEXT, image=_IMAGE, parts={"controlnet": partial(_control, _XL)}
    ),
    "svd": TinyPipeline(
        stable_video_diffusion,
        "StableVideoDiffusionPipeline",
        {"height": _HEIGHT, "width": _WIDTH, "image": _IMAGE, "num_frames": 3},
        without=("prompt",),
    ),
}
