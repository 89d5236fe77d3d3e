"""Adapter of Latte. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_TO_TEXT
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Plan, Split

LATTE = Adapter(
    transformer="LatteTransformer3DModel",
    pipelines="Latte",
    plan=Plan(
        inputs={},
        inner={
            # The tokens are [B · F, H · W, C], so dim 1 holds the image tokens of one frame.
            "pos_embed": {0: IMAGE},
            # The temporal blocks get a time step per image token, [B · H · W, C], one sample after the other.
            "temporal_transformer_blocks.*": {"timestep": Split(dim=0, like="image", runs=True)},
        },
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={
            "transformer_blocks.*.attn2": IMAGE_TO_TEXT,
            # Each token attends to the tokens at the same position in all frames, which are on the same rank.
            "temporal_transformer_blocks.*.attn1": (Attention(("frames",)),),
        },
        batched=samples_in_dim_0("encoder_attention_mask"),
    ),
    # Temporal blocks run between these blocks and are not cached, so they run at every step.
    blocks=CachedBlocks((BlockGroup(("transformer_blocks",)),)),
)
