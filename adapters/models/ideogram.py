"""Adapter of Ideogram 4, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_TOKENS, TOKENS, WITH_TOKENS
from para_core.plans.plan import Plan

IDEOGRAM4 = Adapter(
    transformer="Ideogram4Transformer2DModel",
    pipelines="Ideogram 4",
    plan=Plan(
        inputs={},
        inner={
            "layers.0": {"hidden_states": TOKENS},
            # adaln_input has one modulation per token, or one per sample (size 1, so it stays replicated).
            "layers.*": {"image_rotary_emb": WITH_TOKENS, "adaln_input": WITH_TOKENS},
        },
        # Gather here, because the model then selects image tokens by their positions in the full sequence.
        outputs={"layers.-1": ALL_TOKENS},
        joint_order=("tokens",),
    ),
    blocks=chained("layers"),
)
