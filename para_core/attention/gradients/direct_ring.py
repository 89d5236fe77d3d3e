"""The gradient of the ring in which each rank sends its block directly to the ranks that see any of its keys.

Every rank sends its share of a block's gradient to the owner of the block.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.direct_ring import DirectRing
from para_core.attention.gradients.contract import Backward, QueryGradients, add_to_sent_keys
from para_core.attention.ring import Packing
from para_core.distributed.collectives import Travelling, start_ring_shift, wait


def direct_ring_backward(block_backward: Backward, ring: DirectRing) -> Backward:
    """Return the gradient of the direct ring around attention with the gradient ``block_backward``."""
    return partial(_gradients_in_direct_ring, block_backward, ring)


def _gradients_in_direct_ring(
    block_backward: Backward, ring: DirectRing, into: QueryGradients, key: Tensor, value: Tensor, _: int
) -> Block:
    """Return the gradients of this rank's keys and values. Accumulate those of query and mask in ``into``.
    Collective.

    Every hop of the forward has its opposite here, also on ranks that send and receive nothing.
    """
    packing, index = Packing(key, value, ring.plan.block_sizes), ring.plan.dim.index
    blocks = ring.blocks(key, value, packing, [])
    # The first block is this rank's own, which begins to travel.
    next(blocks)
    own_grads = block_backward(into, key, value, 0)
    # These gradients are in flight while this rank computes the next ones.
    arriving: list[Travelling] = []
    for hop, block in blocks:
        sent, numel = key.new_empty(0, dtype=into.lse.dtype), 0
        if block is not None:
            sent = packing.pack(*block_backward(into, *block, hop.step))
        del block
        if hop.sends:
            numel = packing.numel(index)
        arriving.append(start_ring_shift(sent, numel, ring.plan.dim, distance=-hop.step))
    for buffer in map(wait, arriving):
        if buffer.numel():
            add_to_sent_keys(own_grads, packing.unpack(buffer, index), ring.plan)
    return own_grads
