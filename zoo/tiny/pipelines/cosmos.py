"""Tiny pipelines of Cosmos 1, 2, 2.5 and 3."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import DiffusionPipeline, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import nn

from zoo.tiny.base import WIDTH
from zoo.tiny.pipelines import encoders
from zoo.tiny.pipelines.components import TinyPipeline, random_model, tiny_pipe, wan_vae
from zoo.tiny.pipelines.options import FRAMES, IMAGE, SIZE, TEXT, VIDEO, random_video
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision
from zoo.tiny.transformers.registry import MODELS


class _NoSafetyChecker:
    """A safety checker, which Cosmos requires and calls with prompts. These are not given here."""

    def to(self, device: Any) -> None:
        pass


def cosmos(cls: str, model: str = "cosmos", **components: Any) -> DiffusionPipeline:
    return tiny_pipe(cls, model, safety_checker=_NoSafetyChecker(), **components)


def _vae_of_cosmos1() -> nn.Module:
    """Return a VAE whose latent pixels are 4 frames of 4 × 4 pixels."""
    sizes = {"encoder_block_out_channels": (8,) * 3, "decode_block_out_channels": (8,) * 3, "num_layers": 1}
    ratios = {"patch_size": 2, "temporal_compression_ratio": 4, "spatial_compression_ratio": 4, "resolution": 32}
    latents = {"latent_channels": 4, "latents_mean": None, "latents_std": None}
    return random_model("AutoencoderKLCosmos", 2, attention_resolutions=(), **sizes, **ratios, **latents)


flow_unipc = partial(UniPCMultistepScheduler, use_flow_sigmas=True, prediction_type="flow_prediction")


def cosmos25(cls: str) -> DiffusionPipeline:
    """Build Cosmos 2.5. Its transformer resizes a mask of padding and has no learned positions."""
    stand_in_for_torchvision()
    config = {"in_channels": 5, "extra_pos_embed_type": None, "concat_padding_mask": True}
    model, parts = "cosmos", {}
    if cls == "Cosmos2_5_TransferPipeline":
        model, parts = "cosmos 2.5, transfer", {"controlnet": _controlnet()}
    return cosmos(cls, model, vae=wan_vae(), scheduler=flow_unipc(), config=config, **parts)


def _controlnet() -> nn.Module:
    names = ("num_attention_heads", "attention_head_dim", "mlp_ratio", "text_embed_dim", "adaln_lora_dim", "max_size")
    names += ("img_context_dim_in", "img_context_dim_out")
    shared = {name: MODELS["cosmos 2.5, transfer"].config[name] for name in names}
    # Latents, which the ControlNet pads to this number, and masks of given frames and of padding.
    channels = {"in_channels": 6, "latent_channels": 6, "model_channels": WIDTH}
    return random_model("CosmosControlNetModel", 8, n_controlnet_blocks=2, **channels, **shared)


def cosmos3(cls: str) -> DiffusionPipeline:
    text = encoders.word_tokenizer()
    parts = {"scheduler": flow_unipc(), "text_tokenizer": text, "enable_safety_checker": False}
    return tiny_pipe(cls, "cosmos 3", vae=wan_vae(), config={"vocab_size": len(text)}, **parts)


_COSMOS1_VIDEO = {"vae": _vae_of_cosmos1, "config": {"in_channels": 5}, "scheduler": EDMEulerScheduler}
_COSMOS2 = {"vae": wan_vae, "scheduler": partial(FlowMatchEulerDiscreteScheduler, use_karras_sigmas=True)}
_cosmos = partial(TinyPipeline, cosmos)
_cosmos25 = partial(TinyPipeline, cosmos25, "Cosmos2_5_PredictBasePipeline", VIDEO, TEXT)
_cosmos3 = partial(TinyPipeline, cosmos3, "Cosmos3OmniPipeline", VIDEO, use_system_prompt=False)

COSMOS_PIPELINES: dict[str, TinyPipeline] = {
    "cosmos": _cosmos(
        "CosmosTextToWorldPipeline", VIDEO, TEXT, num_frames=17, parts={"vae": None, "scheduler": EDMEulerScheduler}
    ),
    # Each CFG branch has its own noise in the given frames.
    "cosmos, video": _cosmos(
        "CosmosVideoToWorldPipeline",
        {"height": 32, "width": 48, "num_frames": 9, **TEXT, "video": random_video(5, 32, 48)},
        parts=_COSMOS1_VIDEO,
    ),
    "cosmos 2, one image": _cosmos("Cosmos2TextToImagePipeline", SIZE, TEXT, parts=_COSMOS2),
    "cosmos 2, image": _cosmos(
        "Cosmos2VideoToWorldPipeline", VIDEO, TEXT, image=IMAGE, parts={**_COSMOS2, "config": {"in_channels": 5}}
    ),
    "cosmos 2.5": _cosmos25(),
    "cosmos 2.5, image": _cosmos25(image=IMAGE),
    "cosmos 2.5, video": _cosmos25(video=FRAMES),
    # The video has two parts. The end of the first one is the condition of the second.
    "cosmos 2.5, transfer": TinyPipeline(
        cosmos25,
        "Cosmos2_5_TransferPipeline",
        {**VIDEO, **TEXT, "num_frames": 13, "num_frames_per_chunk": 9, "controls": random_video(13, 48, 80)},
    ),
    "cosmos 3": _cosmos3(),
    "cosmos 3, video": _cosmos3(video=FRAMES, condition_frame_indexes_vision=(0,)),
}
