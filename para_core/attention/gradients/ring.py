"""The gradient of ring attention.

The blocks are passed around again, with R - 1 hops. The gradient of each block follows the block with as many
hops, and every rank adds its share; gradients are in float32 also for 16-bit input.
"""

from __future__ import annotations

from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.gradients.contract import Backward, QueryGradients, add_to_sent_keys
from para_core.attention.ring import Packing, Ring, pack_sent_keys, pass_on_blocks
from para_core.attention.ring_plan import RingPlan
from para_core.distributed.collectives import Travelling, start_ring_shift, wait


def ring_backward(block_backward: Backward, ring: Ring) -> Backward:
    """Return the gradient of :func:`~para_core.attention.ring.ring` around attention with the gradient
    ``block_backward``.
    """

    def backward(into: QueryGradients, key: Tensor, value: Tensor, _: int) -> Block:
        return _gradients_in_ring(block_backward, into, key, value, ring.plan)

    return backward


def _gradients_in_ring(
    block_backward: Backward, into: QueryGradients, key: Tensor, value: Tensor, plan: RingPlan
) -> Block:
    """Return the gradients of this rank's keys and values. Accumulate those of query and mask in ``into``.
    Collective.

    The gradient of a block follows it around the ring, one hop behind, and arrives at the block's owner after
    the last hop.
    """
    if not plan.hops:
        return block_backward(into, key, value, 0)
    dim, packing = plan.dim, Packing(key, value, plan.block_sizes)
    own_grads: Block = (key, value)
    # These gradients are in flight while this rank computes its own share.
    arriving: list[Travelling] = []
    # Do not keep what is packed here, or one more block would be in memory.
    for hop, block in pass_on_blocks(
        (key, value), pack_sent_keys(packing, key, value, plan), packing, plan, []
    ):
        grads = block_backward(into, *block, hop.step)
        del block
        if hop.step == 0:
            own_grads = grads
            continue
        if arriving:
            for grad, other in zip(grads, packing.unpack(wait(arriving.pop()), hop.source), strict=True):
                grad.add_(other)
        arriving.append(start_ring_shift(packing.pack(*grads), packing.numel(plan.source(hop.step + 1)), dim))
    add_to_sent_keys(own_grads, packing.unpack(wait(arriving.pop()), dim.index), plan)
    return own_grads
