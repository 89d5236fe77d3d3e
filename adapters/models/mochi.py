"""Adapter of Mochi (text-to-video). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import (
    JOINT_PROJECTIONS,
    TEXT_LAST,
    chained,
    linears,
    samples_in_dim_0,
)
from para_core.plans.plan import Gather, Plan, Split
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import Linear, TensorPlan

POSITIONS = Split(dim=0, like="video")

# These layers return hidden units, then a gate of equal width. Each part is sharded separately.
_GATED = Linear("colwise", (1, 1))
MOCHI_TENSOR = TensorPlan(
    linears={
        **linears(
            "transformer_blocks.*",
            columns=[f"attn1.{name}" for name in JOINT_PROJECTIONS],
            rows=["attn1.to_out.0", "attn1.to_add_out", "ff.net.2", "ff_context.net.2"],
        ),
        "transformer_blocks.*.ff.net.0.proj": _GATED,
        "transformer_blocks.*.ff_context.net.0.proj": _GATED,
    },
    heads=("transformer_blocks.*.attn1",),
    # The rotary embedding is [S, H, D / 2] with other frequencies for each head, so it is sharded along H.
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
        # The plan has no rule for text, so each rank holds all text tokens. The model calls attention for one
        # sample at a time, with the valid text tokens of this sample, whose number differs from sample to
        # sample.
        joint_order=("video", "text"),
        batched=samples_in_dim_0("encoder_attention_mask", "attention_kwargs"),
    ),
    blocks=chained("transformer_blocks", streams=TEXT_LAST),
    tensor=MOCHI_TENSOR,
    frames=Frames(dim=2),
    threshold=0.035,
    threshold_source="ParaAttention at 1324733, later dropped there",
)
