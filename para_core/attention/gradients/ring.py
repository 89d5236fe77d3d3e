"""The gradient of ring attention.

The blocks are passed around again, with R - 1 hops. The gradient of each block follows the block with as many
hops, and every rank adds its share; gradients are in float32 also for 16-bit input.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.gradients.contract import Backward, QueryGradients, add_to_sent_keys
from para_core.attention.ring import Packing, Ring, pack_sent_keys, pass_on_blocks
from para_core.attention.ring_plan import RingPlan
from para_core.distributed.collectives import Travelling, start_ring_shift, wait


def ring_backward(block_backward: Backward, ring: Ring) -> Backward:
    """Return the gradient of :meth:`Ring.over_ring` of attention with the gradient ``block_backward``."""
    return partial(_gradients_in_ring, block_backward, ring.plan)


def _gradients_in_ring(
    block_backward: Backward, plan: RingPlan, into: QueryGradients, key: Tensor, value: Tensor, _: int
) -> Block:
    """Return the gradients of this rank's keys and values. Accumulate those of query and mask in ``into``.
    Collective.

    The gradient of a block follows it around the ring, one hop behind, and arrives at the block's owner after
    the last hop.
    """
    if not plan.hops:
        return block_backward(into, key, value, 0)
    dim, packing = plan.dim, Packing(key, value, plan.block_sizes)
    # Do not keep what is packed here, or one more block would be in memory.
    blocks = pass_on_blocks((key, value), pack_sent_keys(packing, key, value, plan), packing, plan, [])
    # The first block is this rank's own, which begins to travel.
    next(blocks)
    own_grads = block_backward(into, key, value, 0)
    # These gradients are in flight while this rank computes its own share.
    arriving: list[Travelling] = []
    for hop, block in blocks:
        grads = block_backward(into, *block, hop.step)
        del block
        if arriving:
            for grad, other in zip(grads, packing.unpack(wait(arriving.pop()), hop.source), strict=True):
                grad.add_(other)
        arriving.append(start_ring_shift(packing.pack(*grads), packing.numel(plan.source(hop.step + 1)), dim))
    add_to_sent_keys(own_grads, packing.unpack(wait(arriving.pop()), dim.index), plan)
    return own_grads
