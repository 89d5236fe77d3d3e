"""Adapter of Stable Diffusion 3 and 3.5, with ControlNet and IP-Adapter. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_FIRST, chained, of_samples
from para_core.plans.plan import Attention, Gather, Plan, Split

JOINT = ("image", "text")

SD3 = Adapter(
    transformer="SD3Transformer2DModel",
    pipelines="Stable Diffusion 3",
    plan=Plan(
        # ControlNet residuals: tensors [B, S, C], which the model adds to the image tokens between blocks.
        inputs={"block_controlnet_hidden_states": Split(dim=1, like="image")},
        # Split after the position embedding and not at the first block, because a call may skip any block
        # (skip_layers).
        inner={"pos_embed": {0: Split(dim=1, segment="image")}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=JOINT,
        attention={
            # After the joint attention, image tokens attend to image tokens and to the tokens of an IP-Adapter.
            "transformer_blocks.*.attn": (Attention(JOINT), Attention(("image",), ("image", "ip_adapter"))),
            # Stable Diffusion 3.5 medium has a second attention among the image tokens.
            "transformer_blocks.*.attn2": (Attention(("image",)),),
        },
        # joint_attention_kwargs may hold embeddings of IP-Adapter images, which have a batch dim.
        batched=of_samples("pooled_projections", "block_controlnet_hidden_states", "joint_attention_kwargs"),
    ),
    blocks=chained(
        "transformer_blocks",
        streams=TEXT_FIRST,
        between=("block_controlnet_hidden_states",),
        conditions=("encoder_hidden_states", "pooled_projections"),
        uncached=("skip_layers",),
    ),
)
