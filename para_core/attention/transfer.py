"""An all-to-all of tensors ``[B, H, S, D]``, in which each peer gets some of the tokens and some of the heads.

:func:`_choose_packing` chooses once per set of shapes how tensors are packed: by one copy of a view, by a concatenation
of views, by one copy per group of equal peers, or by one operator that copies a list of regions. The last is a Triton
kernel on a GPU, and the only one that can round to 8 bits.

The number of launches does not depend on the number of ranks: one strided copy packs the slices of all peers that have
equal sizes. On a GPU with Triton, one kernel packs all slices of all tensors (:mod:`para_core.attention.pack_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.attention.pack_ops import as_numbers
from para_core.attention.peer_slices import PeerSlices, UniformPeers, group_uniform_peers
from para_core.distributed.cached_property import cached_property
from para_core.distributed.collectives import start_all_to_all, wait
from para_core.distributed.mesh import MeshDim
from para_core.kernels.pack_reference import SCALE_BYTES, CopyRegion
from para_core.triton_support import load_kernel

Pack = Callable[[Sequence[Tensor]], Tensor]
Unpack = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class _PeerView:
    """A view ``[peers, S, B, heads, D]`` of a tensor ``[B, H, S, D]`` that shows the slices of several uniform peers.

    :meth:`see` calls ``narrow`` with each of ``narrows``, ``view`` with ``shape`` (None for a single peer, whose view
    has no dim for peers), ``permute`` with ``order``, and ``expand`` to the ``copies`` peers that get the same slice.
    """

    narrows: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...] | None
    order: tuple[int, ...]
    copies: int

    @staticmethod
    def of(peers: UniformPeers, index: int, shape: Sequence[int]) -> _PeerView:
        """Return the view of tensor ``index`` of an exchange for ``peers``. This tensor has the given ``shape``."""
        (token, tokens, token_step), (head, heads, head_step) = peers.runs[2 * index : 2 * index + 2]
        number = peers.number
        runs = (
            (2, token, tokens * number if token_step else tokens),
            (1, head, heads * number if head_step else heads),
        )
        # Do not compare lengths while tracing, because a comparison of symbolic lengths would add a guard.
        traced = torch.compiler.is_compiling()
        narrows = tuple([run for run in runs if traced or shape[run[0]] != run[2]])
        batch, _, _, width = shape
        if token_step and number > 1:
            return _PeerView(narrows, (batch, heads, number, tokens, width), (2, 3, 0, 1, 4), 1)
        if head_step:
            return _PeerView(narrows, (batch, number, heads, tokens, width), (1, 3, 0, 2, 4), 1)
        return _PeerView(narrows, (batch, 1, heads, tokens, width), (1, 3, 0, 2, 4), number)

    def see(self, x: Tensor) -> Tensor:
        for narrow in self.narrows:
            x = x.narrow(*narrow)
        if self.shape is not None:
            x = x.view(self.shape)
        x = x.permute(self.order)
        return x if self.copies == 1 else x.expand(self.copies, -1, -1, -1, -1)


class _Steps(NamedTuple):
    """Pack, exchange and unpack for tensors of certain shapes; ``send`` and ``receive`` are elements per peer."""

    pack: Pack
    send: list[int]
    receive: list[int]
    unpack: Unpack


class SlicedAllToAll:
    """An all-to-all of tensors ``[B, H, S, D]``, in which each peer of ``dim`` gets one slice of each tensor.

    If the slices of all tensors for a peer contain the same tokens, they are packed as one table with a row per token,
    otherwise one slice after the other. If all slices have equal sizes, the collective needs no sizes and is faster.

    Args:
        sent, arriving: For each tensor or result, the slices of each peer. Where results overlap, they are summed.
        dim: The mesh dim of the peers.
        comm_dtype: The 8-bit dtype to which tensors are rounded for sending (not exact, without gradients, and only if
            slices do not overlap); None to send them unchanged.
    """

    def __init__(
        self,
        sent: Sequence[PeerSlices],
        arriving: Sequence[PeerSlices],
        dim: MeshDim,
        *,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.sent, self.arriving, self.dim, self.comm_dtype = sent, arriving, dim, comm_dtype
        runs = [runs for side in (sent, arriving) for slices in side for runs in (slices.tokens, slices.heads)]
        self.is_even = all(count == of_peers[0][1] for of_peers in runs for _, count in of_peers)
        self.one_table = all(slices.tokens == side[0].tokens for side in (sent, arriving) for slices in side)
        self._steps: dict[Any, _Steps] = {}

    @cached_property
    def groups(self) -> tuple[tuple[UniformPeers, ...], tuple[UniformPeers, ...]]:
        """The peers grouped by slices of equal size, ``(for sending, for receiving)``."""
        return self._groups(self.sent), self._groups(self.arriving)

    def _groups(self, side: Sequence[PeerSlices]) -> tuple[UniformPeers, ...]:
        tokens = side[0].tokens
        in_a_row = all(sum(run) == following[0] for run, following in pairwise(tokens))
        if self.one_table and in_a_row and all(run == slices.heads[0] for slices in side for run in slices.heads):
            # Treat all peers as one, because they have the same heads, and their tokens are consecutive both in the
            # tensor and in the buffer.
            whole = (tokens[0][0], sum([count for _, count in tokens]), 0)
            return (UniformPeers(1, tuple([run for slices in side for run in (whole, (*slices.heads[0], 0))])),)
        return group_uniform_peers([runs for slices in side for runs in (slices.tokens, slices.heads)])

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start the exchange, and return a function that waits for it and returns its results.

        A result is a view of the received buffer, or has the memory layout of SDPA's result, ``[B, S, H, D]``.
        """
        shapes = tuple([x.shape for x in tensors])
        kind = shapes, tensors[0].dtype, takes_kernels(tensors[0])
        steps = None if torch.compiler.is_compiling() else self._steps.get(kind)
        if steps is None:
            widths = [shape[3] + (0 if self.comm_dtype is None else SCALE_BYTES) for shape in shapes]
            send, receive = (self._sizes(side, shapes[0][0], widths) for side in (self.sent, self.arriving))
            pack, unpack = _choose_packing(self, shapes, widths, kind[1], sum(send), kind[2])
            steps = _Steps(pack, send, receive, unpack)
            # Only in eager code are lengths integers.
            if not torch.compiler.is_compiling():
                self._steps[kind] = steps
        buffer = steps.pack(tensors)
        if not self.is_even:
            buffer = buffer.view(-1)
        elif buffer.ndim == 1:
            buffer = buffer.view(self.dim.size, steps.send[0])
        started = start_all_to_all(buffer, steps.send, steps.receive, self.dim, even=self.is_even)
        return lambda: steps.unpack(wait(started))

    def _sizes(self, side: Sequence[PeerSlices], batch: int, widths: Sequence[int]) -> list[int]:
        """Return the number of buffer elements for each peer. ``widths[k]`` is that of tensor k per token and head."""
        pairs = list(zip(side, widths, strict=True))
        return [
            sum([batch * slices.tokens[peer][1] * slices.heads[peer][1] * width for slices, width in pairs])
            for peer in range(self.dim.size)
        ]


