"""Swap tokens for heads among the ranks of a Ulysses group, and back, by one all-to-all.

:class:`ToHeads` sends each rank its heads of this rank's tokens, and returns this rank's heads of all tokens of the
group, in the order of the sequence. :class:`ToTokens` is its inverse. Several tensors travel together.

The buffer has one part per rank. A part holds one table per kind of tensor: tensors with the same tokens and the same
width share a table ``[tokens, B, sum of heads, D]``. For two ranks, query, key and value of four heads each::

    tokens of rank 0 ─┬─ heads 0 1 of q, k, v   →  rank 0      rank 0 receives, one below the other: a table of all
                      └─ heads 2 3 of q, k, v   →  rank 1      tokens with its heads, of which q, k and v are views

How a table is packed is chosen once per set of shapes. Slices of equal size are one strided view, so the number of
launches does not depend on the number of ranks. On a GPU one kernel copies all slices (:mod:`.pack_ops`), which is also
the only way that rounds to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.attention.block_rows import BlockRows
from para_core.attention.pack_ops import as_numbers
from para_core.distributed.collectives import Travelling, start_all_to_all, wait
from para_core.distributed.mesh import MeshDim
from para_core.kernels.pack_reference import SCALE_BYTES, CopyRegion
from para_core.layout.runs import join_neighbours, take
from para_core.layout.sequence import Run
from para_core.triton_support import load_kernel

# A function that waits for an exchange, and returns its results.
Finish = Callable[[], Sequence[Tensor]]
Pack = Callable[[Sequence[Tensor]], Tensor]
Unpack = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


class _Steps(NamedTuple):
    """Pack and unpack for tensors of certain shapes; ``send`` and ``receive`` are buffer elements per rank."""

    pack: Pack
    send: list[int]
    receive: list[int]
    unpack: Unpack


class _Shapes(NamedTuple):
    """The sizes of the tensors ``[B, H, S, D]`` of one exchange, as they are on this rank before it.

    ``tables`` are the indices of the tensors that share a table. ``row_widths`` are the numbers of buffer elements per
    token and head of each tensor: D, or D plus the bytes of a scale.
    """

    batch: int
    widths: list[int]
    row_widths: list[int]
    tables: list[list[int]]


def takes_kernels(x: Tensor) -> bool:
    """Whether a Triton kernel packs ``x``: on CUDA, in eager code without gradients. Meta tensors count as CUDA."""
    if not (x.is_cuda or x.is_meta) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return load_kernel("pack", x.device) is not None


def _writes_into_buffers() -> bool:
    """Whether tensors may be written into a buffer: autograd and graphs need a concatenation in its place."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


