"""One all-to-all of tensors ``[B, H, S, D]``, of which each peer gets a run of the tokens and a run of the heads.

Launches, whatever the number of ranks: peers with equally large parts are served by one strided copy. On a GPU with Triton all
peers and tensors are served by one kernel (:mod:`para_core.attention.pack_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.attention.approximate.wire import row_bytes
from para_core.attention.pack_ops import as_numbers
from para_core.distributed.collectives import Travelling, start_all_to_all, wait
from para_core.distributed.layout import Run
from para_core.distributed.lazy import lazy
from para_core.distributed.mesh import MeshDim
from para_core.kernels.exchange_reference import CopyRegion
from para_core.triton_support import load_kernel


@dataclass(frozen=True)
class Share:
    """What each peer gets of a tensor ``[B, H, S, D]``, or gives for it: a run of the tokens and a run of the heads."""

    tokens: tuple[Run, ...]
    heads: tuple[Run, ...]


@dataclass(frozen=True)
class Alike:
    """Consecutive peers with equally large shares, which begin at equal distances.

    Args:
        runs: tokens and heads of the first tensor, then of the second, …, as ``(first, count, step)``: the i-th of these peers has
            ``count`` from first + i · step on; step is ``count``, or 0 where all have the same.
    """

    number: int
    runs: tuple[tuple[int, int, int], ...]


def alike(runs: Sequence[Sequence[Run]]) -> tuple[Alike, ...]:
    """The peers, in groups of such as are :class:`Alike`; ``runs`` holds, of each kind, the run of each peer.

    >>> alike([[(0, 2), (2, 2), (4, 1)]])
    (Alike(number=2, runs=((0, 2, 2),)), Alike(number=1, runs=((4, 1, 1),)))
    """
    found: list[Alike] = []
    for of_peer in zip(*runs, strict=True):
        if found and (steps := _steps(found[-1], of_peer)) is not None:
            last = found[-1]
            grown = tuple([(first, count, step) for (first, count, _), step in zip(last.runs, steps, strict=True)])
            found[-1] = Alike(last.number + 1, grown)
        else:
            found.append(Alike(1, tuple([(start, count, count) for start, count in of_peer])))
    return tuple(found)


def _steps(before: Alike, of_peer: Sequence[Run]) -> list[int] | None:
    """The steps of ``before`` with one peer more; None if that one differs."""
    steps = []
    for (first, count, step), (start, number) in zip(before.runs, of_peer, strict=True):
        possible = (count, 0) if before.number == 1 else (step,)
        fitting = [one for one in possible if start == first + before.number * one]
        if number != count or not fitting:
            return None
        steps.append(fitting[0])
    return steps


@dataclass(frozen=True)
class _Part:
    """How to see in ``[B, H, S, D]`` what each of some peers has of it: a view ``[peers, S, B, heads, D]``.

    ``shape`` and ``order`` as ``view`` and ``permute`` take them; no shape: of one peer, without its dim.
    """

    narrows: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...] | None
    order: tuple[int, ...]
    copies: int

    @staticmethod
    def of(peers: Alike, place: int, shape: Sequence[int]) -> _Part:
        """Of the ``place``-th tensor, which has this shape."""
        (token, tokens, token_step), (head, heads, head_step) = peers.runs[2 * place : 2 * place + 2]
        number = peers.number
        runs = (
            (2, token, tokens * number if token_step else tokens),
            (1, head, heads * number if head_step else heads),
        )
        # Whether a symbolic length is that of a dim is not asked.
        traced = torch.compiler.is_compiling()
        narrows = tuple([run for run in runs if traced or shape[run[0]] != run[2]])
        batch, _, _, width = shape
        if token_step and number > 1:
            return _Part(narrows, (batch, heads, number, tokens, width), (2, 3, 0, 1, 4), 1)
        if head_step:
            return _Part(narrows, (batch, number, heads, tokens, width), (1, 3, 0, 2, 4), 1)
        return _Part(narrows, (batch, 1, heads, tokens, width), (1, 3, 0, 2, 4), number)

    def see(self, x: Tensor) -> Tensor:
        for narrow in self.narrows:
            x = x.narrow(*narrow)
        if self.shape is not None:
            x = x.view(self.shape)
        x = x.permute(self.order)
        return x if self.copies == 1 else x.expand(self.copies, -1, -1, -1, -1)


class _Regions(NamedTuple):
    """What :mod:`para_core.attention.pack_ops` takes: of what is sent, of what arrives (None where shares overlap in a result), and the
    shapes of the results."""

    sent: list[int]
    arriving: list[int] | None
    shapes: list[int]


@dataclass(frozen=True)
class _Sizes:
    """What follows from the shapes of the tensors of a transfer.

    Args:
        send, receive: elements to and from each peer.
        at_once: all tensors are one table of one width.
        parts: what is sent, where one operator packs it.
        arriving: the shape of what arrives, where it is a result as it lies, or but for the order of its dims:
            ``[peers, S, B, heads of all tensors, D]``.
        heads: in it, of each tensor.
        regions: the same for kernels; None while a graph is traced, where lengths may be symbolic.
    """

    send: list[int]
    receive: list[int]
    at_once: bool
    parts: list[_Part] | None
    arriving: tuple[int, ...] | None
    heads: list[int]
    regions: _Regions | None


class Transfer:
    """One all-to-all of tensors ``[B, H, S, D]``, of which each peer of ``dim`` gets its share.

    Shares of the same tokens travel as columns of one table, others one behind the other.

    Args:
        sent, arriving: of each tensor, what goes to each peer of what this rank holds, and what of the result comes from each.
            Where the shares of several peers overlap in a result, they add up.
        comm_dtype: not exact: what travels is rounded to it, as :mod:`para_core.attention.approximate.wire` says; of shares that do not
            overlap in a result, and without a gradient.
    """

    def __init__(
        self, sent: Sequence[Share], arriving: Sequence[Share], dim: MeshDim, *, comm_dtype: torch.dtype | None = None
    ) -> None:
        self._sent, self._arriving, self._dim = sent, arriving, dim
        self._comm_dtype = comm_dtype
        sides = (sent, arriving)
        self._one_table = all(one.tokens == side[0].tokens for side in sides for one in side)
        self._out, self._in = (self._groups(side) for side in sides)
        runs = [runs for side in sides for one in side for runs in (one.tokens, one.heads)]
        self._even = all(count == one[0][1] for one in runs for _, count in one)
        self._arrives_in_a_row = len(self._in) == 1 and self._in[0].number == 1
        self._known: dict[Any, _Sizes] = {}

    def _groups(self, side: Sequence[Share]) -> tuple[Alike, ...]:
        tokens = side[0].tokens
        in_a_row = all(sum(one) == following[0] for one, following in pairwise(tokens))
        if self._one_table and in_a_row and all(run == one.heads[0] for one in side for run in one.heads):
            # In the buffer, too, all tokens are in a row: no matter whose.
            whole = (tokens[0][0], sum([count for _, count in tokens]), 0)
            return (Alike(1, tuple([run for one in side for run in (whole, (*one.heads[0], 0))])),)
        return alike([runs for one in side for runs in (one.tokens, one.heads)])

    @lazy
    def _rooms(self) -> list[tuple[int, int, int]]:
        """Of each result, as :func:`_room` says."""
        return [_room(one) for one in self._arriving]

    @lazy
    def _overlap(self) -> bool:
        """Whether several peers may give the same heads of the same tokens of a result."""
        return not all(_apart(one.tokens) or _apart(one.heads) for one in self._arriving)

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Begin it; what is returned waits, and gives the result of each tensor.

        A result is a view of what arrived, or lies in memory as SDPA's does, ``[B, S, H, D]``.
        """
        if self._comm_dtype is not None:
            return self._start_rounded(tensors, self._comm_dtype)
        sizes = self._sizes_of(tuple([x.shape for x in tensors]))
        fused = sizes.regions if takes_kernels(tensors[0]) else None
        if fused is not None and (sizes.parts is None or len(tensors) > 1):
            buffer = torch.ops.para_core.pack.default(list(tensors), fused.sent, sum(sizes.send))
            if self._even:
                buffer = buffer.view(self._dim.size, sizes.send[0])
        elif sizes.parts is None:
            buffer = self._pack(tensors, sizes)
        elif len(tensors) == 1:
            buffer = sizes.parts[0].see(tensors[0]).contiguous()
        else:
            buffer = torch.cat([part.see(x) for part, x in zip(sizes.parts, tensors, strict=True)], dim=-2)
        if not self._even:
            buffer = buffer.view(-1)
        started = start_all_to_all(buffer, sizes.send, sizes.receive, self._dim, even=self._even)
        if sizes.arriving is None and fused is not None and fused.arriving is not None and not self._arrives_in_a_row:
            into = fused.arriving, fused.shapes
            return lambda: torch.ops.para_core.unpack.default(wait(started).view(-1), *into)
        if sizes.arriving is None:
            return lambda: self._unpack(wait(started).view(-1), tensors)
        return partial(_as_it_lies, started, sizes.arriving, sizes.heads)

    def _start_rounded(self, tensors: Sequence[Tensor], to: torch.dtype) -> Callable[[], Sequence[Tensor]]:
        shapes, dtype = tuple([x.shape for x in tensors]), tensors[0].dtype
        sizes = self._sizes_of(shapes)
        regions = sizes.regions or self._regions(shapes)
        arriving, into = regions.arriving, regions.shapes
        if arriving is None:
            raise ValueError(
                "shares of several peers overlap in a result, and only what travels as it is can be added up."
            )
        buffer = torch.ops.para_core.pack_8_bits.default(list(tensors), regions.sent, sum(sizes.send), to)
        if self._even:
            buffer = buffer.view(self._dim.size, sizes.send[0])
        started = start_all_to_all(buffer, sizes.send, sizes.receive, self._dim, even=self._even)
        return lambda: torch.ops.para_core.unpack_8_bits.default(wait(started).view(-1), arriving, into, to, dtype)

    def _sizes_of(self, shapes: tuple[Sequence[int], ...]) -> _Sizes:
        """Found once for tensors of the same shapes."""
        if torch.compiler.is_compiling():
            return self._find_sizes(shapes)
        found = self._known.get(shapes)
        if found is None:
            found = self._known[shapes] = self._find_sizes(shapes)
        return found

    def _find_sizes(self, shapes: Sequence[Sequence[int]]) -> _Sizes:
        batch, widths = shapes[0][0], [self._width(shape) for shape in shapes]
        send, receive = (
            [
                sum([batch * one.tokens[peer][1] * one.heads[peer][1] * d for one, d in zip(side, widths, strict=True)])
                for peer in range(self._dim.size)
            ]
            for side in (self._sent, self._arriving)
        )
        at_once = self._one_table and all(width == widths[0] for width in widths)
        parts, arriving, heads = None, None, []
        if at_once and len(self._out) == 1:
            parts = [_Part.of(self._out[0], place, shape) for place, shape in enumerate(shapes)]
            if self._out[0].number == 1:
                parts = [replace(part, shape=None, order=(2, 0, 1, 3)) for part in parts]
        if at_once and len(self._in) == 1:
            (peers,) = self._in
            heads = [count for _, count, _ in peers.runs[1::2]]
            first, _, step = peers.runs[1]
            if peers.number == 1 or (len(shapes) == 1 and first == 0 and step):
                arriving = (peers.number, peers.runs[0][1], batch, sum(heads), widths[0])
        regions = None if torch.compiler.is_compiling() else self._regions(shapes)
        return _Sizes(send, receive, at_once, parts, arriving, heads, regions)

    def _width(self, shape: Sequence[int]) -> int:
        """Elements of the buffer for a token and head of a tensor of this shape."""
        return shape[3] if self._comm_dtype is None else row_bytes(shape[3])

    def _regions(self, shapes: Sequence[Sequence[int]]) -> _Regions:
        found = [
            (shape[0], heads, tokens, shape[3]) for shape, (tokens, heads, _) in zip(shapes, self._rooms, strict=True)
        ]
        sent, arriving = (as_numbers(self._regions_of(side, shapes)) for side in (self._sent, self._arriving))
        return _Regions(sent, None if self._overlap else arriving, list(chain.from_iterable(found)))

    def _regions_of(self, side: Sequence[Share], shapes: Sequence[Sequence[int]]) -> list[CopyRegion]:
        """Where in the buffer what goes to each peer, or comes from it, is: as :meth:`_slots` says."""
        found, offset, batch = [], 0, shapes[0][0]
        widths = [self._width(shape) for shape in shapes]
        for peer in range(self._dim.size):
            rows = [one.heads[peer][1] * width for one, width in zip(side, widths, strict=True)]
            for place, (one, row) in enumerate(zip(side, rows, strict=True)):
                runs = (*one.tokens[peer], *one.heads[peer])
                if self._one_table:
                    found.append(CopyRegion(place, *runs, offset + sum(rows[:place]), sum(rows)))
                else:
                    found.append(CopyRegion(place, *runs, offset, row))
                    offset += batch * one.tokens[peer][1] * row
            if self._one_table:
                offset += batch * side[0].tokens[peer][1] * sum(rows)
        return found

    def _pack(self, tensors: Sequence[Tensor], sizes: _Sizes) -> Tensor:
        buffer = tensors[0].new_empty(sum(sizes.send))
        for peers, table, slots in self._slots(buffer, self._out, tensors):
            parts = [_Part.of(peers, place, x.shape).see(x) for place, x in enumerate(tensors)]
            if sizes.at_once and not torch.is_grad_enabled():
                heads, width = sum([part.shape[3] for part in parts]), parts[0].shape[4]
                torch.cat(parts, dim=3, out=table.view(*table.shape[:3], heads, width))
                continue
            for slot, part in zip(slots, parts, strict=True):
                slot.copy_(part)
        return buffer

    def _slots(
        self, buffer: Tensor, groups: Sequence[Alike], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Alike, Tensor, Iterable[Tensor]]]:
        """Of each group of peers its part of the buffer, and where in it the tensors stand: views ``[peers, S, B, heads, D]``."""
        batch, offset = tensors[0].shape[0], 0
        for peers in groups:
            shapes = [
                (peers.number, tokens, batch, heads, x.shape[3])
                for (_, tokens, _), (_, heads, _), x in zip(peers.runs[::2], peers.runs[1::2], tensors, strict=True)
            ]
            rows = [prod(shape[3:]) if self._one_table else prod(shape[1:]) for shape in shapes]
            lines = shapes[0][:3] if self._one_table else (peers.number,)
            table = buffer.narrow(0, offset, prod(lines) * sum(rows)).view(*lines, sum(rows))
            offset += table.numel()
            starts = accumulate(rows, initial=0)
            # One by one: autograd allows no change of a view that is older than a change of its base.
            slots = (table.narrow(-1, *run).view(shape) for *run, shape in zip(starts, rows, shapes, strict=False))
            yield peers, table, slots

    def _unpack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        groups = [(peers, list(slots)) for peers, _, slots in self._slots(buffer, self._in, tensors)]
        if self._arrives_in_a_row:
            return [slot[0].permute(1, 2, 0, 3) for slot in groups[0][1]]
        found = []
        for place, ((tokens, heads, covered), x) in enumerate(zip(self._rooms, tensors, strict=True)):
            apart = covered == tokens * heads
            make = buffer.new_empty if apart else buffer.new_zeros
            result = make(x.shape[0], tokens, heads, x.shape[3]).transpose(1, 2)
            for peers, slots in groups:
                target = _Part.of(peers, place, result.shape).see(result)
                if apart:
                    target.copy_(slots[place])
                else:
                    for index in range(peers.number):
                        target[index].add_(slots[place][index])
            found.append(result)
        return found


