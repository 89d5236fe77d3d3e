"""The contract of gradients: a function that adds the gradients of attention to a block of keys.

With out and lse over *all* keys, the gradient is additive over blocks of keys (FlashAttention,
arXiv:2205.14135, appendix B). So a function around such a function is such a function again, as in the
forward (:mod:`para_core.attention.attend`).

:data:`Backward` and :class:`QueryGradients` are the twins of ``Attend`` and ``Accumulator`` there, and read
the same masks: whoever changes one of these here changes the twin too.

The functions are in the other files of this folder, and :mod:`.usp` there nests them. Tests:
tests/attention/test_gradients.py, and for two ring styles test_block_sparse.py and test_grid_2d.py there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.attend import Block
from para_core.attention.ring_plan import RingPlan
from para_core.attention.tiles import Tiling
from para_core.layout.runs import add_at

# Called as backward(into, key, value, block): returns the gradients of the keys and values of a block in the
# dtype of lse, in new tensors, to which the caller may add in place; and adds those of queries and mask in
# place to the QueryGradients ``into``. ``block`` is the number of the block in ``into.tiling``.
Backward = Callable[["QueryGradients", Tensor, Tensor, int], Block]


@dataclass(frozen=True)
class QueryGradients:
    """The gradients of some queries and of their mask, summed over the blocks so far, in the dtype of lse.

    The fields never change. The tensors ``grad_query`` and ``grad_mask`` do: functions add to them in place,
    and a copy with other fields, by ``dataclasses.replace``, shares them.

    Args:
        grad_out, query, out, lse: The gradient of the output, ``[B, H, S_q, D_v]``, the queries,
            ``[B, H, S_q, D]``, and their results over the keys of all ranks, shaped as grad_out and
            ``[B, H, S_q]``.
        mask: The mask tensor of the queries, shaped as ``Mask.tensor`` of :mod:`para_core.attention.attend`,
            or None. It is no ``Mask``: what that has besides serves the kernels of the forward, and
            :func:`~para_core.attention.gradients.blocks.low_rows_backward` derives what the gradient needs.
        tiling, key_heads: As of :class:`~para_core.attention.attend.Accumulator`.
        grad_query, grad_mask: The sums, shaped as query and mask; ``grad_mask`` is None if it is not wanted.
    """

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    mask: Tensor | None
    tiling: Tiling
    key_heads: Tensor | None
    grad_query: Tensor
    grad_mask: Tensor | None

    @staticmethod
    def of(
        *,
        grad_out: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        tiling: Tiling,
        key_heads: Tensor | None,
        mask_gradient: bool,
    ) -> QueryGradients:
        """Return the gradients before any block: zeros. ``mask_gradient`` asks for the gradient of ``mask``."""
        grad_mask = None
        if mask_gradient and mask is not None:
            grad_mask = torch.zeros_like(mask, dtype=lse.dtype)
        zeros = torch.zeros_like(query, dtype=lse.dtype)
        return QueryGradients(grad_out, query, out, lse, mask, tiling, key_heads, zeros, grad_mask)


def add_to_sent_keys(grads: Block, arrived: Block, plan: RingPlan) -> None:
    """Add the gradients that arrived from other ranks to those of the keys and values that this rank sent.

    ``grads`` are the gradients of all of this rank's keys and values, replicated ones included. Those that
    arrived lie in the order of ``plan.sent_runs``, in which the forward sent the keys and values.
    """
    for total, part in zip(grads, arrived, strict=True):
        # Dim 2 has the keys: [B, H_kv, S, D] and [B, H_kv, S, D_v].
        add_at(total, 2, plan.sent_runs, part)
