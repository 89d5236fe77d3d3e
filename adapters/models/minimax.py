"""MiniMax-H3, which publishes a plan. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks

MINIMAX_H3 = Adapter(
    transformer="MiniMaxH3Transformer3DModel",
    pipelines="MiniMax-H3",
    # Video, sound and text tokens in one tensor.
    blocks=CachedBlocks((BlockGroup(("transformer_blocks",), chained=True),)),
)
