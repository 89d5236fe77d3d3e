"""The swap of this rank's heads of all tokens of its Ulysses group for all heads of this rank's tokens.

The other direction of :mod:`.swap`; :class:`~para_core.attention.ulysses.UlyssesPlan` makes it for the
output, with ``replicated``, and for the gradients of query, key and value. Tests:
tests/attention/test_exactness.py and tests/attention/test_gradients.py, and test_traffic.py there for bytes
and copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from para_core.attention.block_rows import BlockRows
from para_core.attention.swap import (
    Pack,
    Swap,
    SwapSizes,
    SwapSteps,
    Unpack,
    concatenate,
    pack_block,
    unpack_even_heads,
)
from para_core.layout.runs import take
from para_core.layout.sequence import Run


class ToTokens(Swap):
    """The exchange of ``[B, H_local, S_block, D]`` for ``[B, H, S_local, D]``: the inverse of
    :class:`ToHeads`.

    With ``replicated``, every rank gets all heads of the replicated tokens. Without it, they are not sent,
    and a result has zeros for the heads of other ranks: it is a share of a sum over ranks, as gradients of
    copies are. Where several ranks have the same head, their results are summed.
    """

    def shares_tokens(self, index: int, other: int) -> bool:
        return self.rows[index] is self.rows[other]

    def plan_steps(self, shapes: SwapSizes, dtype: torch.dtype, *, by_kernel: bool) -> SwapSteps:
        send, receive = self.numel_by_tokens(shapes), self.numel_by_heads(shapes)
        # Where the tokens of each rank lie in the block of each tensor.
        blocks = [
            [rows.block_runs(rank, replicated=self.replicated) for rank in range(self.dim.size)]
            for rows in self.rows
        ]
        # Whether all tokens and heads arrive, and each once. The gradients of query, key and value may be added up.
        is_whole = self.replicated or not any(rows.replicates for rows in self.rows)
        is_whole = is_whole and all(_are_disjoint(heads) for heads in self.heads)
        pack: Pack = partial(self._pack, shapes, blocks)
        unpack: Unpack = partial(self._unpack, shapes)
        if self.wire.needs_regions or (by_kernel and len(self.rows) > 1):
            regions = self.regions(shapes, blocks, by_head=False)
            pack = partial(self.wire.pack, regions=regions, numel=sum(send))
            # Regions are copied, not added up. Gradients are sent as they are (UlyssesPlan), so _unpack can read them.
            if is_whole:
                unpack = self._regions_unpacker(shapes, dtype)
        elif len(self.rows) == 1 and is_whole:
            # One copy each way.
            pack = partial(_pack_one, [run for runs in blocks[0] for run in runs])
            if self.rows[0].is_rank_by_rank:
                pack = pack_block
            unpack = self._choose_unpack_of_one(shapes)
        return SwapSteps(pack, send, receive, unpack)

    def _choose_unpack_of_one(self, shapes: SwapSizes) -> Unpack:
        """Return the function that unpacks a single tensor. Ranks without heads send nothing."""
        tokens = self.sizes[0][self.dim.index]
        counts = [count for _, count in self.heads[0] if count] or [0]
        if all(count == counts[0] for count in counts):
            shape = (len(counts), tokens, shapes.batch, counts[0], shapes.widths[0])
            return partial(unpack_even_heads, shape)
        return partial(_unpack_uneven_heads, shapes.batch, tokens, counts, shapes.widths[0])

    def _regions_unpacker(self, shapes: SwapSizes, dtype: torch.dtype) -> Unpack:
        runs = [[rows.local_runs(replicated=True)] * self.dim.size for rows in self.rows]
        regions = self.regions(shapes, runs, by_head=True)
        # B, H, S and D of each result.
        sizes = [
            size
            for rows, heads, width in zip(self.rows, self.heads, shapes.widths, strict=True)
            for size in (shapes.batch, max([sum(run) for run in heads]), rows.local_size, width)
        ]
        return lambda buffer, _: self.wire.unpack(buffer.view(-1), regions, sizes, dtype)

    def _pack(
        self, shapes: SwapSizes, blocks: Sequence[Sequence[Sequence[Run]]], tensors: Sequence[Tensor]
    ) -> Tensor:
        """Concatenate the heads of each table, and the tokens of each rank."""
        tables = [
            concatenate([tensors[index].permute(2, 0, 1, 3) for index in members], 2)
            for members in shapes.tables
        ]
        if len(tables) == 1 and self.rows[0].is_rank_by_rank:
            return tables[0]
        parts = []
        for rank in range(self.dim.size):
            for table, members in zip(tables, shapes.tables, strict=True):
                parts += [table.narrow(0, *run).reshape(-1) for run in blocks[members[0]][rank]]
        return torch.cat([tables[0].new_empty(0), *parts])

    def _unpack(self, shapes: SwapSizes, buffer: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Bring the heads of each tensor together, and its tokens into the order of this rank's tensor."""
        buffer, offset, index_of_rank = buffer.view(-1), 0, self.dim.index
        slices: list[list[Tensor]] = [[] for _ in tensors]
        for rank in range(self.dim.size):
            for members in shapes.tables:
                counts = [self.heads[index][rank][1] for index in members]
                tokens = self.sizes[members[0]][index_of_rank]
                shape = (tokens, shapes.batch, sum(counts), shapes.widths[members[0]])
                part = buffer.narrow(0, offset, prod(shape)).view(shape)
                offset += prod(shape)
                for index, x in zip(members, part.split_with_sizes(counts, 2), strict=True):
                    slices[index].append(x.transpose(0, 1))
        return [
            self._in_local_order(rows, _merge_heads(parts, heads), x, heads[index_of_rank])
            for rows, parts, heads, x in zip(self.rows, slices, self.heads, tensors, strict=True)
        ]

    def _in_local_order(self, rows: BlockRows, sharded: Tensor, block: Tensor, heads: Run) -> Tensor:
        """Return ``sharded``, ``[B, S, H, D]``, as ``[B, H, S_local, D]`` with replicated tokens from ``block``."""
        if self.replicated or not rows.replicates:
            return sharded.transpose(1, 2)
        batch, _, num_heads, width = sharded.shape
        local = sharded.new_zeros(batch, rows.local_size, num_heads, width).transpose(1, 2)
        start = 0
        for row in rows.of_peers[self.dim.index]:
            target = local.narrow(2, row.local, row.length)
            if row.replicated:
                target.narrow(1, *heads).copy_(block.narrow(2, row.block, row.length))
            else:
                target.copy_(sharded.narrow(1, start, row.length).transpose(1, 2))
                start += row.length
        return local


