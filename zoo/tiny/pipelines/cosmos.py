"""Tiny pipelines of Cosmos 1, 2, 2.5 and 3."""

from __future__ import annotations

from typing import Any

from diffusers import EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import nn

from zoo.tiny.pipelines.components import (
    FRAMES,
    IMAGE,
    SIZE,
    TEXT,
    VIDEO,
    TinyPipeline,
    random_model,
    random_video,
    tiny_pipe,
    wan_vae,
    word_tokenizer,
)
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision
from zoo.tiny.transformers.registry import MODELS


class _NoSafetyChecker:
    """A safety checker: Cosmos requires one, and asks it about prompts, which are not given here."""

    def to(self, device: Any) -> None:
        pass


def cosmos(cls: str, model: str = "cosmos", **components: Any) -> Any:
    return tiny_pipe(cls, model, safety_checker=_NoSafetyChecker(), **components)


def _vae_of_cosmos1() -> nn.Module:
    """Return a VAE whose latent pixels are 4 frames of 4 × 4 pixels."""
    sizes = {"encoder_block_out_channels": (8,) * 3, "decode_block_out_channels": (8,) * 3, "num_layers": 1}
    ratios = {"patch_size": 2, "temporal_compression_ratio": 4, "spatial_compression_ratio": 4, "resolution": 32}
    latents = {"latent_channels": 4, "latents_mean": None, "latents_std": None}
    return random_model("AutoencoderKLCosmos", 2, attention_resolutions=(), **sizes, **ratios, **latents)


def _flow() -> Any:
    return UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")


def cosmos25(cls: str = "Cosmos2_5_PredictBasePipeline", model: str = "cosmos", **components: Any) -> Any:
    """Build Cosmos 2.5. Its transformer resizes a mask of padding and has no learned positions."""
    stand_in_for_torchvision()
    config = {"in_channels": 5, "extra_pos_embed_type": None, "concat_padding_mask": True}
    return cosmos(cls, model, vae=wan_vae(), scheduler=_flow(), config=config, **components)


def cosmos25_transfer() -> Any:
    shared = ("num_attention_heads", "attention_head_dim", "mlp_ratio", "text_embed_dim", "adaln_lora_dim", "max_size")
    shared += ("img_context_dim_in", "img_context_dim_out")
    config = MODELS["cosmos 2.5, transfer"].config
    controlnet = random_model(
        "CosmosControlNetModel",
        8,
        n_controlnet_blocks=2,
        # Latents, which the ControlNet pads to this number, and masks of given frames and of padding.
        in_channels=6,
        latent_channels=6,
        model_channels=36,
        **{name: config[name] for name in shared},
    )
    return cosmos25("Cosmos2_5_TransferPipeline", "cosmos 2.5, transfer", controlnet=controlnet)


def cosmos3() -> Any:
    tokenizer = word_tokenizer()
    return tiny_pipe(
        "Cosmos3OmniPipeline",
        "cosmos 3",
        vae=wan_vae(),
        scheduler=_flow(),
        text_tokenizer=tokenizer,
        enable_safety_checker=False,
        config={"vocab_size": len(tokenizer)},
    )


_COSMOS3 = {**VIDEO, "use_system_prompt": False}

COSMOS_PIPELINES: dict[str, TinyPipeline] = {
    "cosmos": TinyPipeline(
        lambda: cosmos("CosmosTextToWorldPipeline", vae=None, scheduler=EDMEulerScheduler()), VIDEO, TEXT, num_frames=17
    ),
    # Each CFG branch has its own noise in the given frames.
    "cosmos, video": TinyPipeline(
        lambda: cosmos(
            "CosmosVideoToWorldPipeline",
            vae=_vae_of_cosmos1(),
            config={"in_channels": 5},
            scheduler=EDMEulerScheduler(),
        ),
        {"height": 32, "width": 48, "num_frames": 9, **TEXT, "video": random_video(5, 32, 48)},
    ),
    "cosmos 2, one image": TinyPipeline(
        lambda: cosmos(
            "Cosmos2TextToImagePipeline",
            vae=wan_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        ),
        {**SIZE, **TEXT},
    ),
    "cosmos 2, image": TinyPipeline(
        lambda: cosmos(
            "Cosmos2VideoToWorldPipeline",
            vae=wan_vae(),
            config={"in_channels": 5},
            scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        ),
        {**VIDEO, **TEXT, "image": IMAGE},
    ),
    "cosmos 2.5": TinyPipeline(cosmos25, VIDEO, TEXT),
    "cosmos 2.5, image": TinyPipeline(cosmos25, VIDEO, TEXT, image=IMAGE),
    "cosmos 2.5, video": TinyPipeline(cosmos25, VIDEO, TEXT, video=FRAMES),
    # Two parts, the second with the end of the first as its condition.
    "cosmos 2.5, transfer": TinyPipeline(
        cosmos25_transfer, VIDEO, TEXT, num_frames=13, num_frames_per_chunk=9, controls=random_video(13, 48, 80)
    ),
    "cosmos 3": TinyPipeline(cosmos3, _COSMOS3),
    "cosmos 3, video": TinyPipeline(cosmos3, _COSMOS3, video=FRAMES, condition_frame_indexes_vision=(0,)),
}
