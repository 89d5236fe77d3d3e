"""Adapter of Nucleus-Image, whose image tokens attend to text and image tokens at once.
Written for diffusers 0.42.
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE
from para_core.plans.plan import Attention, Plan, Split

# A mixture of experts in which experts choose their tokens.
NUCLEUS = Adapter(
    transformer="NucleusMoEImageTransformer2DModel",
    pipelines="Nucleus-Image",
    plan=Plan(
        inputs={},
        inner={
            "pos_embed": {0: Split(dim=0, like="image")},
            "transformer_blocks.0": {"hidden_states": IMAGE},
            # attention_kwargs holds a mask: an entry for each image token, then one for each text token.
            "transformer_blocks.*": {"attention_kwargs": Split(dim=1, like="image", then_replicated=True)},
            # Each expert chooses among all image tokens, so gather the inputs, and split the output (0).
            "transformer_blocks.*.img_mlp": {
                "hidden_states": ALL_IMAGE,
                "hidden_states_unmodulated": ALL_IMAGE,
                0: Split(dim=1, like="image"),
            },
        },
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={"transformer_blocks.*.attn": (Attention(("image",), ("image", "text"), mask="keys"),)},
    ),
    blocks=chained("transformer_blocks"),
)
