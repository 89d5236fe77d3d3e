"""Take a rank's part of the tokens of a tensor, and gather the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Run, SequenceLayout


def shard_tokens(x: Tensor, dim: int, layout: SequenceLayout, mesh: SequenceMesh) -> Tensor:
    """Return a copy of this rank's tokens of ``x``, which contains the whole sequence of ``layout`` along ``dim``.

    Its dims lie in memory in the order of those of ``x``.
    """
    return copy_runs(x, dim, layout.runs(mesh.rank))


def copy_runs(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """Return a copy of the ``runs`` of ``x`` along ``dim``, one after the other, as its dims lie in memory.

    A model may compute other bits for another order of dims in memory: a linear layer with a bias in 16 bits rounds
    once if its input is contiguous, and twice if it is not.
    """
    # Copy the tokens, because a view would keep the whole sequence in memory, and a graph would be specialized for
    # the shape of the whole sequence, too.
    parts = [x.narrow(dim, start, length) for start, length in runs]
    if len(parts) == 1:
        return parts[0].clone()
    if x.is_contiguous():
        return torch.cat(parts, dim)
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
    joined = torch.cat([part.permute(order) for part in parts], order.index(dim % x.ndim))
    return joined.permute([order.index(axis) for axis in range(x.ndim)])


def gather_tokens(y: Tensor, dim: int, layout: SequenceLayout, mesh: SequenceMesh) -> Tensor:
    """Gather ``y``, this rank's tokens of ``layout`` along ``dim``, from all sequence ranks.

    The result is contiguous, with all tokens in the order of the sequence. Tokens are gathered first over the
    Ulysses ranks, whose parts of the sequence are neighbours, then over the ring.
    """
    parts = y.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=dim)
    gathered = []
    for segment, part in zip(layout.segments, parts, strict=True):
        if segment.replicated:
            gathered.append(part)
            continue
        sizes, width = segment.sizes(layout.ranks), mesh.ulysses.size
        blocks = [sizes[first : first + width] for first in range(0, layout.ranks, width)]
        ring_block = all_gather(part, blocks[mesh.ring.index], dim, mesh.ulysses)
        rank_by_rank = all_gather(ring_block, [sum(block) for block in blocks], dim, mesh.ring)
        if segment.balanced:
            # The result has the front part and the back part of each rank, rank by rank.
            runs = [run for rank in range(layout.ranks) for run in segment.runs(rank, layout.ranks)]
            halves = rank_by_rank.split([length for _, length in runs], dim=dim)
            rank_by_rank = torch.cat([*halves[0::2], *reversed(halves[1::2])], dim=dim)
        gathered.append(rank_by_rank)
    # Return a contiguous tensor, as models do, because a loss may call view(-1, C) on the output.
    return (gathered[0] if len(gathered) == 1 else torch.cat(gathered, dim=dim)).contiguous()
