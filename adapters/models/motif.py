"""Motif-Video (from text, from an image). Read against diffusers 0.42."""

from dataclasses import replace
from typing import Any

from torch import nn

from para_core.adapters.spec import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

TO_TEXT = (Attention(("video",), ("prompt",)),)
POSITIONS = Split(dim=0, like="video")


def _with_decoder(plan: Plan, module: nn.Module) -> Plan:
    """The last blocks join the video that they decode to the one that the others encoded."""
    config: Any = module.config
    decoding = range(config.num_single_layers - config.num_decoder_layers, config.num_single_layers)
    joined = (Attention(("video", "video")),)
    more = {f"single_transformer_blocks.{index}.attn": joined for index in decoding}
    return replace(plan, attention={**more, **plan.attention})


MOTIF = Adapter(
    transformer="MotifVideoTransformer3DModel",
    pipelines="Motif-Video",
    plan=Plan(
        inputs={},
        inner={
            # Masks are made by its length, and read as those of this rank's keys.
            "x_embedder": {0: Split(dim=1, segment="video")},
            "transformer_blocks.*": {"image_rotary_emb": POSITIONS},
            "single_transformer_blocks.*": {"image_rotary_emb": POSITIONS},
        },
        outputs={"proj_out": Gather(dim=1, segment="video")},
        joint_order=("video", "text"),
        attention={
            "transformer_blocks.*.attn": (Attention(("video", "text"), mask="keys"),),
            "single_transformer_blocks.*.attn": (Attention(("video", "text"), mask="keys"),),
            "**.cross_attn": TO_TEXT,
        },
    ),
    complete=_with_decoder,
    # The last of the others go on with tokens of which the cache does not know.
    blocks=CachedBlocks(
        (BlockGroup(("transformer_blocks",), ("hidden_states", "encoder_hidden_states"), chained=True),)
    ),
)
