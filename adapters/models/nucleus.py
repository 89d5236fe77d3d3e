"""Adapter of Nucleus-Image, a mixture of experts in which experts choose their tokens. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained
from para_core.plans.plan import Attention, Gather, Plan, Split

POSITIONS = Split(dim=0, like="image")
IMAGE, ALL_IMAGE = Split(dim=1, segment="image"), Gather(dim=1, segment="image")

NUCLEUS = Adapter(
    transformer="NucleusMoEImageTransformer2DModel",
    pipelines="Nucleus-Image",
    plan=Plan(
        inputs={},
        inner={
            "pos_embed": {0: POSITIONS},
            "transformer_blocks.0": {"hidden_states": IMAGE},
            # attention_kwargs holds a mask: an entry for each image token, then one for each text token. The text
            # tokens are replicated.
            "transformer_blocks.*": {"attention_kwargs": Split(dim=1, like="image", then_replicated=True)},
            # Each expert chooses its tokens among all image tokens, so gather the inputs, and split the output (index
            # 0) again.
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