class _Swap:
    """The part that both directions share: the sizes of the exchange, and the steps for each set of shapes.

    Args:
        rows: For each tensor, where the tokens of the group lie. Tensors with the same layout share one object.
        heads: For each tensor, the heads ``(start, count)`` that each rank computes.
        dim: The mesh dim of the ranks.
        replicated: Whether replicated tokens are sent, too.
        comm_dtype: The 8-bit dtype to which tensors are rounded for sending (not exact); None to send them unchanged.
    """

    def __init__(
        self,
        rows: Sequence[BlockRows],
        heads: Sequence[Sequence[Run]],
        dim: MeshDim,
        *,
        replicated: bool = False,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.rows, self.heads, self.dim, self.replicated, self.comm_dtype = rows, heads, dim, replicated, comm_dtype
        self.sizes = [of.sizes(replicated=replicated) for of in rows]
        # If all parts are equal, the collective needs no sizes and is faster. Do not compare lengths while tracing,
        # because a comparison of symbolic lengths would add a guard.
        self._is_even = not torch.compiler.is_compiling() and all(
            len(set(numbers)) == 1 for numbers in (*self.sizes, *[[count for _, count in of] for of in heads])
        )
        self._steps: dict[Any, _Steps] = {}

    def start(self, tensors: Sequence[Tensor]) -> Finish:
        """Start the exchange of ``tensors``, and return a function that waits for it and returns its results."""
        steps, first = None, tensors[0]
        by_kernel, compiling = takes_kernels(first), torch.compiler.is_compiling()
        if not compiling:
            # The widths of key and value, the last tensors, are all that the other tensors do not have from the first.
            key = (by_kernel, torch.is_grad_enabled(), first.dtype, first.shape, tensors[-1].shape)
            steps = self._steps.get(key)
        if steps is None:
            steps = self._plan([x.shape for x in tensors], first.dtype, by_kernel=by_kernel)
            # Only in eager code are lengths integers.
            if not compiling:
                self._steps[key] = steps
        buffer = steps.pack(tensors)
        buffer = buffer.view(self.dim.size, steps.send[0]) if self._is_even else buffer.view(-1)
        started = start_all_to_all(buffer, steps.send, steps.receive, self.dim, even=self._is_even)
        return partial(_finish, started, steps.unpack, tensors)

    def _plan(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, *, by_kernel: bool) -> _Steps:
        scale = 0 if self.comm_dtype is None else SCALE_BYTES
        widths = [shape[3] for shape in shapes]
        tables: list[list[int]] = []
        for index, width in enumerate(widths):
            fitting = [of for of in tables if widths[of[0]] == width and self._share_tokens(of[0], index)]
            if fitting:
                fitting[0].append(index)
            else:
                tables.append([index])
        sizes = _Shapes(shapes[0][0], widths, [width + scale for width in widths], tables)
        return self._steps_of(sizes, dtype, by_kernel=by_kernel)

    def _share_tokens(self, index: int, other: int) -> bool:
        """Whether two tensors can share a table, because the same tokens of both are sent in the same order."""
        raise NotImplementedError

    def _steps_of(self, shapes: _Shapes, dtype: torch.dtype, *, by_kernel: bool) -> _Steps:
        raise NotImplementedError

    def numel_of_token(self, table: Sequence[int], rank: int, shapes: _Shapes) -> int:
        """Return the number of buffer elements of one token of ``table``, with the heads of ``rank``."""
        return shapes.batch * sum([self.heads[index][rank][1] * shapes.row_widths[index] for index in table])

    def regions(self, shapes: _Shapes, tokens: Sequence[Sequence[Sequence[Run]]], *, by_head: bool) -> list[int]:
        """Return the regions of the buffer for a kernel, as one list of integers.

        Args:
            tokens: ``tokens[index][rank]`` are the runs of tokens of tensor ``index`` in the part of ``rank``.
            by_head: Whether the tensor has all heads, of which the part of a rank has those of ``rank``; otherwise it
                has this rank's heads only, and all parts have all of them.
        """
        regions, offset, own = [], 0, self.dim.index
        for rank in range(self.dim.size):
            for table in shapes.tables:
                owner = rank if by_head else own
                counts = [self.heads[index][owner][1] * shapes.row_widths[index] for index in table]
                starts = list(accumulate(counts, initial=0))
                step = starts[-1]
                for index, before in zip(table, starts, strict=False):
                    first, count = self.heads[index][owner]
                    at = offset + before
                    for start, length in tokens[index][rank]:
                        regions.append(CopyRegion(index, start, length, first if by_head else 0, count, at, step))
                        at += length * shapes.batch * step
                offset = at - before
        return as_numbers(regions)


def _finish(started: Travelling, unpack: Unpack, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return unpack(wait(started), tensors)


class ToHeads(_Swap):
    """The exchange of ``[B, H, S_local, D]`` for ``[B, H_local, S_block, D]``.

    Replicated tokens are not sent: each rank takes its own heads of them. With ``replicated`` they are sent and summed
    over the ranks, as the gradients of copies are.
    """

    def _share_tokens(self, index: int, other: int) -> bool:
        return self.rows[index].sequence is self.rows[other].sequence

    def _steps_of(self, shapes: _Shapes, dtype: torch.dtype, *, by_kernel: bool) -> _Steps:
        size, index = self.dim.size, self.dim.index
        send = [
            sum([self.numel_of_token(of, rank, shapes) * self.sizes[of[0]][index] for of in shapes.tables])
            for rank in range(size)
        ]
        receive = [
            sum([self.numel_of_token(of, index, shapes) * self.sizes[of[0]][rank] for of in shapes.tables])
            for rank in range(size)
        ]
        rounds = self.comm_dtype is not None
        if rounds or (by_kernel and len(self.rows) > 1):
            own = [[rows.own(replicated=self.replicated)] * size for rows in self.rows]
            pack: Pack = partial(_pack_regions, self.regions(shapes, own, by_head=True), sum(send), self.comm_dtype)
        else:
            groups = group_ranks(self.heads)
            pack = partial(self._pack, shapes, groups, sum(send))
            if self._packs_views(shapes, groups):
                pack = partial(
                    _pack_views, [self._view_shape(shapes, of_tensor) for of_tensor in range(len(self.rows))]
                )
        if rounds or (by_kernel and len(shapes.tables) > 1):
            return _Steps(pack, send, receive, self._regions_unpacker(shapes, dtype))
        if len(shapes.tables) == 1 and all(rows is self.rows[0] and rows.is_rank_by_rank for rows in self.rows):
            heads = [of_ranks[index][1] for of_ranks in self.heads]
            table = (sum(self.sizes[0]), shapes.batch, sum(heads), shapes.widths[0])
            return _Steps(pack, send, receive, partial(_unpack_views, table, heads))
        if len(shapes.tables) == 1:
            return _Steps(pack, send, receive, partial(self._unpack_table, shapes, shapes.tables[0]))
        return _Steps(pack, send, receive, partial(self._unpack_tables, shapes))

    def _packs_views(self, shapes: _Shapes, groups: Sequence[RankGroup]) -> bool:
        """Whether one view of each tensor, of all its tokens and heads, shows the slices of all ranks."""
        if len(groups) > 1 or len(shapes.tables) > 1 or groups[0].number == 1 or self._leaves_out_replicated:
            return False
        return all(step == count for _, count, step in groups[0].heads)

    def _view_shape(self, shapes: _Shapes, index: int) -> tuple[int, ...]:
        """Return the shape ``[B, ranks, heads, S, D]`` of tensor ``index``."""
        tokens = self.sizes[index][self.dim.index]
        return (shapes.batch, self.dim.size, self.heads[index][0][1], tokens, shapes.widths[index])

    @property
    def _leaves_out_replicated(self) -> bool:
        return not self.replicated and any(rows.replicates for rows in self.rows)

    def _pack(self, shapes: _Shapes, groups: Sequence[RankGroup], numel: int, tensors: Sequence[Tensor]) -> Tensor:
        """Pack with one copy if all ranks get equally many heads, otherwise with one copy per group of equal ranks."""
        if self._leaves_out_replicated:
            tensors = [take(x, 2, rows.own_sharded) for x, rows in zip(tensors, self.rows, strict=True)]
        if len(groups) == 1 and len(shapes.tables) == 1:
            views = [see_heads(x, groups[0], run) for x, run in zip(tensors, groups[0].heads, strict=True)]
            return views[0].contiguous() if len(views) == 1 else torch.cat(views, 3)
        if not _writes_into_buffers():
            parts = []
            for rank in range(self.dim.size):
                for of in shapes.tables:
                    own = [tensors[index].narrow(1, *self.heads[index][rank]) for index in of]
                    parts.append(_joined([x.permute(2, 0, 1, 3) for x in own], 2).reshape(-1))
            return torch.cat(parts)
        buffer = tensors[0].new_empty(numel)
        for group, part in _parts(buffer, groups, self, shapes):
            before = 0
            for of in shapes.tables:
                views = [see_heads(tensors[index], group, group.heads[index]) for index in of]
                count = sum([view.shape[3] for view in views])
                shape = (*views[0].shape[:3], count, views[0].shape[4])
                target = part.narrow(1, before, prod(shape[1:])).view(shape)
                torch.cat(views, 3, out=target)
                before += prod(shape[1:])
        return buffer

    def _unpack_table(
        self, shapes: _Shapes, of: Sequence[int], buffer: Tensor, tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return views of the received table if its tokens are in order, otherwise of one concatenation of its rows."""
        heads = [self.heads[index][self.dim.index][1] for index in of]
        table = buffer.view(sum(self.sizes[of[0]]), shapes.batch, sum(heads), shapes.widths[of[0]])
        if all(self.rows[index] is self.rows[of[0]] for index in of):
            return self._blocks_of(table, of, heads, tensors)
        # Queries stay in the order of arrival, and keys and values do not.
        queries, rest = table.split_with_sizes([heads[0], sum(heads[1:])], 2)
        return (
            *self._blocks_of(queries, of[:1], heads[:1], tensors),
            *self._blocks_of(rest, of[1:], heads[1:], tensors),
        )

    def _blocks_of(
        self, table: Tensor, of: Sequence[int], heads: list[int], tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        rows = self.rows[of[0]]
        if not rows.is_rank_by_rank:
            own = [tensors[i].narrow(1, *self.heads[i][self.dim.index]).permute(2, 0, 1, 3) for i in of]
            table = self._summed(rows, table) if self.replicated else _in_order(rows, table, own)
        blocks = table.permute(1, 2, 0, 3)
        # Use split_with_sizes(), because split() is implemented in Python and slower.
        return (blocks,) if len(heads) == 1 else blocks.split_with_sizes(heads, 1)

    def _summed(self, rows: BlockRows, table: Tensor) -> Tensor:
        """Return ``table``, which arrived rank by rank, in the order of the block, with sums of replicated tokens."""
        starts, parts = rows.arrival_starts(replicated=True), []
        for rank, number in rows.in_order:
            row = rows.of_peers[rank][number]
            if row.replicated:
                copies = [table.narrow(0, of[number], row.length) for of in starts]
                parts.append(torch.stack(copies).sum(0))
            else:
                parts.append(table.narrow(0, starts[rank][number], row.length))
        return _joined(parts, 0)

    def _unpack_tables(self, shapes: _Shapes, buffer: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Concatenate the parts of each table, and put its rows in order."""
        buffer, results = buffer.view(-1), list(tensors)
        received: list[list[Tensor]] = [[] for _ in shapes.tables]
        offset = 0
        for rank in range(self.dim.size):
            for number, of in enumerate(shapes.tables):
                heads = sum([self.heads[index][self.dim.index][1] for index in of])
                shape = (self.sizes[of[0]][rank], shapes.batch, heads, shapes.widths[of[0]])
                received[number].append(buffer.narrow(0, offset, prod(shape)).view(shape))
                offset += prod(shape)
        for of, parts in zip(shapes.tables, received, strict=True):
            blocks = self._unpack_table(shapes, of, torch.cat(parts), tensors)
            for index, block in zip(of, blocks, strict=True):
                results[index] = block
        return results

    def _regions_unpacker(self, shapes: _Shapes, dtype: torch.dtype) -> Unpack:
        index = self.dim.index
        blocks = [[_sharded_blocks(rows, rank) for rank in range(self.dim.size)] for rows in self.rows]
        regions = self.regions(shapes, blocks, by_head=False)
        # B, H, S and D of each result.
        sizes = [
            size
            for rows, heads, width in zip(self.rows, self.heads, shapes.widths, strict=True)
            for size in (shapes.batch, heads[index][1], rows.size, width)
        ]

        def unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            results = _unpack_regions(buffer, regions, sizes, self.comm_dtype, dtype)
            for result, x, rows, heads in zip(results, tensors, self.rows, self.heads, strict=True):
                for row in rows.of_peers[index]:
                    if row.replicated:
                        own = x.narrow(2, row.local, row.length).narrow(1, *heads[index])
                        result.narrow(2, row.block, row.length).copy_(own)
            return results

        return unpack


class ToTokens(_Swap):
    """The exchange of ``[B, H_local, S_block, D]`` for ``[B, H, S_local, D]``: the inverse of :class:`ToHeads`.

    With ``replicated``, every rank gets all heads of the replicated tokens. Without it, they are not sent, and a result
    has zeros for the heads of other ranks: it is a share of a sum over ranks, as gradients of copies are. Where several
    ranks have the same head, their results are summed.
    """

    def _share_tokens(self, index: int, other: int) -> bool:
        return self.rows[index] is self.rows[other]

    def _steps_of(self, shapes: _Shapes, dtype: torch.dtype, *, by_kernel: bool) -> _Steps:
        size, index = self.dim.size, self.dim.index
        send = [
            sum([self.numel_of_token(of, index, shapes) * self.sizes[of[0]][rank] for of in shapes.tables])
            for rank in range(size)
        ]
        receive = [
            sum([self.numel_of_token(of, rank, shapes) * self.sizes[of[0]][index] for of in shapes.tables])
            for rank in range(size)
        ]
        rounds = self.comm_dtype is not None
        if rounds or (by_kernel and len(self.rows) > 1):
            blocks = [[self._blocks_of(rows, rank) for rank in range(size)] for rows in self.rows]
            pack: Pack = partial(_pack_regions, self.regions(shapes, blocks, by_head=False), sum(send), self.comm_dtype)
            whole = self.replicated or not any(rows.replicates for rows in self.rows)
            if whole and all(_are_disjoint(heads) for heads in self.heads):
                return _Steps(pack, send, receive, self._regions_unpacker(shapes, dtype))
            return _Steps(pack, send, receive, partial(self._unpack, shapes))
        if len(self.rows) == 1:
            # Ranks without heads send nothing.
            tokens, counts = self.sizes[0][index], [count for _, count in self.heads[0] if count] or [0]
            unpack: Unpack = partial(_unpack_uneven_heads, shapes.batch, tokens, counts, shapes.widths[0])
            if all(count == counts[0] for count in counts):
                unpack = partial(_unpack_even_heads, (len(counts), tokens, shapes.batch, counts[0], shapes.widths[0]))
            return _Steps(partial(self._pack_one, self.rows[0]), send, receive, unpack)
        return _Steps(partial(self._pack, shapes), send, receive, partial(self._unpack, shapes))

    def _blocks_of(self, rows: BlockRows, rank: int) -> list[Run]:
        """Return where the tokens of ``rank`` lie in the block."""
        runs = [(row.block, row.length) for row in rows.of_peers[rank] if self.replicated or not row.replicated]
        return join_neighbours(runs)

    def _regions_unpacker(self, shapes: _Shapes, dtype: torch.dtype) -> Unpack:
        own = [[rows.own(replicated=True)] * self.dim.size for rows in self.rows]
        regions = self.regions(shapes, own, by_head=True)
        # B, H, S and D of each result.
        sizes = [
            size
            for rows, heads, width in zip(self.rows, self.heads, shapes.widths, strict=True)
            for size in (shapes.batch, max([sum(run) for run in heads]), rows.own_size, width)
        ]
        return lambda buffer, _: _unpack_regions(buffer, regions, sizes, self.comm_dtype, dtype)

    def _pack_one(self, rows: BlockRows, tensors: Sequence[Tensor]) -> Tensor:
        table = tensors[0].permute(2, 0, 1, 3)
        if rows.is_rank_by_rank:
            return table.contiguous()
        runs = rows.sent_blocks(replicated=self.replicated) or [(0, 0)]
        return _joined([table.narrow(0, *run) for run in runs], 0).contiguous()

    def _pack(self, shapes: _Shapes, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate the heads of each table, and the tokens of each rank."""
        tables = [_joined([tensors[index].permute(2, 0, 1, 3) for index in of], 2) for of in shapes.tables]
        if len(tables) == 1 and self.rows[0].is_rank_by_rank:
            return tables[0]
        parts = []
        for rank in range(self.dim.size):
            for table, of in zip(tables, shapes.tables, strict=True):
                runs = [
                    (row.block, row.length)
                    for row in self.rows[of[0]].of_peers[rank]
                    if self.replicated or not row.replicated
                ]
                parts += [table.narrow(0, *run).reshape(-1) for run in runs]
        return torch.cat([tables[0].new_empty(0), *parts])

    def _unpack(self, shapes: _Shapes, buffer: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        buffer, offset, own = buffer.view(-1), 0, self.dim.index
        slices: list[list[Tensor]] = [[] for _ in tensors]
        for rank in range(self.dim.size):
            for of in shapes.tables:
                counts, tokens = [self.heads[index][rank][1] for index in of], self.sizes[of[0]][own]
                shape = (tokens, shapes.batch, sum(counts), shapes.widths[of[0]])
                part = buffer.narrow(0, offset, prod(shape)).view(shape)
                offset += prod(shape)
                for index, x in zip(of, part.split_with_sizes(counts, 2), strict=True):
                    slices[index].append(x.transpose(0, 1))
        return [
            self._in_local_order(rows, _merge_heads(parts, heads), x, heads[own])
            for rows, parts, heads, x in zip(self.rows, slices, self.heads, tensors, strict=True)
        ]

    def _in_local_order(self, rows: BlockRows, sharded: Tensor, block: Tensor, heads: Run) -> Tensor:
        """Return ``sharded``, ``[B, S, H, D]``, as ``[B, H, S_local, D]`` with replicated tokens from ``block``."""
        if self.replicated or not rows.replicates:
            return sharded.transpose(1, 2)
        batch, _, num_heads, width = sharded.shape
        whole = sharded.new_zeros(batch, rows.own_size, num_heads, width).transpose(1, 2)
        start = 0
        for row in rows.of_peers[self.dim.index]:
            target = whole.narrow(2, row.local, row.length)
            if row.replicated:
                target.narrow(1, *heads).copy_(block.narrow(2, row.block, row.length))
            else:
                target.copy_(sharded.narrow(1, start, row.length).transpose(1, 2))
                start += row.length
        return whole


def _in_order(rows: BlockRows, table: Tensor, own: Sequence[Tensor]) -> Tensor:
    """Return ``table``, ``[tokens, B, heads, D]``, which arrived rank by rank, in the order of the block.

    Replicated tokens come from ``own``: this rank's tensors, ``[S_local, B, heads, D]`` with this rank's heads.
    """
    parts = []
    for replicated, run in rows.arrivals:
        if replicated:
            parts.append(_joined([x.narrow(0, *run) for x in own], 2))
        else:
            parts.append(table.narrow(0, *run))
    return _joined(parts, 0) if parts else table


def _pack_views(shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors by one concatenation of views. ``shapes`` are ``[B, ranks, heads, S, D]``."""
    views = [x.view(shape).permute(1, 3, 0, 2, 4) for x, shape in zip(tensors, shapes, strict=True)]
    return views[0].contiguous() if len(views) == 1 else torch.cat(views, 3)


def _unpack_views(table: Sequence[int], heads: list[int], buffer: Tensor, _: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return views of the received table, ``[tokens, B, sum of heads, D]``; ``heads`` has one number per tensor."""
    blocks = buffer.view(table).permute(1, 2, 0, 3)
    # Use split_with_sizes(), because split() is implemented in Python and slower.
    return (blocks,) if len(heads) == 1 else blocks.split_with_sizes(heads, 1)


def _unpack_even_heads(shape: Sequence[int], buffer: Tensor, _: Sequence[Tensor]) -> Sequence[Tensor]:
    """Bring the heads of all ranks together, with one copy, in the memory layout of SDPA's result.

    ``shape`` is that of the buffer, ``[ranks, S, B, heads, D]``.
    """
    ranks, tokens, batch, heads, width = shape
    parts = buffer.view(shape).permute(2, 1, 0, 3, 4)
    # Call contiguous(), because with one head per rank reshape() returns a view with another memory layout.
    return (parts.reshape(batch, tokens, ranks * heads, width).contiguous().transpose(1, 2),)


def _unpack_uneven_heads(
    batch: int, tokens: int, counts: Sequence[int], width: int, buffer: Tensor, _: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Bring the heads of all ranks together, as :func:`_unpack_even_heads` does, if rank i has ``counts[i]`` heads."""
    slices = buffer.view(-1).split_with_sizes([tokens * batch * count * width for count in counts])
    parts = [x.view(tokens, batch, count, width).transpose(0, 1) for x, count in zip(slices, counts, strict=True)]
    return (torch.cat(parts, 2).transpose(1, 2),)


class RankGroup(NamedTuple):
    """Consecutive ranks from ``first`` on whose slices of heads are equally large and begin at equal distances.

    ``heads`` has ``(start, count, step)`` for each tensor: rank ``first + i`` gets ``count`` heads from ``start + i ·
    step`` on. ``step`` is ``count``, or 0 if all ranks get the same heads.
    """

    first: int
    number: int
    heads: tuple[tuple[int, int, int], ...]


def group_ranks(heads: Sequence[Sequence[Run]]) -> list[RankGroup]:
    """Split the ranks into groups with equal numbers of heads. ``heads[k][i]`` is the run of rank i for tensor k.

    >>> group_ranks([[(0, 2), (2, 2), (4, 1)]])
    [RankGroup(first=0, number=2, heads=((0, 2, 2),)), RankGroup(first=2, number=1, heads=((4, 1, 1),))]
    """
    groups: list[RankGroup] = []
    for rank, runs in enumerate(zip(*heads, strict=True)):
        steps = _steps_to(groups[-1], runs) if groups else None
        if steps is None:
            groups.append(RankGroup(rank, 1, tuple([(start, count, count) for start, count in runs])))
        else:
            last = groups[-1]
            grown = tuple([(start, count, step) for (start, count, _), step in zip(last.heads, steps, strict=True)])
            groups[-1] = RankGroup(last.first, last.number + 1, grown)
    return groups


def _steps_to(group: RankGroup, runs: Sequence[Run]) -> list[int] | None:
    """Return the step of each run of ``group`` if a rank with ``runs`` joins it; None if it cannot.

    If the group has only one rank, its step is still open: it may become ``count`` or 0.
    """
    steps = []
    for (first, count, step), (start, number) in zip(group.heads, runs, strict=True):
        possible = (count, 0) if group.number == 1 else (step,)
        fitting = [distance for distance in possible if start == first + group.number * distance]
        if number != count or not fitting:
            return None
        steps.append(fitting[0])
    return steps


def see_heads(x: Tensor, group: RankGroup, run: tuple[int, int, int]) -> Tensor:
    """Return a view ``[ranks, S, B, heads, D]`` of ``x``, ``[B, H, S, D]``, that shows the heads of each rank."""
    start, count, step = run
    batch, heads, tokens, width = x.shape
    if step == 0 or group.number == 1:
        own = x if count == heads else x.narrow(1, start, count)
        return own.permute(2, 0, 1, 3).expand(group.number, tokens, batch, count, width)
    if group.number * count != heads:
        x = x.narrow(1, start, group.number * count)
    return x.view(batch, group.number, count, tokens, width).permute(1, 3, 0, 2, 4)


def _parts(
    buffer: Tensor, groups: Sequence[RankGroup], swap: ToHeads, shapes: _Shapes
) -> Iterator[tuple[RankGroup, Tensor]]:
    """Yield each group of ranks with its part of the buffer, ``[ranks, elements per rank]``."""
    offset = 0
    for group in groups:
        each = sum(
            [swap.numel_of_token(of, group.first, shapes) * swap.sizes[of[0]][swap.dim.index] for of in shapes.tables]
        )
        yield group, buffer.narrow(0, offset, group.number * each).view(group.number, each)
        offset += group.number * each


def _sharded_blocks(rows: BlockRows, rank: int) -> list[Run]:
    return join_neighbours([(row.block, row.length) for row in rows.of_peers[rank] if not row.replicated])


def _merge_heads(parts: Sequence[Tensor], heads: Sequence[Run]) -> Tensor:
    """Concatenate the heads of all ranks, ``[B, S, heads, D]``; add up those that several ranks have."""
    if _are_disjoint(heads):
        return _joined(parts, 2)
    batch, tokens, _, width = parts[0].shape
    num_heads = max([sum(run) for run in heads])
    whole = parts[0].new_zeros(batch, tokens, num_heads, width)
    for part, (start, count) in zip(parts, heads, strict=True):
        whole.narrow(2, start, count).add_(part)
    return whole


def _are_disjoint(heads: Sequence[Run]) -> bool:
    """Whether no two ranks have the same head. Together they have all heads."""
    return sum([count for _, count in heads]) == max([sum(run) for run in heads])


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _pack_regions(regions: list[int], numel: int, to: torch.dtype | None, tensors: Sequence[Tensor]) -> Tensor:
    packed: Tensor = torch.ops.para_core.pack.default(list(tensors), regions, numel, to)
    return packed


def _unpack_regions(
    buffer: Tensor, regions: list[int], sizes: list[int], of: torch.dtype | None, dtype: torch.dtype
) -> Sequence[Tensor]:
    tensors: Sequence[Tensor] = torch.ops.para_core.unpack.default(buffer.view(-1), regions, sizes, of, dtype)
    return tensors
