"""Adapter of AuraFlow (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import of_samples
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Split

AURAFLOW = Adapter(
    transformer="AuraFlowTransformer2DModel",
    pipelines="AuraFlow",
    plan=Plan(
        inputs={},
        inner={"joint_transformer_blocks.0": {"hidden_states": Split(dim=1, segment="image")}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        # The model's register tokens precede the text tokens and are part of the text segment.
        joint_order=("text", "image"),
        batched=of_samples("attention_kwargs"),
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("joint_transformer_blocks",), ("encoder_hidden_states", "hidden_states"), chained=True),
            BlockGroup(("single_transformer_blocks",), chained=True),
        )
    ),
)
