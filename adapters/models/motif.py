"""Adapter of Motif-Video. Written for diffusers 0.42."""

from dataclasses import replace
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST, chained
from para_core.adapters.models.shared.tokens import ALL_VIDEO, VIDEO, VIDEO_POSITIONS
from para_core.plans.plan import Attention, Plan


def _with_decoder(plan: Plan, module: nn.Module) -> Plan:
    """Return ``plan`` with the decoder blocks' attention added, over decoded video tokens followed by encoded ones."""
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
            # Split after this layer: the model makes attention masks from this rank's number of tokens.
            "x_embedder": {0: VIDEO},
            "transformer_blocks.*": {"image_rotary_emb": VIDEO_POSITIONS},
            "single_transformer_blocks.*": {"image_rotary_emb": VIDEO_POSITIONS},
        },
        outputs={"proj_out": ALL_VIDEO},
        joint_order=("video", "text"),
        attention={
            "transformer_blocks.*.attn": (Attention(("video", "text"), mask="keys"),),
            "single_transformer_blocks.*.attn": (Attention(("video", "text"), mask="keys"),),
            "**.cross_attn": (Attention(("video",), ("prompt",)),),
        },
    ),
    complete=_with_decoder,
    # Only the first list is cached: decoder blocks, the last of the second, read tokens that the cache does
    # not store.
    blocks=chained("transformer_blocks", streams=TEXT_LAST),
)
