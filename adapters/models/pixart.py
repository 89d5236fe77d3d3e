"""Adapter of PixArt. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_TO_TEXT
from para_core.plans.plan import Plan

PIXART = Adapter(
    transformer="PixArtTransformer2DModel",
    pipelines="PixArt",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={"transformer_blocks.*.attn2": IMAGE_TO_TEXT},
        batched=samples_in_dim_0(
            "added_cond_kwargs", "cross_attention_kwargs", "attention_mask", "encoder_attention_mask"
        ),
    ),
    blocks=chained("transformer_blocks"),
)