def _pack_one(runs: Sequence[Run], tensors: Sequence[Tensor]) -> Tensor:
    """Pack a block with one copy, which brings the tokens of each rank together: those at ``runs``."""
    return take(tensors[0].permute(2, 0, 1, 3), 0, runs).contiguous()


def _unpack_uneven_heads(
    batch: int, tokens: int, counts: Sequence[int], width: int, buffer: Tensor, _: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Bring the heads of all ranks together, as :func:`unpack_even_heads` does.

    ``counts`` are the numbers of heads of the ranks that have any.
    """
    slices = buffer.view(-1).split_with_sizes([tokens * batch * count * width for count in counts])
    parts = [
        x.view(tokens, batch, count, width).transpose(0, 1) for x, count in zip(slices, counts, strict=True)
    ]
    return (torch.cat(parts, 2).transpose(1, 2),)


def _merge_heads(parts: Sequence[Tensor], heads: Sequence[Run]) -> Tensor:
    """Concatenate the heads of all ranks, ``[B, S, heads, D]``; add up those that several ranks have."""
    if _are_disjoint(heads):
        return concatenate(parts, 2)
    batch, tokens, _, width = parts[0].shape
    num_heads = max([sum(run) for run in heads])
    all_heads = parts[0].new_zeros(batch, tokens, num_heads, width)
    for part, (start, count) in zip(parts, heads, strict=True):
        all_heads.narrow(2, start, count).add_(part)
    return all_heads


def _are_disjoint(heads: Sequence[Run]) -> bool:
    """Whether no two ranks have the same head. Together they have all heads."""
    return sum([count for _, count in heads]) == max([sum(run) for run in heads])