def takes_kernels(x: Tensor) -> bool:
    """Whether a Triton kernel packs ``x``: on CUDA, in eager code without gradients. Meta tensors count as CUDA."""
    if not (x.is_cuda or x.is_meta) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return load_kernel("pack", x.device) is not None


def _choose_packing(
    of: SlicedAllToAll,
    shapes: Sequence[Sequence[int]],
    widths: Sequence[int],
    dtype: torch.dtype,
    numel: int,
    by_kernel: bool,
) -> tuple[Pack, Unpack]:
    """Return ``(pack, unpack)``: functions that pack tensors into a buffer, and unpack the received buffer.

    Views are preferred, because a kernel could not do better than one strided copy or none. Peers with slices of
    different sizes, tensors of different widths and overlapping slices are copied region by region: by one kernel if
    ``by_kernel`` and possible, otherwise group by group. ``widths`` are the numbers of buffer elements per token and
    head of each tensor, and the packed buffer has ``numel`` elements.
    """
    out_groups, in_groups = of.groups
    rounds = of.comm_dtype is not None
    if rounds and any(slices.may_overlap for slices in of.arriving):
        raise ValueError("slices of several peers overlap in a result; only what travels unrounded can be added up.")
    same_width = of.one_table and all(width == widths[0] for width in widths)
    pack: Pack
    if rounds or (by_kernel and (len(shapes) > 1 or not (same_width and len(out_groups) == 1))):
        pack = partial(_pack_regions, _regions(of, of.sent, shapes, widths), numel, of.comm_dtype)
    elif same_width and len(out_groups) == 1:
        views = [_PeerView.of(out_groups[0], index, shape) for index, shape in enumerate(shapes)]
        if out_groups[0].number == 1:
            views = [_PeerView(view.narrows, None, (2, 0, 1, 3), view.copies) for view in views]
        pack = partial(_pack_views, views)
    else:
        pack = partial(_pack_groups, out_groups, of.one_table, same_width, numel)
    peers = in_groups[0]
    heads, (first_head, _, head_step) = [count for _, count, _ in peers.runs[1::2]], peers.runs[1]
    in_a_row = len(in_groups) == 1 and peers.number == 1
    by_views = in_a_row or (len(shapes) == 1 and first_head == 0 and head_step)
    if same_width and not rounds and len(in_groups) == 1 and by_views:
        table = (peers.number, peers.runs[0][1], shapes[0][0], sum(heads), widths[0])
        return pack, partial(_unpack_views, table, heads)
    if rounds or (by_kernel and not in_a_row and not any(slices.may_overlap for slices in of.arriving)):
        pairs = zip(shapes, of.arriving, strict=True)
        # B, H, S and D of each result.
        sizes = [size for shape, slices in pairs for size in (shape[0], *slices.output_size[::-1], shape[3])]
        return pack, partial(_unpack_regions, _regions(of, of.arriving, shapes, widths), sizes, of.comm_dtype, dtype)
    return pack, partial(_unpack_groups, in_groups, of.one_table, of.arriving, shapes)


