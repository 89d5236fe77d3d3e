"""Adapter of AuraFlow. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_FIRST, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, TEXT_THEN_IMAGE
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Plan

AURAFLOW = Adapter(
    transformer="AuraFlowTransformer2DModel",
    pipelines="AuraFlow",
    plan=Plan(
        inputs={},
        inner={"joint_transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        # The model's register tokens precede the text tokens and are part of the text segment.
        joint_order=TEXT_THEN_IMAGE,
        batched=samples_in_dim_0("attention_kwargs"),
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("joint_transformer_blocks",), TEXT_FIRST, chained=True),
            BlockGroup(("single_transformer_blocks",), chained=True),
        )
    ),
)
