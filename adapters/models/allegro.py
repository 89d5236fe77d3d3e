"""Adapter of Allegro (text-to-video). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained, of_samples
from para_core.plans.plan import Attention, Entries, Gather, Plan, Split

ALLEGRO = Adapter(
    transformer="AllegroTransformer3DModel",
    pipelines="Allegro",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": Split(dim=1, segment="video")},
            "transformer_blocks.*": {
                # image_rotary_emb is a tuple: the position tables, and for each token its indices into them. Only the
                # indices are sharded.
                "image_rotary_emb": Entries((None, Split(dim=1, like="video"))),
                # The attention processor pads a mask to the number of keys it receives. It receives only this rank's
                # keys, so the mask is split too.
                "attention_mask": Split(dim=2, like="video"),
            },
        },
        outputs={"proj_out": Gather(dim=1, segment="video")},
        joint_order=("video",),
        attention={
            "**.attn1": (Attention(("video",), mask="keys"),),
            "**.attn2": (Attention(("video",), ("text",)),),
        },
        batched=of_samples("attention_mask", "encoder_attention_mask"),
        common=("image_rotary_emb",),
    ),
    blocks=chained("transformer_blocks"),
)