def takes_kernels(x: Tensor) -> bool:
    """Whether one launch packs, and unpacks: where no gradient and no graph follows what it does. Meta tensors stand for CUDA's."""
    if not (x.is_cuda or x.is_meta) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return load_kernel("exchange", x.device) is not None


def _room(one: Share) -> tuple[int, int, int]:
    """Tokens and heads of a result, and how many heads of tokens arrive for it: more where shares overlap."""
    tokens, heads = (max([sum(run) for run in runs]) for runs in (one.tokens, one.heads))
    return tokens, heads, sum([run[1] * other[1] for run, other in zip(one.tokens, one.heads, strict=True)])


def _apart(runs: Sequence[Run]) -> bool:
    """Whether no two have a place in common."""
    held = sorted([run for run in runs if run[1]])
    return all(one[0] + one[1] <= following[0] for one, following in pairwise(held))


def _as_it_lies(started: Travelling, shape: tuple[int, ...], heads: Sequence[int]) -> Sequence[Tensor]:
    """``[B, H, S, D]`` of each tensor, of what arrives as :class:`_Sizes` says."""
    peers, tokens, batch, all_heads, width = shape
    if peers == 1:
        rows = wait(started).view(shape[1:]).permute(1, 2, 0, 3)
        # Not split(), a method of Python's.
        return (rows,) if len(heads) == 1 else rows.split_with_sizes(heads, 1)
    rows = wait(started).view(shape).permute(2, 1, 0, 3, 4)
    # Of one head per peer reshape() gives a view, which lies in another way.
    return (rows.reshape(batch, tokens, peers * all_heads, width).contiguous().transpose(1, 2),)
