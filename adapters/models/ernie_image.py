"""Adapter of ERNIE-Image, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import WITH_TOKENS
from para_core.plans.plan import Gather, Plan, Split

ERNIE_IMAGE = Adapter(
    transformer="ErnieImageTransformer2DModel",
    pipelines="ERNIE-Image",
    plan=Plan(
        inputs={},
        # The tensors are [S, B, C]. The modulation temb has one entry per token.
        inner={
            "layers.0": {"x": Split(dim=0, segment="tokens")},
            "layers.*": {"rotary_pos_emb": WITH_TOKENS, "temb": Split(dim=0, like="tokens")},
        },
        outputs={"layers.-1": Gather(dim=0, segment="tokens")},
        joint_order=("tokens",),
        batched=dict.fromkeys(("hidden_states", "timestep", "text_bth", "text_lens"), 0),
    ),
    blocks=chained("layers", streams=("x",), measured="x", samples=1, conditions=("text_bth",)),
)
