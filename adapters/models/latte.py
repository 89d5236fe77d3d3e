"""Adapter of Latte (text-to-video). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import of_samples
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

LATTE = Adapter(
    transformer="LatteTransformer3DModel",
    pipelines="Latte",
    plan=Plan(
        inputs={},
        inner={
            # The tokens are [B · F, H · W, C], so dim 1 holds the image tokens of one frame.
            "pos_embed": {0: Split(dim=1, segment="image")},
            # The temporal blocks get a time step per image token, [B · H · W, C]: along dim 0, the tokens of one sample
            # follow those of another.
            "temporal_transformer_blocks.*": {"timestep": Split(dim=0, like="image", runs=True)},
        },
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=("image",),
        attention={
            "transformer_blocks.*.attn2": (Attention(("image",), ("text",)),),
            # Each token attends to the tokens at the same position in all frames, which are on the same rank.
            "temporal_transformer_blocks.*.attn1": (Attention(("frames",)),),
        },
        batched=of_samples("encoder_attention_mask"),
    ),
    # Temporal blocks run between these blocks and are not cached, so they run even on a step whose other blocks are
    # skipped.
    blocks=CachedBlocks((BlockGroup(("transformer_blocks",)),)),
)
