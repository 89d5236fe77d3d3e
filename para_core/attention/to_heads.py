"""The swap of all heads of this rank's tokens for this rank's heads of all tokens of its Ulysses group.

One direction of :mod:`.swap`, which explains tables, rows and regions: read it first.
:class:`~para_core.attention.ulysses.UlyssesPlan` makes it for query, key and value, for a mask, and for the
gradient of the output. Tests: tests/attention/test_exactness.py, and tests/attention/test_traffic.py and
tests/attention/test_launches.py for bytes, copies and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

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
    pack_views,
    unpack_views,
)
from para_core.layout.runs import take
from para_core.layout.sequence import Run


class ToHeads(Swap):
    """The exchange of ``[B, H, S_local, D]`` for ``[B, H_local, S_block, D]``.

    Replicated tokens are not sent: each rank takes its own heads of them. With ``replicated`` they are sent
    and summed over the ranks, as the gradients of copies are.
    """

    def shares_tokens(self, index: int, other: int) -> bool:
        return self.rows[index].sequence is self.rows[other].sequence

    def plan_steps(self, shapes: SwapSizes, dtype: torch.dtype, *, by_kernel: bool) -> SwapSteps:
        send, receive = self.numel_by_heads(shapes), self.numel_by_tokens(shapes)
        pack = self._choose_pack(shapes, sum(send), by_kernel=by_kernel)
        return SwapSteps(pack, send, receive, self._choose_unpack(shapes, dtype, by_kernel=by_kernel))

    def _choose_pack(self, shapes: SwapSizes, numel: int, *, by_kernel: bool) -> Pack:
        # A single tensor takes one copy without a kernel.
        if self.wire.needs_regions or (by_kernel and len(self.rows) > 1):
            runs = [[rows.local_runs(replicated=self.replicated)] * self.dim.size for rows in self.rows]
            regions = self.regions(shapes, runs, by_head=True)
            return partial(self.wire.pack, regions=regions, numel=numel)
        groups = group_equal_ranks(self.heads)
        if self._packs_views(shapes, groups):
            # Of each tensor [B, ranks, heads, S, D].
            view_shapes = [
                (shapes.batch, self.dim.size, heads[0][1], sizes[self.dim.index], width)
                for heads, sizes, width in zip(self.heads, self.sizes, shapes.widths, strict=True)
            ]
            return partial(pack_views, view_shapes)
        pack: Pack
        if len(groups) == 1 and len(shapes.tables) == 1:
            pack = partial(_pack_one_group, groups[0])
        elif torch.is_grad_enabled() or torch.compiler.is_compiling():
            # Autograd and graphs need a concatenation in place of a buffer that is written. Swap.exchange plans
            # apart for calls with and without gradients.
            pack = partial(self._pack_slices, shapes)
        else:
            pack = partial(self._pack_groups, shapes, groups, numel)
        if self._leaves_out_replicated:
            return partial(self._pack_sharded, pack)
        return pack

    def _choose_unpack(self, shapes: SwapSizes, dtype: torch.dtype, *, by_kernel: bool) -> Unpack:
        # One table needs no kernel: the results are views of it, or of one concatenation of its rows. The
        # gradient of the output, which alone is an exchange with ``replicated``, is one table, and its wire
        # needs no regions.
        if self.wire.needs_regions or (by_kernel and len(shapes.tables) > 1):
            return self._regions_unpacker(shapes, dtype)
        parts = [self._split_by_rows(members) for members in shapes.tables]
        if len(shapes.tables) > 1:
            return partial(self._unpack_tables, shapes, parts)
        heads = [of_ranks[self.dim.index][1] for of_ranks in self.heads]
        table_shape = (sum(self.sizes[0]), shapes.batch, sum(heads), shapes.widths[0])
        if all(rows is self.rows[0] and rows.is_rank_by_rank for rows in self.rows):
            return partial(unpack_views, table_shape, heads)
        return partial(self._unpack_table, table_shape, parts[0])

    def _split_by_rows(self, members: Sequence[int]) -> list[TablePart]:
        """Split the tensors of a table into those with the same rows."""
        parts: list[TablePart] = []
        for index in members:
            if not parts or self.rows[index] is not self.rows[parts[-1].members[0]]:
                parts.append(TablePart([], []))
            parts[-1].members.append(index)
            parts[-1].heads.append(self.heads[index][self.dim.index][1])
        return parts

    def _packs_views(self, shapes: SwapSizes, groups: Sequence[RankSlices]) -> bool:
        """Whether one view of each tensor, of all its tokens and heads, shows the slices of all ranks."""
        if len(groups) > 1 or len(shapes.tables) > 1 or self._leaves_out_replicated:
            return False
        return all(step == count for _, count, step in groups[0].heads)

    @property
    def _leaves_out_replicated(self) -> bool:
        """Whether the tensors have tokens that are not sent, so that packing must cut them out first."""
        return not self.replicated and any(rows.replicates for rows in self.rows)

    def _pack_sharded(self, pack: Pack, tensors: Sequence[Tensor]) -> Tensor:
        """Pack the tokens that are not replicated by ``pack``."""
        return pack([take(x, 2, rows.local_sharded_runs) for x, rows in zip(tensors, self.rows, strict=True)])

    def _pack_slices(self, shapes: SwapSizes, tensors: Sequence[Tensor]) -> Tensor:
        """Pack by one concatenation of the slices of all ranks."""
        parts = []
        for rank in range(self.dim.size):
            for members in shapes.tables:
                slices = [tensors[index].narrow(1, *self.heads[index][rank]) for index in members]
                parts.append(concatenate([x.permute(2, 0, 1, 3) for x in slices], 2).reshape(-1))
        return torch.cat(parts)

    def _pack_groups(
        self, shapes: SwapSizes, groups: Sequence[RankSlices], numel: int, tensors: Sequence[Tensor]
    ) -> Tensor:
        """Pack into a new buffer, with one copy per table and group of ranks that get equally many heads."""
        buffer, before = tensors[0].new_empty(numel), 0
        for group in groups:
            views_of_tables = [
                [view_heads(tensors[index], group, group.heads[index]) for index in members]
                for members in shapes.tables
            ]
            # The elements of each table in the part of a rank.
            numels = [sum([view.numel() for view in views]) // group.number for views in views_of_tables]
            parts = buffer.narrow(0, before, group.number * sum(numels)).view(group.number, sum(numels))
            for part, views in zip(parts.split_with_sizes(numels, 1), views_of_tables, strict=True):
                heads = sum([view.shape[3] for view in views])
                ranks, tokens, batch, _, width = views[0].shape
                torch.cat(views, 3, out=part.view(ranks, tokens, batch, heads, width))
            before += parts.numel()
        return buffer

    def _unpack_table(
        self, shape: Sequence[int], parts: Sequence[TablePart], buffer: Tensor, tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return views of the received table if its tokens are in order, otherwise of one concatenation of its rows."""
        table = buffer.view(shape)
        if len(parts) == 1:
            return self._split_table(table, *parts[0], tensors)
        blocks: list[Tensor] = []
        tables = table.split_with_sizes([sum(part.heads) for part in parts], 2)
        for of_part, part in zip(tables, parts, strict=True):
            blocks.extend(self._split_table(of_part, *part, tensors))
        return blocks

    def _split_table(
        self, table: Tensor, members: Sequence[int], heads: list[int], tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the block of each of ``members``, tensors with the same rows, which arrived in one ``table``."""
        rows = self.rows[members[0]]
        if not rows.is_rank_by_rank:
            if self.replicated:
                table = self._sum_replicated(rows, table)
            else:
                local = [
                    tensors[i].narrow(1, *self.heads[i][self.dim.index]).permute(2, 0, 1, 3) for i in members
                ]
                table = _put_in_order(rows, table, local)
        blocks = table.permute(1, 2, 0, 3)
        # Use split_with_sizes(), because split() is implemented in Python and slower.
        if len(heads) == 1:
            return (blocks,)
        return blocks.split_with_sizes(heads, 1)

    def _sum_replicated(self, rows: BlockRows, table: Tensor) -> Tensor:
        """Return ``table``, which arrived rank by rank, in the order of the block, with sums of replicated tokens."""
        starts, parts = rows.arrival_starts(replicated=True), []
        for rank, number in rows.in_order:
            row = rows.of_peers[rank][number]
            if row.replicated:
                copies = [table.narrow(0, of_rank[number], row.length) for of_rank in starts]
                parts.append(torch.stack(copies).sum(0))
            else:
                parts.append(table.narrow(0, starts[rank][number], row.length))
        return concatenate(parts, 0)

    def _unpack_tables(
        self,
        shapes: SwapSizes,
        parts_of_tables: Sequence[Sequence[TablePart]],
        buffer: Tensor,
        tensors: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Concatenate what each rank sent of each table, and put its rows in order."""
        buffer, results = buffer.view(-1), list(tensors)
        received: list[list[Tensor]] = [[] for _ in shapes.tables]
        offset = 0
        for rank in range(self.dim.size):
            for number, members in enumerate(shapes.tables):
                heads = sum([self.heads[index][self.dim.index][1] for index in members])
                shape = (self.sizes[members[0]][rank], shapes.batch, heads, shapes.widths[members[0]])
                received[number].append(buffer.narrow(0, offset, prod(shape)).view(shape))
                offset += prod(shape)
        for members, parts, of_ranks in zip(shapes.tables, parts_of_tables, received, strict=True):
            table = torch.cat(of_ranks)
            blocks = self._unpack_table(table.shape, parts, table, tensors)
            for index, block in zip(members, blocks, strict=True):
                results[index] = block
        return results

    def _regions_unpacker(self, shapes: SwapSizes, dtype: torch.dtype) -> Unpack:
        """Return the function that unpacks by a kernel. It copies replicated tokens and does not sum them, so
        it is not for an exchange with ``replicated``: that of the gradient of the output, a single tensor
        that is sent as it is.
        """
        index = self.dim.index
        blocks = [
            [rows.block_runs(rank, replicated=False) for rank in range(self.dim.size)] for rows in self.rows
        ]
        regions = self.regions(shapes, blocks, by_head=False)
        # B, H, S and D of each result.
        sizes = [
            size
            for rows, heads, width in zip(self.rows, self.heads, shapes.widths, strict=True)
            for size in (shapes.batch, heads[index][1], rows.size, width)
        ]

        def unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            results = self.wire.unpack(buffer.view(-1), regions, sizes, dtype)
            for result, x, rows, heads in zip(results, tensors, self.rows, self.heads, strict=True):
                for row in rows.of_peers[index]:
                    if row.replicated:
                        local = x.narrow(2, row.local, row.length).narrow(1, *heads[index])
                        result.narrow(2, row.block, row.length).copy_(local)
            return results

        return unpack


def _put_in_order(rows: BlockRows, table: Tensor, local: Sequence[Tensor]) -> Tensor:
    """Return ``table``, ``[tokens, B, heads, D]``, which arrived rank by rank, in the order of the block.

    Replicated tokens come from ``local``: this rank's tensors, ``[S_local, B, heads, D]`` with this rank's
    heads.
    """
    parts = []
    for replicated, run in rows.arrivals:
        if replicated:
            parts.append(concatenate([x.narrow(0, *run) for x in local], 2))
        else:
            parts.append(table.narrow(0, *run))
    if parts:
        return concatenate(parts, 0)
    return table


class TablePart(NamedTuple):
    """Tensors of a table with the same rows, and their numbers of heads on this rank. Queries may stay in the
    order of arrival, while keys and values do not.
    """

    members: list[int]
    heads: list[int]


class RankSlices(NamedTuple):
    """Consecutive ranks from ``first`` on whose slices of heads are equally large and begin at equal
    distances.

    ``heads`` has ``(start, count, step)`` for each tensor: rank ``first + i`` gets ``count`` heads from
    ``start + i · step`` on. ``step`` is ``count``, or 0 if all ranks get the same heads.
    """

    first: int
    number: int
    heads: tuple[tuple[int, int, int], ...]


def group_equal_ranks(heads: Sequence[Sequence[Run]]) -> list[RankSlices]:
    """Split the ranks into groups with equal numbers of heads. ``heads[k][i]`` is the run of rank i for
    tensor k.

    >>> group_equal_ranks([[(0, 2), (2, 2), (4, 1)]])
    [RankSlices(first=0, number=2, heads=((0, 2, 2),)), RankSlices(first=2, number=1, heads=((4, 1, 1),))]
    """
    groups: list[RankSlices] = []
    for rank, runs in enumerate(zip(*heads, strict=True)):
        steps = None
        if groups:
            steps = _steps_to(groups[-1], runs)
        if steps is None:
            groups.append(RankSlices(rank, 1, tuple([(start, count, count) for start, count in runs])))
        else:
            last = groups[-1]
            grown = tuple(
                [(start, count, step) for (start, count, _), step in zip(last.heads, steps, strict=True)]
            )
            groups[-1] = RankSlices(last.first, last.number + 1, grown)
    return groups


def _steps_to(group: RankSlices, runs: Sequence[Run]) -> list[int] | None:
    """Return the step of each run of ``group`` if a rank with ``runs`` joins it; None if it cannot.

    If the group has only one rank, its step is still open: it may become ``count`` or 0.
    """
    steps = []
    for (first, count, step), (start, number) in zip(group.heads, runs, strict=True):
        possible: tuple[int, ...] = (step,)
        if group.number == 1:
            possible = (count, 0)
        fitting = [distance for distance in possible if start == first + group.number * distance]
        if number != count or not fitting:
            return None
        steps.append(fitting[0])
    return steps


def view_heads(x: Tensor, group: RankSlices, run: tuple[int, int, int]) -> Tensor:
    """Return a view ``[ranks, S, B, heads, D]`` of ``x``, ``[B, H, S, D]``, that shows the heads of each rank."""
    start, count, step = run
    batch, heads, tokens, width = x.shape
    if step == 0 or group.number == 1:
        shown = x
        if count != heads:
            shown = x.narrow(1, start, count)
        return shown.permute(2, 0, 1, 3).expand(group.number, tokens, batch, count, width)
    if group.number * count != heads:
        x = x.narrow(1, start, group.number * count)
    return x.view(batch, group.number, count, tokens, width).permute(1, 3, 0, 2, 4)


def _pack_one_group(group: RankSlices, tensors: Sequence[Tensor]) -> Tensor:
    """Pack one table with one copy: all ranks get equally many heads."""
    views = [view_heads(x, group, run) for x, run in zip(tensors, group.heads, strict=True)]
    if len(views) == 1:
        return views[0].contiguous()
    return torch.cat(views, 3)
