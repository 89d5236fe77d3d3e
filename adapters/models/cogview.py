"""Adapters of CogView 3+, CogView 4 and GLM-Image. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST, chained, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, POSITIONS, TEXT_THEN_IMAGE
from para_core.plans.plan import Plan

BLOCKS = chained("transformer_blocks", streams=TEXT_LAST)

COGVIEW3_PLUS = Adapter(
    transformer="CogView3PlusTransformer2DModel",
    pipelines="CogView 3+",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=TEXT_THEN_IMAGE,
        batched=samples_in_dim_0("original_size", "target_size", "crop_coords"),
    ),
    blocks=BLOCKS,
)

COGVIEW4_PLAN = Plan(
    inputs={},
    inner={
        "transformer_blocks.0": {"hidden_states": IMAGE},
        "transformer_blocks.*": {"image_rotary_emb": POSITIONS},
    },
    outputs={"proj_out": ALL_IMAGE},
    joint_order=TEXT_THEN_IMAGE,
    refused={"attention_mask": "its processor makes numbers of it for the tokens that one rank holds"},
)

COGVIEW4 = Adapter(
    transformer="CogView4Transformer2DModel", pipelines="CogView 4", plan=COGVIEW4_PLAN, blocks=BLOCKS
)

# Only text-to-image runs in parallel. With input images the model caches their keys; attention then has more
# keys than the sequence has tokens, and raises.
GLM_IMAGE = Adapter(
    transformer="GlmImageTransformer2DModel", pipelines="GLM-Image", plan=COGVIEW4_PLAN, blocks=BLOCKS
)
