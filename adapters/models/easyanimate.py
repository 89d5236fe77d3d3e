"""Adapter of EasyAnimate (text-, image- and video-to-video). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_LAST, chained, of_samples
from para_core.plans.plan import Gather, Plan, Split

POSITIONS = Split(dim=0, like="video")

EASYANIMATE = Adapter(
    transformer="EasyAnimateTransformer3DModel",
    pipelines="EasyAnimate",
    plan=Plan(
        inputs={},
        inner={
            "rope_embedding": {0: POSITIONS, 1: POSITIONS},
            "transformer_blocks.0": {"hidden_states": Split(dim=1, segment="video")},
        },
        outputs={"proj_out": Gather(dim=1, segment="video")},
        joint_order=("text", "video"),
        batched=of_samples("timestep_cond", "encoder_hidden_states_t5", "inpaint_latents", "control_latents"),
    ),
    blocks=chained(
        "transformer_blocks", streams=TEXT_LAST, conditions=("encoder_hidden_states", "encoder_hidden_states_t5")
    ),
)
