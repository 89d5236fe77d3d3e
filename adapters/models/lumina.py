"""Adapter of Lumina-Image 2.0, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_TOKENS, TOKENS, WITH_TOKENS
from para_core.plans.plan import Plan

LUMINA2 = Adapter(
    transformer="Lumina2Transformer2DModel",
    pipelines="Lumina-Image 2.0",
    plan=Plan(
        inputs={},
        inner={
            # After its refiner blocks each sample is one sequence: valid text tokens, image tokens, padding.
            "layers.0": {"hidden_states": TOKENS},
            "layers.*": {"image_rotary_emb": WITH_TOKENS},
        },
        # Gather here, because the model then selects image tokens by their positions in the full sequence.
        outputs={"layers.-1": ALL_TOKENS},
        joint_order=("tokens",),
    ),
    blocks=chained("layers"),
)
