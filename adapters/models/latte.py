"""Latte. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

LATTE = Adapter(
    transformer="LatteTransformer3DModel",
    pipelines="Latte",
    plan=Plan(
        inputs={},
        inner={
            # [B · F, H · W, C]
            "pos_embed": {0: Split(dim=1, segment="image")},
            # [B · H · W, C]
            "temporal_transformer_blocks.*": {"timestep": Split(dim=0, like="image", runs=True)},
        },
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=("image",),
        attention={
            "transformer_blocks.*.attn2": (Attention(("image",), ("text",)),),
            # Each token attends to those at its position in other frames, which are on the same rank.
            "temporal_transformer_blocks.*.attn1": (Attention(("frames",)),),
        },
        batched=dict.fromkeys(("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"), 0),
    ),
    # The temporal blocks run between these, also on skipped steps.
    blocks=CachedBlocks((BlockGroup(("transformer_blocks",)),)),
)
