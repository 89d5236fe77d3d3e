"""Mochi. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import CachedBlocks, Stage
from para_core.plans.plan import Gather, Plan, Split

POSITIONS = Split(dim=0, like="video")

MOCHI = Adapter(
    transformer="MochiTransformer3DModel",
    pipelines="Mochi",
    plan=Plan(
        inputs={},
        inner={
            "rope": {0: POSITIONS, 1: POSITIONS},
            "transformer_blocks.0": {"hidden_states": Split(dim=1, segment="video")},
        },
        outputs={"proj_out": Gather(dim=1, segment="video")},
        # Each sample attends alone, to its valid text tokens: these are whole, and as many as it has.
        joint_order=("video", "text"),
        batched=dict.fromkeys(
            ("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask", "attention_kwargs"), 0
        ),
    ),
    blocks=CachedBlocks((Stage(("transformer_blocks",), ("hidden_states", "encoder_hidden_states"), chained=True),)),
    threshold=0.035,
    threshold_source="ParaAttention at 1324733, later dropped there",
)
