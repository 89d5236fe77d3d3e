"""Sharding a tensor to this rank's tokens, and putting all ranks' tokens together again."""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.layout import Segment, SequenceLayout
from para_core.distributed.mesh import SequenceMesh


def shard_tokens(x: Tensor, dim: int, layout: SequenceLayout, mesh: SequenceMesh) -> Tensor:
    """This rank's part of ``x``, which holds all tokens of ``layout`` along ``dim``."""
    parts = [x.narrow(dim, start, length) for start, length in layout.runs(mesh.rank)]
    # A tensor of its own, no view: graphs are compiled for a view's base, too, and it would stay in memory.
    return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, dim=dim)


def gather_tokens(y: Tensor, dim: int, layout: SequenceLayout, mesh: SequenceMesh) -> Tensor:
    """Put the parts of all sequence ranks together along ``dim``: over ulysses, whose ranks are neighbours, then ring."""
    parts = y.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=dim)
    whole = []
    for segment, part in zip(layout.segments, parts, strict=True):
        if not segment.replicated:
            sizes = segment.sizes(layout.ranks)
            width = mesh.ulysses.size
            blocks = [sizes[first : first + width] for first in range(0, layout.ranks, width)]
            block = all_gather(part, blocks[mesh.ring.index], dim, mesh.ulysses)
            parts_of_ranks = all_gather(block, [sum(sizes) for sizes in blocks], dim, mesh.ring)
            whole.append(_in_order(parts_of_ranks, dim, segment, layout.ranks) if segment.balanced else parts_of_ranks)
        else:
            whole.append(part)
    # Contiguous, as a model returns it on one device: a loss takes its view(-1, C).
    return (whole[0] if len(whole) == 1 else torch.cat(whole, dim=dim)).contiguous()


def _in_order(x: Tensor, dim: int, segment: Segment, ranks: int) -> Tensor:
    """``x`` holds, rank by rank, each rank's front and back part of a balanced segment: fronts first, backs mirrored."""
    lengths = [length for rank in range(ranks) for _, length in segment.runs(rank, ranks)]
    parts = x.split(lengths, dim=dim)
    return torch.cat([*parts[0::2], *reversed(parts[1::2])], dim=dim)
