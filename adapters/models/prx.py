"""Adapter of PRX, whose image tokens attend to text and image tokens at once. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE
from para_core.plans.plan import Attention, Plan, Split

PRX = Adapter(
    transformer="PRXTransformer2DModel",
    pipelines="PRX",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": IMAGE},
            # The rotary embedding is [B, 1, S, D / 2, 2, 2], with the tokens along dim 2.
            "blocks.*": {"image_rotary_emb": Split(dim=2, like="image")},
        },
        outputs={"final_layer": ALL_IMAGE},
        joint_order=("image",),
        # The processor makes a mask for the keys that it gets, text and image tokens of this rank.
        attention={"blocks.*.attention": (Attention(("image",), ("text", "image"), mask="keys"),)},
        batched=samples_in_dim_0("attention_mask", "attention_kwargs"),
    ),
    blocks=chained("blocks"),
)
