"""Adapter of Krea 2, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_TOKENS, TOKENS
from para_core.plans.plan import Plan, Split

KREA2 = Adapter(
    transformer="Krea2Transformer2DModel",
    pipelines="Krea 2",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {"image_rotary_emb": Split(dim=0, like="tokens")},
        },
        outputs={"transformer_blocks.-1": ALL_TOKENS},
        joint_order=("tokens",),
    ),
    blocks=chained("transformer_blocks"),
)
