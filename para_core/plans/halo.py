"""Halo exchange: add rows of neighbouring ranks to the input of a module, and remove them from its output."""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.distributed.collectives import start_all_to_all, wait
from para_core.distributed.layout import Segment
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.plans.plan import Halo


def add_halo(x: Tensor, halo: Halo, segment: Segment, mesh: SequenceMesh) -> Tensor:
    """Return ``x`` with ``halo.size`` rows of the previous rank before it and ``halo.size`` rows of the next rank after
    it.

    The first and the last rank of the sequence get rows on one side only. Collective.

    Args:
        x: This rank's rows of ``segment`` along ``halo.dim``.

    Raises:
        ValueError: A rank has fewer than ``halo.size`` rows, so its neighbours cannot get enough.
    """
    if segment.total // mesh.ranks < halo.size:
        raise ValueError(
            f"{segment.total} rows on {mesh.ranks} ranks are fewer for some than the {halo.size} that their neighbours "
            "need. Use fewer ranks."
        )
    edges = x.narrow(halo.dim, 0, halo.size), x.narrow(halo.dim, x.shape[halo.dim] - halo.size, halo.size)
    before, behind = _around(edges[0], edges[1], mesh.ulysses)
    # The exchange above wraps around within each Ulysses group. So the first rank of a group has received the last rows
    # of its own group instead of the last rows of the previous group, and the last rank of a group has received the
    # first rows of its own group instead of the first rows of the next group. An exchange over the ring replaces both.
    first, last = mesh.ulysses.index == 0, mesh.ulysses.index == mesh.ulysses.size - 1
    if mesh.ring.size > 1 and (first or last):
        from_before, from_behind = _around(behind, before, mesh.ring)
        before, behind = from_before if first else before, from_behind if last else behind
    # The first and the last rank of the sequence received rows of the opposite end, which are cut off here. These ranks
    # cannot skip the exchange, because every rank must take part in its collective in the backward as well.
    start, stop = halo.size * (mesh.rank == 0), halo.size * (mesh.rank == mesh.ranks - 1)
    rows = torch.cat([before, x, behind], dim=halo.dim)
    return rows.narrow(halo.dim, start, rows.shape[halo.dim] - start - stop)


def drop_halo(y: Tensor, halo: Halo, rows: int, mesh: SequenceMesh) -> Tensor:
    """Return this rank's ``rows`` rows of ``y``, without the halo rows added by :func:`add_halo`."""
    return y.narrow(halo.dim, halo.size if mesh.rank > 0 else 0, rows)


def _around(first: Tensor, last: Tensor, dim: MeshDim) -> tuple[Tensor, Tensor]:
    """Return ``last`` of the previous rank and ``first`` of the next rank along ``dim``; the ends wrap around.
    Collective.

    ``first`` and ``last`` must have equal shapes on all ranks.
    """
    if dim.size == 1:
        return last, first
    before, behind = (dim.index - 1) % dim.size, (dim.index + 1) % dim.size
    size = first.numel()
    sizes = [size * ((rank == before) + (rank == behind)) for rank in range(dim.size)]
    # Order the parts by the rank that gets them, as all_to_all requires. With two ranks, the same rank is both the
    # previous and the next rank, and gets both parts.
    sent = [first, last] if before <= behind else [last, first]
    arrived = wait(start_all_to_all(torch.cat([part.reshape(-1) for part in sent]), sizes, sizes, dim))
    earlier, later = (part.view(first.shape) for part in arrived.split([size, size]))
    if before == behind:
        return later, earlier
    return (earlier, later) if before < behind else (later, earlier)
