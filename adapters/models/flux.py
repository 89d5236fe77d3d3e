"""FLUX.1: text-to-image, img2img, inpaint, fill, control, kontext, ControlNet.

FLUX.2 and 3. Read against diffusers 0.42.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

IMAGE, TEXT = Split(dim=1, segment="image"), Split(dim=1, segment="text")
JOINT = Attention(("text", "image"))


def _modulated(block: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    norm: Any = block.norm1
    modulated: Tensor = norm(arguments["hidden_states"], emb=arguments["temb"])[0]
    return modulated


FLUX_PLAN = Plan(
    inputs={
        "hidden_states": IMAGE,
        "encoder_hidden_states": TEXT,
        # [S, 3], or [B, S, 3] from older pipelines: a negative dim fits both.
        "img_ids": Split(dim=-2, like="image"),
        "txt_ids": Split(dim=-2, like="text"),
        # Lists of [B, S, C] that are added to the image tokens between blocks.
        "controlnet_block_samples": Split(dim=1, like="image"),
        "controlnet_single_block_samples": Split(dim=1, like="image"),
    },
    # The output of the model is gathered, not that of proj_out, because a LoRA may replace that module.
    outputs={"": Gather(dim=1, segment="image")},
    joint_order=("text", "image"),
    # After the joint attention, image tokens attend to those of each IP-Adapter.
    attention={"transformer_blocks.*.attn": (JOINT, Attention(("image",), ("ip_adapter",)))},
)

FLUX = Adapter(
    transformer="FluxTransformer2DModel",
    pipelines="FLUX.1: every pipeline on FluxTransformer2DModel",
    plan=FLUX_PLAN,
    blocks=CachedBlocks(
        (
            BlockGroup(
                ("transformer_blocks", "single_transformer_blocks"),
                ("encoder_hidden_states", "hidden_states"),
                chained=True,
                between=("controlnet_block_samples", "controlnet_single_block_samples"),
            ),
        ),
        conditions=("encoder_hidden_states", "pooled_projections"),
        modulated=_modulated,
    ),
    threshold=0.08,
    threshold_source="ParaAttention, doc/fastest_flux.md",
)

FLUX2 = Adapter(
    transformer="Flux2Transformer2DModel",
    pipelines="FLUX.2",
    plan=Plan(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "img_ids": Split(dim=-2, like="image"),
            "txt_ids": Split(dim=-2, like="text"),
        },
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image"),
        refused={"kv_cache": "it holds the keys of full reference images, by their positions in the full sequence"},
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("transformer_blocks",), ("encoder_hidden_states", "hidden_states"), chained=True),
            # Text and image tokens in one tensor.
            BlockGroup(("single_transformer_blocks",), chained=True),
        ),
        # Each block appends its own entry, so no block may be skipped.
        uncached=("kv_cache",),
    ),
)

FLUX3 = Adapter(
    transformer="Flux3Transformer2DModel",
    pipelines="FLUX.3",
    plan=Plan(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "img_ids": Split(dim=0, like="image"),
            "txt_ids": Split(dim=0, like="text"),
            "image_cond_hidden_states": Split(dim=1, segment="condition"),
            "image_cond_ids": Split(dim=0, like="condition"),
        },
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image", "condition"),
        # Before they are joined, each segment attends to itself.
        attention={
            "txt_mode_blocks.*.attn": (Attention(("text",)),),
            "mode_blocks.image.*.attn": (Attention(("image",)),),
            "mode_blocks.image_cond.*.attn": (Attention(("condition",)),),
        },
    ),
    blocks=CachedBlocks(
        (BlockGroup(("single_transformer_blocks",), ("encoder_hidden_states", "hidden_states"), chained=True),)
    ),
)
