"""Adapter of MiniMax-H3. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained

# This model is sharded by the plan that diffusers publishes.
MINIMAX_H3 = Adapter(
    transformer="MiniMaxH3Transformer3DModel",
    pipelines="MiniMax-H3",
    # The blocks take all tokens as one tensor, so the cache compares and stores only that tensor.
    blocks=chained("transformer_blocks"),
)
