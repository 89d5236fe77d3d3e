"""Adapter of Mochi (text-to-video). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Split
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import COLUMNS, ROWS, Linear, TensorPlan

POSITIONS = Split(dim=0, like="video")

_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
TENSOR = TensorPlan(
    linears={
        **dict.fromkeys((f"transformer_blocks.*.attn1.{name}" for name in _PROJECTIONS), COLUMNS),
        "transformer_blocks.*.attn1.to_out.0": ROWS,
        "transformer_blocks.*.attn1.to_add_out": ROWS,
        # These layers return hidden units followed by a gate of equal width. Each of these two parts is sharded
        # separately.
        "transformer_blocks.*.ff.net.0.proj": Linear("colwise", (1, 1)),
        "transformer_blocks.*.ff.net.2": ROWS,
        "transformer_blocks.*.ff_context.net.0.proj": Linear("colwise", (1, 1)),
        "transformer_blocks.*.ff_context.net.2": ROWS,
    },
    heads=("transformer_blocks.*.attn1",),
    # The rotary embedding is [S, H, D / 2], with different frequencies for each head, so tensor parallelism shards it
    # along H.
    positions={"rope": -2},
)

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
        # The plan has no rule for text, so each rank holds all text tokens. The model calls attention for one sample at
        # a time, with the valid text tokens of this sample, whose number differs from sample to sample.
        joint_order=("video", "text"),
        batched=dict.fromkeys(
            ("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask", "attention_kwargs"), 0
        ),
    ),
    blocks=CachedBlocks(
        (BlockGroup(("transformer_blocks",), ("hidden_states", "encoder_hidden_states"), chained=True),)
    ),
    tensor=TENSOR,
    frames=Frames(dim=2),
    threshold=0.035,
    threshold_source="ParaAttention at 1324733, later dropped there",
)
