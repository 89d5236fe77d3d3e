"""Adapter of Helios. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_VIDEO, VIDEO, VIDEO_TO_TEXT
from para_core.plans.plan import LastTokens, Plan, Split

# This plan replaces that of diffusers, which lists forty blocks by index, and gathers thrice in each.
HELIOS = Adapter(
    transformer="HeliosTransformer3DModel",
    pipelines="Helios",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": VIDEO},
            "blocks.*": {
                "temb": Split(dim=1, like="video", ndim=4),
                "rotary_emb": Split(dim=1, like="video"),
                # Only these last tokens attend to text. Before them are tokens of earlier frames.
                "original_context_length": LastTokens("video"),
            },
        },
        # Gather before the model cuts off the tokens of earlier frames, which come first in the full
        # sequence.
        outputs={"blocks.-1": ALL_VIDEO},
        joint_order=("video",),
        attention={"**.attn2": VIDEO_TO_TEXT},
    ),
    blocks=chained("blocks"),
)
