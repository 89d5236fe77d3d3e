"""Adapter of PixArt-Alpha and PixArt-Sigma (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained, of_samples
from para_core.plans.plan import Attention, Gather, Plan, Split

PIXART = Adapter(
    transformer="PixArtTransformer2DModel",
    pipelines="PixArt",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": Split(dim=1, segment="image")}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=("image",),
        attention={"transformer_blocks.*.attn2": (Attention(("image",), ("text",)),)},
        batched=of_samples("added_cond_kwargs", "cross_attention_kwargs", "attention_mask", "encoder_attention_mask"),
    ),
    blocks=chained("transformer_blocks"),
)
