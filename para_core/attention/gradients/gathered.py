"""The gradient of attention to gathered keys: they are gathered again, and each rank gets the sum of its own keys'."""

from __future__ import annotations

from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.gathered import GatheredKeys
from para_core.attention.gradients.contract import Backward, QueryGradients
from para_core.layout.gather import gather_gradient


def gathered_backward(block_backward: Backward, style: GatheredKeys) -> Backward:
    """Return the gradient of :meth:`GatheredKeys.over_ring` of attention with the gradient ``block_backward``."""
    plan = style.plan

    def backward(into: QueryGradients, key: Tensor, value: Tensor, _: int) -> Block:
        grad_keys, grad_values = block_backward(into, *style.gather(key, value, []), 0)
        if not plan.rotates:
            return grad_keys, grad_values
        layout, ranks = plan.spec.keys, plan.dim
        return gather_gradient(grad_keys, 2, layout, ranks), gather_gradient(grad_values, 2, layout, ranks)

    return backward
