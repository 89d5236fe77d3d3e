"""Stable Diffusion 3 and 3.5, with ControlNet and IP-Adapter. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

JOINT = ("image", "text")

SD3 = Adapter(
    transformer="SD3Transformer2DModel",
    pipelines="Stable Diffusion 3",
    plan=Plan(
        # [B, S, C] each, added to the image tokens between blocks.
        inputs={"block_controlnet_hidden_states": Split(dim=1, like="image")},
        # Sharded after the embedding, because a call may skip any block, including the first.
        inner={"pos_embed": {0: Split(dim=1, segment="image")}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=JOINT,
        attention={
            # After the joint attention, image tokens attend to each other and to those of an IP-Adapter.
            "transformer_blocks.*.attn": (Attention(JOINT), Attention(("image",), ("image", "ip_adapter"))),
            # In 3.5 medium, image tokens also attend to each other.
            "transformer_blocks.*.attn2": (Attention(("image",)),),
        },
        batched=dict.fromkeys(
            (
                "hidden_states",
                "encoder_hidden_states",
                "pooled_projections",
                "timestep",
                "block_controlnet_hidden_states",
                # It holds the embeddings of an IP-Adapter's images.
                "joint_attention_kwargs",
            ),
            0,
        ),
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(
                ("transformer_blocks",),
                ("encoder_hidden_states", "hidden_states"),
                chained=True,
                between=("block_controlnet_hidden_states",),
            ),
        ),
        conditions=("encoder_hidden_states", "pooled_projections"),
        uncached=("skip_layers",),
    ),
)
