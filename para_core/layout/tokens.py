"""Take a rank's part of the tokens of a tensor, and gather the parts of all ranks.

These functions work over a whole mesh, may be traced by Dynamo, and are differentiable. Those of
:mod:`~para_core.layout.gather` work over one mesh dim and for layouts of groups of ranks, in eager code.

A layout here has as many ranks as its mesh. A wrong number of tokens raises on the rank that has it, while
the others wait in the collective, so callers that cannot trust a length must compare it on all ranks first.

The modes (``cp.shard``, ``cp.gather``) and the plans call them. Tests: tests/modes/test_unified.py and
tests/plans/test_exactness.py, and tests/layout/test_sequence.py for :func:`copy_runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Run, SequenceLayout


def shard_tokens(x: Tensor, dim: int, layout: SequenceLayout, mesh: SequenceMesh) -> Tensor:
    """Return a copy of this rank's tokens of ``x``, which contains the whole sequence of ``layout`` along
    ``dim``.

    Its dims lie in memory in the order of those of ``x``.
    """
    return copy_runs(x, dim, layout.runs(mesh.rank))


def copy_runs(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """Return a copy of the ``runs`` of ``x`` along ``dim``, one after the other, as its dims lie in memory.

    A model may compute other bits for another order of dims in memory: a linear layer with a bias in 16 bits
    rounds once if its input is contiguous, and twice if it is not.
    """
    # Copy the tokens, because a view would keep the whole sequence in memory, and a graph would be
    # specialized for the shape of the whole sequence, too.
    if len(runs) == 1:
        start, length = runs[0]
        return x.narrow(dim, start, length).clone()
    parts = [x.narrow(dim, start, length) for start, length in runs]
    if x.is_contiguous():
        return torch.cat(parts, dim)
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
    joined = torch.cat([part.permute(order) for part in parts], order.index(dim % x.ndim))
    return joined.permute([order.index(axis) for axis in range(x.ndim)])


def gather_parts(x: Tensor, dim: int, sizes: Sequence[int], mesh: SequenceMesh) -> Tensor:
    """Return the parts ``x`` of all sequence ranks, of length ``sizes[rank]`` along ``dim``, rank by rank.
    Collective. Unlike :func:`gather_tokens` it knows no layout, so nothing is brought into the order of a
    sequence.

    Parts are gathered first over the Ulysses ranks, which are neighbours, then over the ring.
    """
    ulysses_sizes, ring_sizes = _sizes_by_dim(sizes, mesh)
    return all_gather(all_gather(x, ulysses_sizes, dim, mesh.ulysses), ring_sizes, dim, mesh.ring)


class GatherSizes(NamedTuple):
    """The numbers of tokens of one segment of the ranks in this rank's Ulysses group, and of all Ulysses
    groups along ``ring``. Both are empty for a replicated segment, which is not gathered.
    """

    ulysses: list[int]
    ring: list[int]


def gather_sizes(layout: SequenceLayout, mesh: SequenceMesh) -> tuple[GatherSizes, ...]:
    """Return the numbers of tokens that :func:`gather_tokens` gathers over each mesh dim, by segment.

    Raises:
        ValueError: The layout has another number of ranks than the mesh.
    """
    if layout.ranks != mesh.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, and the mesh has {mesh.ranks}; expected as many."
        )
    sizes: list[GatherSizes] = []
    for segment in layout.segments:
        if segment.replicated:
            sizes.append(GatherSizes([], []))
        else:
            sizes.append(_sizes_by_dim(segment.sizes(layout.ranks), mesh))
    return tuple(sizes)


def _sizes_by_dim(sizes: Sequence[int], mesh: SequenceMesh) -> GatherSizes:
    """Return the ``sizes`` of the ranks in this rank's Ulysses group, and the sums of all groups, in the
    order of the ring: what :func:`~para_core.distributed.collectives.all_gather` needs over ``ulysses`` and
    then over ``ring``.
    """
    width = mesh.ulysses.size
    blocks = [sizes[first : first + width] for first in range(0, mesh.ranks, width)]
    return GatherSizes(list(blocks[mesh.ring.index]), [sum(block) for block in blocks])


def gather_tokens(
    y: Tensor,
    dim: int,
    layout: SequenceLayout,
    mesh: SequenceMesh,
    sizes: Sequence[GatherSizes] | None = None,
) -> Tensor:
    """Gather ``y``, this rank's tokens of ``layout`` along ``dim``, from all sequence ranks. Collective.

    The result is contiguous, with all tokens in the order of the sequence. Tokens are gathered first over the
    Ulysses ranks, whose parts of the sequence are neighbours, then over the ring. ``sizes`` are the
    :func:`gather_sizes`, if the caller keeps them. Raise ``RuntimeError`` on this rank if ``y`` does not have
    its number of tokens.
    """
    if sizes is None:
        sizes = gather_sizes(layout, mesh)
    parts: Sequence[Tensor] = (y,)
    # If the layout has one segment and it is sharded, y is this rank's part of it, and need not be split. A
    # graph must not compare lengths, so it splits always.
    of_group = sizes[0].ulysses
    is_one_part = len(layout.segments) == 1 and len(of_group) > 0 and not torch.compiler.is_compiling()
    if not is_one_part or y.shape[dim] != of_group[mesh.ulysses.index]:
        # This raises if ``y`` does not have this rank's number of tokens.
        parts = y.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=dim)
    gathered = []
    for segment, part, (ulysses_sizes, ring_sizes) in zip(layout.segments, parts, sizes, strict=True):
        if segment.replicated:
            gathered.append(part)
            continue
        ring_block = all_gather(part, ulysses_sizes, dim, mesh.ulysses)
        rank_by_rank = ring_block
        if mesh.ring.size > 1:
            rank_by_rank = all_gather(ring_block, ring_sizes, dim, mesh.ring)
        if segment.balanced:
            # The result has the front part and the back part of each rank, rank by rank.
            runs = [run for rank in range(layout.ranks) for run in segment.runs(rank, layout.ranks)]
            halves = rank_by_rank.split([length for _, length in runs], dim=dim)
            rank_by_rank = torch.cat([*halves[0::2], *reversed(halves[1::2])], dim=dim)
        gathered.append(rank_by_rank)
    # Return a contiguous tensor, as models do, because a loss may call view(-1, C) on the output.
    if len(gathered) == 1:
        return gathered[0].contiguous()
    return torch.cat(gathered, dim=dim).contiguous()
