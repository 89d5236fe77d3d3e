"""Adapter of DiT, which generates images of ImageNet classes. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained
from para_core.plans.plan import Gather, Plan, Split

DIT = Adapter(
    transformer="DiTTransformer2DModel",
    pipelines="DiT",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": Split(dim=1, segment="image")}},
        outputs={"proj_out_2": Gather(dim=1, segment="image")},
        joint_order=("image",),
        batched=dict.fromkeys(("hidden_states", "timestep", "class_labels", "cross_attention_kwargs"), 0),
    ),
    blocks=chained("transformer_blocks", conditions=("class_labels",)),
)