def _pack_views(views: Sequence[_PeerView], tensors: Sequence[Tensor]) -> Tensor:
    """Pack all tensors with one copy: by copying one strided view, or by concatenating several views."""
    if len(views) == 1:
        return views[0].see(tensors[0]).contiguous()
    return torch.cat([view.see(x) for view, x in zip(views, tensors, strict=True)], dim=-2)


def _unpack_views(table: Sequence[int], heads: list[int], buffer: Tensor) -> Sequence[Tensor]:
    """Return the received tensors ``[B, heads, S, D]``: views of ``buffer``, or one copy if there are several peers.
    ``table`` is the shape of ``buffer``, ``[peers, S, B, sum of heads, D]``; ``heads`` has one number per tensor.
    """
    peers, tokens, batch, all_heads, width = table
    if peers == 1:
        rows = buffer.view(tokens, batch, all_heads, width).permute(1, 2, 0, 3)
        # Use split_with_sizes(), because split() is implemented in Python and slower.
        return (rows,) if len(heads) == 1 else rows.split_with_sizes(heads, 1)
    rows = buffer.view(peers, tokens, batch, all_heads, width).permute(2, 1, 0, 3, 4)
    # Call contiguous(), because with one head per peer reshape() returns a view with another memory layout.
    return (rows.reshape(batch, tokens, peers * all_heads, width).contiguous().transpose(1, 2),)


def _pack_groups(
    groups: Sequence[UniformPeers], one_table: bool, same_width: bool, numel: int, tensors: Sequence[Tensor]
) -> Tensor:
    """Pack with one copy per group of uniform peers, or per group and tensor if gradients are on or widths differ."""
    buffer = tensors[0].new_empty(numel)
    shapes = [x.shape for x in tensors]
    for peers, table, slots in _slots(buffer, groups, one_table, shapes):
        parts = [_PeerView.of(peers, index, x.shape).see(x) for index, x in enumerate(tensors)]
        if same_width and not torch.is_grad_enabled():
            heads, width = sum([part.shape[3] for part in parts]), parts[0].shape[4]
            torch.cat(parts, dim=3, out=table.view(*table.shape[:3], heads, width))
            continue
        for slot, part in zip(slots, parts, strict=True):
            slot.copy_(part)
    return buffer


