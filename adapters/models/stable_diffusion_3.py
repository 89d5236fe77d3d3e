"""Adapter of Stable Diffusion 3. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_FIRST, chained, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_THEN_TEXT
from para_core.plans.plan import Attention, Plan, Split

SD3 = Adapter(
    transformer="SD3Transformer2DModel",
    pipelines="Stable Diffusion 3",
    plan=Plan(
        # ControlNet residuals: tensors [B, S, C], which the model adds to the image tokens between blocks.
        inputs={"block_controlnet_hidden_states": Split(dim=1, like="image")},
        # Split after the position embedding, because a call may skip any block (skip_layers), also the first.
        inner={"pos_embed": {0: IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=IMAGE_THEN_TEXT,
        attention={
            # After the joint attention, image tokens attend to image tokens and those of an IP-Adapter.
            "transformer_blocks.*.attn": (
                Attention(IMAGE_THEN_TEXT),
                Attention(("image",), ("image", "ip_adapter")),
            ),
            # Stable Diffusion 3.5 medium has a second attention among the image tokens.
            "transformer_blocks.*.attn2": (Attention(("image",)),),
        },
        # joint_attention_kwargs may hold embeddings of IP-Adapter images, which have a batch dim.
        batched=samples_in_dim_0(
            "pooled_projections", "block_controlnet_hidden_states", "joint_attention_kwargs"
        ),
    ),
    refused_pipelines={
        "pag_applied_layers": "its perturbed attention masks image tokens by their number, which is that of one rank"
    },
    blocks=chained(
        "transformer_blocks",
        streams=TEXT_FIRST,
        between=("block_controlnet_hidden_states",),
        conditions=("encoder_hidden_states", "pooled_projections"),
        uncached=("skip_layers",),
    ),
)
