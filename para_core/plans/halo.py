"""Rows of the ranks beside, for a module that mixes neighbouring rows: put on what it is given, taken off what it
returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.distributed.collectives import start_all_to_all, wait
from para_core.distributed.layout import Segment
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.plans.plan import Halo


def add_halo(x: Tensor, halo: Halo, segment: Segment, mesh: SequenceMesh) -> Tensor:
    """``x`` between the last rows of the rank before and the first of the rank behind; the first and last rank have one
    side.

    Raises:
        ValueError: a rank has fewer rows than its neighbours need.
    """
    if segment.total // mesh.ranks < halo.size:
        raise ValueError(
            f"{segment.total} rows on {mesh.ranks} ranks are fewer for some than the {halo.size} that their "
            "neighbours need. Use "
            "fewer ranks."
        )
    edges = x.narrow(halo.dim, 0, halo.size), x.narrow(halo.dim, x.shape[halo.dim] - halo.size, halo.size)
    before, behind = _around(edges[0], edges[1], mesh.ulysses)
    # Around a Ulysses group in a circle: at its ends stands what is needed at the ends of the next one.
    first, last = mesh.ulysses.index == 0, mesh.ulysses.index == mesh.ulysses.size - 1
    if mesh.ring.size > 1 and (first or last):
        from_before, from_behind = _around(behind, before, mesh.ring)
        before, behind = from_before if first else before, from_behind if last else behind
    # What nobody uses is cut off here, and not left out: its backward is a collective, too, which all ranks have to
    # meet in.
    start, stop = halo.size * (mesh.rank == 0), halo.size * (mesh.rank == mesh.ranks - 1)
    rows = torch.cat([before, x, behind], dim=halo.dim)
    return rows.narrow(halo.dim, start, rows.shape[halo.dim] - start - stop)


def drop_halo(y: Tensor, halo: Halo, rows: int, mesh: SequenceMesh) -> Tensor:
    """Remove the halo rows added by :func:`add_halo`: return this rank's ``rows`` of ``y``."""
    return y.narrow(halo.dim, halo.size if mesh.rank > 0 else 0, rows)


def _around(first: Tensor, last: Tensor, dim: MeshDim) -> tuple[Tensor, Tensor]:
    """Return the ``last`` of the previous rank and the ``first`` of the next one, in a circle. All have equal sizes."""
    if dim.size == 1:
        return last, first
    before, behind = (dim.index - 1) % dim.size, (dim.index + 1) % dim.size
    size = first.numel()
    sizes = [size * ((rank == before) + (rank == behind)) for rank in range(dim.size)]
    # Peers are served in their order; of two ranks each is before and behind the other, and gets both from it.
    sent = [first, last] if before <= behind else [last, first]
    arrived = wait(start_all_to_all(torch.cat([part.reshape(-1) for part in sent]), sizes, sizes, dim))
    one, other = (part.view(first.shape) for part in arrived.split([size, size]))
    if before == behind:
        return other, one
    return (one, other) if before < behind else (other, one)
