"""Adapter of Motif-Video (text- and image-to-video). Written for diffusers 0.42."""

from dataclasses import replace
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_LAST, chained
from para_core.plans.plan import Attention, Gather, Plan, Split

TO_TEXT = (Attention(("video",), ("prompt",)),)
POSITIONS = Split(dim=0, like="video")


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
            # Split after this layer: the model makes attention masks from the number of tokens, which must be this
            # rank's number.
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
    # Only the first list of blocks is cached. The last blocks of the second list, the decoder blocks, read tokens that
    # the cache does not store.
    blocks=chained("transformer_blocks", streams=TEXT_LAST),
)
