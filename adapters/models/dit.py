"""Adapter of DiT, which takes class labels. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE
from para_core.plans.plan import Plan

DIT = Adapter(
    transformer="DiTTransformer2DModel",
    pipelines="DiT",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out_2": ALL_IMAGE},
        joint_order=("image",),
        batched=dict.fromkeys(("hidden_states", "timestep", "class_labels", "cross_attention_kwargs"), 0),
    ),
    blocks=chained("transformer_blocks", conditions=("class_labels",)),
    # The output layers are modulated by the embedding of the time step and class that block 0 contains.
    called_outside=("transformer_blocks.0.norm1.emb",),
)
