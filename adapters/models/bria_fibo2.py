"""Adapter of Bria FIBO 2, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.tokens import ALL_TOKENS, TOKENS, WITH_TOKENS
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Plan

BRIA_FIBO2 = Adapter(
    transformer="BriaFibo2Transformer2DModel",
    pipelines="Bria FIBO 2",
    plan=Plan(
        inputs={},
        inner={
            "layers.0": {"x": TOKENS},
            # The model makes attn_mask only if the prompts of the batch have different lengths.
            "layers.*": {"freqs_cis": WITH_TOKENS, "noise_mask": WITH_TOKENS, "attn_mask": WITH_TOKENS},
        },
        # Gather here, because the model then selects image tokens by their positions in the full sequence.
        outputs={"layers.-1": ALL_TOKENS},
        joint_order=("tokens",),
        attention={
            "layers.*.attention": (Attention(("tokens",), mask="keys"),),
            "layers.*.cross_attention": (Attention(("tokens",), ("text",)),),
        },
    ),
    # Some blocks also get text. chained=True would require the same arguments for all blocks.
    blocks=CachedBlocks(
        (BlockGroup(("layers",), ("x",), measured="x"),),
        conditions=("encoder_hidden_states", "encoder_attention_mask"),
    ),
)
