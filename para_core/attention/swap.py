"""Swap tokens for heads among the ranks of a Ulysses group, and back, by one all-to-all.

:mod:`.to_heads` sends each rank its heads of this rank's tokens, and returns this rank's heads of all tokens
of the group, in the order of the sequence. :mod:`.to_tokens` is its inverse. This file has what both share.
Several tensors travel together.

The buffer has one part per rank. A part holds one table per kind of tensor: tensors with the same tokens and
the same width share a table ``[tokens, B, sum of heads, D]``. For two ranks, query, key and value of four
heads each::

    tokens of rank 0 ─┬─ heads 0 1 of q, k, v   →  rank 0      rank 0 receives, one below the other: a table of all
                      └─ heads 2 3 of q, k, v   →  rank 1      tokens with its heads, of which q, k and v are views

How a table is packed is chosen once per set of shapes. Slices of equal size are one strided view, so the
number of launches does not depend on the number of ranks. On a GPU one kernel copies all slices
(:mod:`.pack_ops`), which is also the only way to send in another format (:mod:`.wire`).

:class:`~para_core.attention.ulysses.UlyssesPlan` makes the swaps. Where each token lies in a block is
computed in :mod:`.block_rows`. Tests: tests/attention/test_exactness.py and test_traffic.py, and
tests/kernels/test_old_gpus.py for the choice of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.attention.block_rows import BlockRows
from para_core.attention.pack_ops import as_numbers
from para_core.attention.wire import AS_IT_IS, Wire
from para_core.distributed.collectives import start_all_to_all, swap_evenly, wait
from para_core.distributed.mesh import MeshDim
from para_core.kernels.pack_reference import CopyRegion
from para_core.layout.runs import starts_of
from para_core.layout.sequence import Run
from para_core.triton_support import load_kernel

# Called as pack(tensors); returns the buffer to send.
Pack = Callable[[Sequence[Tensor]], Tensor]
# Called as unpack(buffer, tensors) with the received buffer and the tensors that were packed, which have the
# tokens or heads that are not sent; returns the results.
Unpack = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


class SwapSteps(NamedTuple):
    """Pack and unpack for tensors of certain shapes; ``send`` and ``receive`` are buffer elements per rank."""

    pack: Pack
    send: list[int]
    receive: list[int]
    unpack: Unpack


class SwapSizes(NamedTuple):
    """The sizes of the tensors ``[B, H, S, D]`` of one exchange, as they are on this rank before it.

    ``tables`` are the indices of the tensors that share a table. ``row_widths`` are the numbers of buffer
    elements per token and head of each tensor: D, or more in another format.
    """

    batch: int
    widths: list[int]
    row_widths: list[int]
    tables: list[list[int]]


def takes_kernels(x: Tensor) -> bool:
    """Whether a Triton kernel packs ``x``: on CUDA, in eager code without gradients. Meta tensors count as
    CUDA, because tests count the launches of CUDA with them.
    """
    if not (x.is_cuda or x.is_meta) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return load_kernel("pack", x.device) is not None


class Swap:
    """The part that both directions share: the sizes of the exchange, and the steps for each set of shapes.

    Args:
        rows: For each tensor, where the tokens of the group lie. Tensors with the same layout share one
            object.
        heads: For each tensor, the heads ``(start, count)`` that each rank computes.
        dim: The mesh dim of the ranks, at least two.
        replicated: Whether replicated tokens are sent, too.
        wire: The format in which tensors are sent; None sends them as they are.
        one_shape: Whether the tensors of all exchanges have the same shapes, dtype and device.
    """

    def __init__(
        self,
        rows: Sequence[BlockRows],
        heads: Sequence[Sequence[Run]],
        dim: MeshDim,
        *,
        replicated: bool = False,
        wire: Wire | None = None,
        one_shape: bool = False,
    ) -> None:
        self.rows, self.heads, self.dim = rows, heads, dim
        self.replicated, self._one_shape = replicated, one_shape
        # Not a default argument, because Dynamo cannot trace an instance that it finds there.
        self.wire = AS_IT_IS if wire is None else wire
        self.sizes = [of.sizes(replicated=replicated) for of in rows]
        # A plan that is made while a graph is traced is used in this graph only, and no other one is.
        self._is_traced = torch.compiler.is_compiling()
        # If all parts are equal, the collective needs no sizes and is faster. Do not compare lengths while
        # tracing, because a comparison of symbolic lengths would add a guard.
        self._is_even = not self._is_traced and all(
            len(set(numbers)) == 1 for numbers in (*self.sizes, *[[count for _, count in of] for of in heads])
        )
        # In eager code the steps for each set of shapes. Lengths in a graph may be symbolic, and so no keys.
        self._steps: dict[Any, SwapSteps] = {}

    def exchange(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of the exchange of ``tensors``, after all ranks of the mesh dim have sent their
        parts. Collective.

        ``tensors`` are in the order of ``rows`` and ``heads``. All have one batch size, dtype and device, and
        all but the last have one width.
        """
        if self._is_traced:
            steps = self._plan(tensors)
        else:
            key: Any = torch.is_grad_enabled()
            if not self._one_shape:
                # Batch and numbers of heads are those of the first tensor or fixed by this object, as are the
                # numbers of tokens. Only the last tensor, the value, may have another width.
                first = tensors[0]
                key = (key, first.device, first.dtype, first.shape, tensors[-1].shape)
            cached_steps = self._steps.get(key)
            if cached_steps is None:
                cached_steps = self._steps[key] = self._plan(tensors)
            steps = cached_steps
        buffer = steps.pack(tensors)
        if self._is_even and not (buffer.requires_grad and torch.is_grad_enabled()):
            received = swap_evenly(buffer, self.dim)
        else:
            received = wait(start_all_to_all(buffer.view(-1), steps.send, steps.receive, self.dim))
        return steps.unpack(received, tensors)

    def _plan(self, tensors: Sequence[Tensor]) -> SwapSteps:
        """Return the steps for tensors with the shapes, the dtype and the device of ``tensors``."""
        shapes, dtype = [x.shape for x in tensors], tensors[0].dtype
        by_kernel = takes_kernels(tensors[0])
        padding = self.wire.row_padding
        widths = [shape[3] for shape in shapes]
        tables: list[list[int]] = []
        for index, width in enumerate(widths):
            fitting = [of for of in tables if widths[of[0]] == width and self.shares_tokens(of[0], index)]
            if fitting:
                fitting[0].append(index)
            else:
                tables.append([index])
        sizes = SwapSizes(shapes[0][0], widths, [width + padding for width in widths], tables)
        return self.plan_steps(sizes, dtype, by_kernel=by_kernel)

    def shares_tokens(self, index: int, other: int) -> bool:
        """Whether two tensors can share a table, because the same tokens of both are sent in the same order."""
        raise NotImplementedError

    def plan_steps(self, shapes: SwapSizes, dtype: torch.dtype, *, by_kernel: bool) -> SwapSteps:
        """Choose the cheapest way to pack and unpack tensors of these ``shapes``. ``by_kernel`` is what
        :func:`takes_kernels` says of them.
        """
        raise NotImplementedError

    def numel_of_token(self, table: Sequence[int], rank: int, shapes: SwapSizes) -> int:
        """Return the number of buffer elements of one token of ``table``, with the heads of ``rank``."""
        return shapes.batch * sum([self.heads[index][rank][1] * shapes.row_widths[index] for index in table])

    def numel_by_heads(self, shapes: SwapSizes) -> list[int]:
        """Return, for each rank, the number of buffer elements of this rank's tokens with the heads of that
        rank.
        """
        tokens = [self.sizes[table[0]][self.dim.index] for table in shapes.tables]
        return [
            sum(
                [
                    self.numel_of_token(table, rank, shapes) * count
                    for table, count in zip(shapes.tables, tokens, strict=True)
                ]
            )
            for rank in range(self.dim.size)
        ]

    def numel_by_tokens(self, shapes: SwapSizes) -> list[int]:
        """Return, for each rank, the number of buffer elements of that rank's tokens with the heads of this
        rank.
        """
        numels = [self.numel_of_token(table, self.dim.index, shapes) for table in shapes.tables]
        return [
            sum(
                [
                    numel * self.sizes[table[0]][rank]
                    for table, numel in zip(shapes.tables, numels, strict=True)
                ]
            )
            for rank in range(self.dim.size)
        ]

    def regions(
        self, shapes: SwapSizes, tokens: Sequence[Sequence[Sequence[Run]]], *, by_head: bool
    ) -> list[int]:
        """Return the regions of the buffer for a kernel, as one list of integers.

        Args:
            tokens: ``tokens[index][rank]`` are the runs of tokens of tensor ``index`` in the part of
                ``rank``.
            by_head: Whether the tensor has all heads, of which the part of a rank has those of ``rank``;
                otherwise it has this rank's heads only, and all parts have all of them.
        """
        regions, offset, index_of_rank = [], 0, self.dim.index
        for rank in range(self.dim.size):
            for table in shapes.tables:
                owner = index_of_rank
                if by_head:
                    owner = rank
                counts = [self.heads[index][owner][1] * shapes.row_widths[index] for index in table]
                step = sum(counts)
                for index, before in zip(table, starts_of(counts), strict=True):
                    first, count = self.heads[index][owner]
                    if not by_head:
                        first = 0
                    at = offset + before
                    for start, length in tokens[index][rank]:
                        regions.append(CopyRegion(index, start, length, first, count, at, step))
                        at += length * shapes.batch * step
                # All tensors of a table have the same tokens.
                offset += sum([length for _, length in tokens[table[0]][rank]]) * shapes.batch * step
        return as_numbers(regions)


def concatenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the concatenation of ``parts``: a single part itself, without a copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim)


# Most calls use the functions below: all ranks have equally many heads, and tokens arrive in order.


def pack_views(shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors by one concatenation of views. ``shapes`` are ``[B, ranks, heads, S, D]``."""
    views = [x.view(shape).permute(1, 3, 0, 2, 4) for x, shape in zip(tensors, shapes, strict=True)]
    if len(views) == 1:
        return views[0].contiguous()
    return torch.cat(views, 3)


def unpack_views(
    table: Sequence[int], heads: list[int], buffer: Tensor, _: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return views of the received table, ``[tokens, B, sum of heads, D]``; ``heads`` has one number per tensor."""
    blocks = buffer.view(table).permute(1, 2, 0, 3)
    # Use split_with_sizes(), because split() is implemented in Python and slower.
    if len(heads) == 1:
        return (blocks,)
    return blocks.split_with_sizes(heads, 1)


def pack_block(tensors: Sequence[Tensor]) -> Tensor:
    """Return the block ``[B, heads, S, D]`` token by token, which is a view if there is one sample."""
    return tensors[0].permute(2, 0, 1, 3).contiguous()


def unpack_even_heads(shape: Sequence[int], buffer: Tensor, _: Sequence[Tensor]) -> Sequence[Tensor]:
    """Bring the heads of all ranks together, with one copy, in the memory layout of SDPA's result.

    ``shape`` is that of the buffer, ``[ranks, S, B, heads, D]``.
    """
    ranks, tokens, batch, heads, width = shape
    parts = buffer.view(shape).permute(2, 1, 0, 3, 4)
    # Call contiguous(), because with one head per rank reshape() returns a view with another memory layout.
    return (parts.reshape(batch, tokens, ranks * heads, width).contiguous().transpose(1, 2),)
