"""Adapter of EasyAnimate. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST, chained, samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_VIDEO, VIDEO, VIDEO_POSITIONS
from para_core.plans.plan import Plan

EASYANIMATE = Adapter(
    transformer="EasyAnimateTransformer3DModel",
    pipelines="EasyAnimate",
    plan=Plan(
        inputs={},
        inner={
            "rope_embedding": {0: VIDEO_POSITIONS, 1: VIDEO_POSITIONS},
            "transformer_blocks.0": {"hidden_states": VIDEO},
        },
        outputs={"proj_out": ALL_VIDEO},
        joint_order=("text", "video"),
        batched=samples_in_dim_0(
            "timestep_cond", "encoder_hidden_states_t5", "inpaint_latents", "control_latents"
        ),
    ),
    blocks=chained(
        "transformer_blocks",
        streams=TEXT_LAST,
        conditions=("encoder_hidden_states", "encoder_hidden_states_t5"),
    ),
)
