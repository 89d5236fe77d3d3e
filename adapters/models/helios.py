"""Adapter of Helios (video). Written for diffusers 0.42.

The plan that diffusers publishes lists forty blocks by index and gathers three times in each block; this plan replaces
it.
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained
from para_core.plans.plan import Attention, Gather, LastTokens, Plan, Split

HELIOS = Adapter(
    transformer="HeliosTransformer3DModel",
    pipelines="Helios",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": Split(dim=1, segment="video")},
            "blocks.*": {
                "temb": Split(dim=1, like="video", ndim=4),
                "rotary_emb": Split(dim=1, like="video"),
                # The sequence begins with the tokens of earlier frames. Only the last original_context_length tokens
                # attend to text.
                "original_context_length": LastTokens("video"),
            },
        },
        # Gather before the model cuts off the tokens of earlier frames, which come first in the full sequence.
        outputs={"blocks.-1": Gather(dim=1, segment="video")},
        joint_order=("video",),
        attention={"**.attn2": (Attention(("video",), ("text",)),)},
    ),
    blocks=chained("blocks"),
)
