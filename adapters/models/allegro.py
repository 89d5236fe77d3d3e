"""Adapter of Allegro. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_VIDEO, VIDEO, VIDEO_TO_TEXT
from para_core.plans.plan import Attention, Entries, Plan, Split

ALLEGRO = Adapter(
    transformer="AllegroTransformer3DModel",
    pipelines="Allegro",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": {
                # A tuple: the position tables, and for each token its indices into them, which are sharded.
                "image_rotary_emb": Entries((None, Split(dim=1, like="video"))),
                # The processor pads a mask to the number of keys that it gets, this rank's, so it is split.
                "attention_mask": Split(dim=2, like="video"),
            },
        },
        outputs={"proj_out": ALL_VIDEO},
        joint_order=("video",),
        attention={
            "**.attn1": (Attention(("video",), mask="keys"),),
            "**.attn2": VIDEO_TO_TEXT,
        },
        batched=samples_in_dim_0("attention_mask", "encoder_attention_mask"),
        common=("image_rotary_emb",),
    ),
    blocks=chained("transformer_blocks"),
)
