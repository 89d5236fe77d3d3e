"""Adapters of CogView 3+, CogView 4 and GLM-Image (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_LAST, chained, of_samples
from para_core.plans.plan import Gather, Plan, Split

IMAGE = Split(dim=1, segment="image")
BLOCKS = chained("transformer_blocks", streams=TEXT_LAST)

COGVIEW3_PLUS = Adapter(
    transformer="CogView3PlusTransformer2DModel",
    pipelines="CogView 3+",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=("text", "image"),
        batched=of_samples("original_size", "target_size", "crop_coords"),
    ),
    blocks=BLOCKS,
)

COGVIEW4_PLAN = Plan(
    inputs={},
    inner={
        "transformer_blocks.0": {"hidden_states": IMAGE},
        "transformer_blocks.*": {"image_rotary_emb": Split(dim=0, like="image")},
    },
    outputs={"proj_out": Gather(dim=1, segment="image")},
    joint_order=("text", "image"),
    refused={"attention_mask": "its processor makes numbers of it for the tokens that one rank holds"},
)

COGVIEW4 = Adapter(transformer="CogView4Transformer2DModel", pipelines="CogView 4", plan=COGVIEW4_PLAN, blocks=BLOCKS)

# Only text-to-image runs in parallel. With input images the model caches their keys; attention then has more keys than
# the sequence has tokens, and raises.
GLM_IMAGE = Adapter(transformer="GlmImageTransformer2DModel", pipelines="GLM-Image", plan=COGVIEW4_PLAN, blocks=BLOCKS)
