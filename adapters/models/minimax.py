"""Adapter of MiniMax-H3, which is sharded by the plan that diffusers publishes. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained

MINIMAX_H3 = Adapter(
    transformer="MiniMaxH3Transformer3DModel",
    pipelines="MiniMax-H3",
    # The blocks take video, sound and text tokens as one tensor, so the cache compares and stores only that tensor.
    blocks=chained("transformer_blocks"),
)
