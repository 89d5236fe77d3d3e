"""The gradient of the ring in which each rank sends its block directly to the ranks that see any of its keys.

Every rank sends its share of a block's gradient to the owner of the block.
"""

from __future__ import annotations

from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.direct_ring import DirectRing
from para_core.attention.gradients.contract import Backward, QueryGradients, add_to_travelling
from para_core.attention.ring import Packing
from para_core.distributed.collectives import Travelling, start_ring_shift, wait


def direct_ring_backward(inner: Backward, ring: DirectRing) -> Backward:
    """Return the gradient of the direct ring around attention with the gradient ``inner``."""

    def backward(into: QueryGradients, key: Tensor, value: Tensor, _: int) -> Block:
        return _key_gradients(inner, into, key, value, ring)

    return backward


def _key_gradients(
    inner: Backward, into: QueryGradients, key: Tensor, value: Tensor, ring: DirectRing
) -> Block:
    """Return the gradients of this rank's keys and values. Accumulate those of query and mask in ``into``."""
    packing, index = Packing(key, value, ring.plan.block_sizes), ring.plan.dim.index
    own: Block = (key, value)
    # These gradients are in flight while this rank computes the next ones.
    arriving: list[Travelling] = []
    for hop, block in ring.blocks(key, value, packing, []):
        sent, numel = key.new_empty(0, dtype=into.lse.dtype), 0
        if block is not None:
            grads = inner(into, *block, hop.step)
            if hop.step == 0:
                own = grads
                continue
            sent = packing.pack(*grads)
        del block
        if hop.sends:
            numel = packing.numel(index)
        arriving.append(start_ring_shift(sent, numel, ring.plan.dim, distance=-hop.step))
    for buffer in map(wait, arriving):
        if buffer.numel():
            add_to_travelling(own, packing.unpack(buffer, index), ring.plan)
    return own
