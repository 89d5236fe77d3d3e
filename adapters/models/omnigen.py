"""Adapter of OmniGen, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import ALL_TOKENS, TOKENS
from para_core.plans.plan import Plan, Split

OMNIGEN = Adapter(
    transformer="OmniGenTransformer2DModel",
    pipelines="OmniGen",
    plan=Plan(
        inputs={},
        inner={
            "layers.0": {"hidden_states": TOKENS},
            "layers.*": {"image_rotary_emb": Split(dim=0, like="tokens")},
        },
        # Gather here, because the model then selects image tokens by their positions in the full sequence.
        outputs={"layers.-1": ALL_TOKENS},
        joint_order=("tokens",),
    ),
    blocks=chained("layers", conditions=("input_ids", "attention_mask")),
)
