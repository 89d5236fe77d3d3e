"""Adapter of HunyuanImage 2.1. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST, chained
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_THEN_TEXT, POSITIONS
from para_core.plans.plan import Plan

HUNYUAN_IMAGE = Adapter(
    transformer="HunyuanImageTransformer2DModel",
    pipelines="HunyuanImage 2.1",
    plan=Plan(
        inputs={},
        inner={"rope": {0: POSITIONS, 1: POSITIONS}, "transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        # Text comes after the image, as in the attention masks that the model makes for the full sequence.
        joint_order=IMAGE_THEN_TEXT,
    ),
    blocks=chained(
        "transformer_blocks",
        "single_transformer_blocks",
        streams=TEXT_LAST,
        conditions=("encoder_hidden_states", "encoder_hidden_states_2"),
    ),
)
