"""Adapter of PRX (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained, of_samples
from para_core.plans.plan import Attention, Gather, Plan, Split

PRX = Adapter(
    transformer="PRXTransformer2DModel",
    pipelines="PRX",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": Split(dim=1, segment="image")},
            # The rotary embedding is [B, 1, S, D / 2, 2, 2], with the tokens along dim 2.
            "blocks.*": {"image_rotary_emb": Split(dim=2, like="image")},
        },
        outputs={"final_layer": Gather(dim=1, segment="image")},
        joint_order=("image",),
        # Image tokens attend to text and image tokens. The attention processor makes a mask for the keys it receives,
        # which are only this rank's keys.
        attention={"blocks.*.attention": (Attention(("image",), ("text", "image"), mask="keys"),)},
        batched=of_samples("attention_mask", "attention_kwargs"),
    ),
    blocks=chained("blocks"),
)
