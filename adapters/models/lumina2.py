"""Adapter of Lumina-Image 2.0 (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained
from para_core.plans.plan import Gather, Plan, Split

LUMINA2 = Adapter(
    transformer="Lumina2Transformer2DModel",
    pipelines="Lumina-Image 2.0",
    plan=Plan(
        inputs={},
        inner={
            # Text and image first have separate refiner blocks. Then each sample is one sequence: valid text tokens,
            # image tokens, padding.
            "layers.0": {"hidden_states": Split(dim=1, segment="tokens")},
            "layers.*": {"image_rotary_emb": Split(dim=1, like="tokens")},
        },
        # Gather before the model selects the image tokens of each sample by their positions in the full sequence.
        outputs={"layers.-1": Gather(dim=1, segment="tokens")},
        joint_order=("tokens",),
    ),
    blocks=chained("layers"),
)
