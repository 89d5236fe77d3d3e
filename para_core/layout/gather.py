"""Gather the tokens that the ranks of one mesh dim hold, in the order of the sequence, and the transpose of that.

:mod:`para_core.attention.flex_exchange`, :mod:`para_core.attention.gradients.gathered` and
:mod:`para_core.spatial.fetch` call it. Tests: tests/layout/test_sequence.py for the order, and for gradients
tests/modes/test_flex_attention.py and tests/attention/test_gathered.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather, all_to_all
from para_core.distributed.mesh import MeshDim
from para_core.layout.pieces import Layout
from para_core.layout.runs import add_at, join_neighbours, take
from para_core.layout.sequence import Run


class _SequenceOrder:
    """The order of the sequence, into which gathered tokens are brought.

    ``runs`` are the positions of the tokens as runs ``(start, length)``, in the order in which they were
    gathered. Lengths must be plain numbers, because they are sorted; callers run outside of a trace.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._order = sorted(range(len(runs)), key=runs.__getitem__)
        self._lengths = [length for _, length in runs]
        self._is_gathered_order = self._order == list(range(len(runs)))

    def arrange(self, x: Tensor, dim: int) -> Tensor:
        """Return ``x`` with its tokens rearranged from the order in which they were gathered to this order."""
        if self._is_gathered_order:
            return x
        parts = x.split(self._lengths, dim=dim)
        return torch.cat([parts[index] for index in self._order], dim=dim)

    def restore(self, x: Tensor, dim: int) -> Tensor:
        """Undo :meth:`arrange`: return ``x`` with its tokens in the order in which they were gathered."""
        if self._is_gathered_order:
            return x
        parts = x.split([self._lengths[index] for index in self._order], dim=dim)
        return torch.cat([parts[self._order.index(index)] for index in range(len(parts))], dim=dim)


def _order_of(layout: Layout) -> _SequenceOrder:
    """Return the order of gathered tokens: the sharded ones of each rank, followed by the replicated ones."""
    sharded = layout.only(*range(len(layout.pieces)), replicated=False).runs()
    return _SequenceOrder([*sharded, *layout.runs(0, replicated=True)])


def _sharded_offsets(layout: Layout, rank: int) -> list[Run]:
    """Return where the sharded pieces lie in the tensor of ``rank``, with neighbouring ones joined."""
    return join_neighbours(layout.offsets(rank, replicated=False))


def gather(x: Tensor, dim: int, layout: Layout, ranks: MeshDim) -> Tensor:
    """Return the tokens of all ranks, in the order of the sequence. Collective.

    ``x`` is this rank's part in ``layout``, along ``dim``. Replicated tokens are taken from it, and not sent.
    """
    sharded = take(x, dim, _sharded_offsets(layout, ranks.index))
    gathered = all_gather(sharded, layout.sizes(replicated=False), dim, ranks)
    replicated = layout.offsets(ranks.index, replicated=True)
    if replicated:
        gathered = torch.cat([gathered, take(x, dim, replicated)], dim=dim)
    return _order_of(layout).arrange(gathered, dim)


def gather_gradient(grad: Tensor, dim: int, layout: Layout, ranks: MeshDim) -> Tensor:
    """Return the gradient of this rank's part, from that of the tokens of all ranks: the transpose of
    :func:`gather`. ``dim`` must not be negative.

    The gradients of a sharded token are summed over the ranks. Those of a replicated one are not: each rank
    has a copy of its own, whose gradients the caller sums where it made the copies. Collective.
    """
    sizes, rank = layout.sizes(replicated=False), ranks.index
    grad = _order_of(layout).restore(grad, dim)
    sharded, replicated = grad.split([sum(sizes), grad.shape[dim] - sum(sizes)], dim=dim)
    gradients = all_to_all(sharded.movedim(dim, 0).contiguous(), sizes, [sizes[rank]] * ranks.size, ranks)
    summed = gradients.unflatten(0, (ranks.size, sizes[rank])).sum(0).movedim(0, dim)
    part = grad.new_zeros(*grad.shape[:dim], layout.size(rank), *grad.shape[dim + 1 :])
    add_at(part, dim, _sharded_offsets(layout, rank), summed)
    add_at(part, dim, layout.offsets(rank, replicated=True), replicated)
    return part