def _unpack_groups(
    groups: Sequence[UniformPeers],
    one_table: bool,
    arriving: Sequence[PeerSlices],
    shapes: Sequence[Sequence[int]],
    buffer: Tensor,
) -> list[Tensor]:
    """Unpack with one copy per tensor and group of uniform peers. Overlapping slices are summed."""
    buffer = buffer.view(-1)
    slots_of = [(peers, list(slots)) for peers, _, slots in _slots(buffer, groups, one_table, shapes)]
    if len(groups) == 1 and groups[0].number == 1:
        return [slot[0].permute(1, 2, 0, 3) for slot in slots_of[0][1]]
    results = []
    for index, (slices, shape) in enumerate(zip(arriving, shapes, strict=True)):
        tokens, heads = slices.output_size
        make = buffer.new_empty if slices.cover_output else buffer.new_zeros
        result = make(shape[0], tokens, heads, shape[3]).transpose(1, 2)
        for peers, slots in slots_of:
            target = _PeerView.of(peers, index, result.shape).see(result)
            if slices.cover_output:
                target.copy_(slots[index])
            else:
                for peer in range(peers.number):
                    target[peer].add_(slots[index][peer])
        results.append(result)
    return results


def _slots(
    buffer: Tensor, groups: Sequence[UniformPeers], one_table: bool, shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[UniformPeers, Tensor, Iterable[Tensor]]]:
    """Yield ``(group, part, views)`` for each group of peers: the group's part of the buffer, and an iterator of one
    view ``[peers, S, B, heads, D]`` of this part per tensor.
    """
    batch, offset = shapes[0][0], 0
    for peers in groups:
        sizes = [
            (peers.number, tokens, batch, heads, shape[3])
            for (_, tokens, _), (_, heads, _), shape in zip(peers.runs[::2], peers.runs[1::2], shapes, strict=True)
        ]
        rows = [prod(size[3:]) if one_table else prod(size[1:]) for size in sizes]
        lines = sizes[0][:3] if one_table else (peers.number,)
        table = buffer.narrow(0, offset, prod(lines) * sum(rows)).view(*lines, sum(rows))
        offset += table.numel()
        starts = accumulate(rows, initial=0)
        # Create each view only when it is used: autograd forbids writing to a view that is older than the last change
        # of its base.
        slots = (table.narrow(-1, *run).view(size) for *run, size in zip(starts, rows, sizes, strict=False))
        yield peers, table, slots


def _pack_regions(regions: list[int], numel: int, to: torch.dtype | None, tensors: Sequence[Tensor]) -> Tensor:
    packed: Tensor = torch.ops.para_core.pack.default(list(tensors), regions, numel, to)
    return packed


def _unpack_regions(
    regions: list[int], sizes: list[int], of: torch.dtype | None, dtype: torch.dtype, buffer: Tensor
) -> Sequence[Tensor]:
    tensors: Sequence[Tensor] = torch.ops.para_core.unpack.default(buffer.view(-1), regions, sizes, of, dtype)
    return tensors


def _regions(
    of: SlicedAllToAll, side: Sequence[PeerSlices], shapes: Sequence[Sequence[int]], widths: Sequence[int]
) -> list[int]:
    """Return the regions of the buffer for the slices of ``side``, as :class:`CopyRegion` values in one flat list."""
    regions, offset, batch = [], 0, shapes[0][0]
    for peer in range(of.dim.size):
        rows = [slices.heads[peer][1] * width for slices, width in zip(side, widths, strict=True)]
        for index, (slices, row) in enumerate(zip(side, rows, strict=True)):
            runs = (*slices.tokens[peer], *slices.heads[peer])
            if of.one_table:
                regions.append(CopyRegion(index, *runs, offset + sum(rows[:index]), sum(rows)))
            else:
                regions.append(CopyRegion(index, *runs, offset, row))
                offset += batch * slices.tokens[peer][1] * row
        if of.one_table:
            offset += batch * side[0].tokens[peer][1] * sum(rows)
    return as_numbers(regions)
