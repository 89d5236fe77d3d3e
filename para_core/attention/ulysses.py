"""Ulysses: trade a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Per attention call one all-to-all in, for query, key and value together, and one out. With ``n`` ranks, S_r tokens and
H_r heads on rank r, and e bytes per element, rank r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split as ``torch.tensor_split`` does; a rank gets the key heads that its query heads see, so that where there are
fewer of them than ranks, several get the same one. A replicated segment is not sent on the way in: each rank takes its
own heads of it; only its output is gathered over heads.

Launches, whatever the number of ranks: peers with equally large parts are served by one strided copy. Where heads and tokens
divide: one concatenation in, one copy out and, with more than one sample, one before it.

Backward, both all-to-alls are transposed: the gradient of the output comes in (with that of replicated tokens, once per
rank), those of query, key and value go out together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from para_core.collectives import Travelling, start_all_to_all, wait
from para_core.layout import Run, Segment, SequenceLayout
from para_core.lazy import lazy
from para_core.mesh import MeshDim, SequenceMesh

# Waits for what has been started, and returns it.
Finish = Callable[[], Tensor]


@dataclass(frozen=True)
class Heads:
    """Which query heads, and which key heads, each of ``ranks`` Ulysses ranks computes, as ``(start, count)``.

    ``chunk`` of ``chunks``: only a part of each rank's heads, for what is computed while the next part travels.
    """

    num_heads: int
    num_kv_heads: int
    ranks: int
    chunk: int = 0
    chunks: int = 1

    @lazy
    def of_query(self) -> tuple[Run, ...]:
        """As ``torch.tensor_split`` cuts, over the ranks and then into chunks."""
        found = []
        for rank in range(self.ranks):
            start, count = Segment("heads", self.num_heads).runs(rank, self.ranks)[0]
            offset, part = Segment("heads", count).runs(self.chunk, self.chunks)[0]
            found.append((start + offset, part))
        return tuple(found)

    @lazy
    def of_key(self) -> tuple[Run, ...]:
        """The key heads that the query heads of each rank see; neighbours may share one."""
        if self.num_kv_heads == self.num_heads:
            return self.of_query
        group = self.num_heads // self.num_kv_heads
        return tuple(
            [
                (start // group, -(-(start + count) // group) - start // group if count else 0)
                for start, count in self.of_query
            ]
        )

    def cut(self, chunks: int) -> list[Heads]:
        """The same heads in ``chunks`` parts."""
        return [replace(self, chunk=chunk, chunks=chunks) for chunk in range(chunks)]

    def is_grouped(self, rank: int) -> bool:
        """Whether on ``rank`` the i-th key head is that of the i-th group of equally many query heads."""
        (start, count), (_, num_keys) = self.of_query[rank], self.of_key[rank]
        group = self.num_heads // self.num_kv_heads if self.num_kv_heads else 1
        return start % group == 0 and count == num_keys * group

    def key_of_each_query(self, rank: int, device: torch.device) -> Tensor | None:
        """For each query head of ``rank`` its key head, both counted on that rank; None if they are grouped evenly."""
        if self.is_grouped(rank):
            return None
        (start, count), (first_key, _) = self.of_query[rank], self.of_key[rank]
        group = self.num_heads // self.num_kv_heads
        return torch.arange(start, start + count, device=device) // group - first_key


# -- one all-to-all


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
    def of(peers: Alike, place: int, x: Tensor) -> _Part:
        """Of the ``place``-th tensor, which has the shape of ``x``."""
        (token, tokens, token_step), (head, heads, head_step) = peers.runs[2 * place : 2 * place + 2]
        number = peers.number
        runs = (
            (2, token, tokens * number if token_step else tokens),
            (1, head, heads * number if head_step else heads),
        )
        # Whether a symbolic length is that of a dim is not asked.
        traced = torch.compiler.is_compiling()
        narrows = tuple([run for run in runs if traced or x.shape[run[0]] != run[2]])
        batch, width = x.shape[0], x.shape[3]
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
    """

    send: list[int]
    receive: list[int]
    at_once: bool
    parts: list[_Part] | None
    arriving: tuple[int, ...] | None
    heads: list[int]


class Transfer:
    """One all-to-all of tensors ``[B, H, S, D]``, of which each peer of ``dim`` gets its share.

    Shares of the same tokens travel as columns of one table, others one behind the other.

    Args:
        sent, arriving: of each tensor, what goes to each peer of what this rank holds, and what of the result comes from each.
            Where the shares of several peers overlap in a result, they add up.
    """

    def __init__(self, sent: Sequence[Share], arriving: Sequence[Share], dim: MeshDim) -> None:
        self._sent, self._arriving, self._dim = sent, arriving, dim
        sides = (sent, arriving)
        self._one_table = all(one.tokens == side[0].tokens for side in sides for one in side)
        self._out, self._in = (self._groups(side) for side in sides)
        runs = [runs for side in sides for one in side for runs in (one.tokens, one.heads)]
        self._even = all(count == one[0][1] for one in runs for _, count in one)
        self._known: dict[Any, _Sizes] = {}

    def _groups(self, side: Sequence[Share]) -> tuple[Alike, ...]:
        tokens = side[0].tokens
        in_a_row = all(sum(one) == following[0] for one, following in pairwise(tokens))
        if self._one_table and in_a_row and all(run == one.heads[0] for one in side for run in one.heads):
            # In the buffer, too, all tokens are in a row: no matter whose.
            whole = (tokens[0][0], sum([count for _, count in tokens]), 0)
            return (Alike(1, tuple([run for one in side for run in (whole, (*one.heads[0], 0))])),)
        return alike([runs for one in side for runs in (one.tokens, one.heads)])

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Begin it; what is returned waits, and gives the result of each tensor.

        A result is a view of what arrived, or lies in memory as SDPA's does, ``[B, S, H, D]``.
        """
        sizes = self._sizes_of(tensors)
        if sizes.parts is None:
            buffer = self._pack(tensors, sizes)
        elif len(tensors) == 1:
            buffer = sizes.parts[0].see(tensors[0]).contiguous()
        else:
            buffer = torch.cat([part.see(x) for part, x in zip(sizes.parts, tensors, strict=True)], dim=-2)
        if not self._even:
            buffer = buffer.view(-1)
        started = start_all_to_all(buffer, sizes.send, sizes.receive, self._dim, even=self._even)
        if sizes.arriving is None:
            return lambda: self._unpack(wait(started).view(-1), tensors)
        return partial(_as_it_lies, started, sizes.arriving, sizes.heads)

    def _sizes_of(self, tensors: Sequence[Tensor]) -> _Sizes:
        """Found once for tensors of the same shapes."""
        if torch.compiler.is_compiling():
            return self._find_sizes(tensors)
        shapes = tuple([x.shape for x in tensors])
        found = self._known.get(shapes)
        if found is None:
            found = self._known[shapes] = self._find_sizes(tensors)
        return found

    def _find_sizes(self, tensors: Sequence[Tensor]) -> _Sizes:
        batch, widths = tensors[0].shape[0], [x.shape[3] for x in tensors]
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
            parts = [_Part.of(self._out[0], place, x) for place, x in enumerate(tensors)]
            if self._out[0].number == 1:
                parts = [replace(part, shape=None, order=(2, 0, 1, 3)) for part in parts]
        if at_once and len(self._in) == 1:
            (peers,) = self._in
            heads = [count for _, count, _ in peers.runs[1::2]]
            first, _, step = peers.runs[1]
            if peers.number == 1 or (len(tensors) == 1 and first == 0 and step):
                arriving = (peers.number, peers.runs[0][1], batch, sum(heads), widths[0])
        return _Sizes(send, receive, at_once, parts, arriving, heads)

    def _pack(self, tensors: Sequence[Tensor], sizes: _Sizes) -> Tensor:
        buffer = tensors[0].new_empty(sum(sizes.send))
        for peers, table, slots in self._slots(buffer, self._out, tensors):
            parts = [_Part.of(peers, place, x).see(x) for place, x in enumerate(tensors)]
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
        if len(groups) == 1 and groups[0][0].number == 1:
            return [slot[0].permute(1, 2, 0, 3) for slot in groups[0][1]]
        found = []
        for place, (one, x) in enumerate(zip(self._arriving, tensors, strict=True)):
            tokens, heads = (max([sum(run) for run in runs]) for runs in (one.tokens, one.heads))
            apart = sum([run[1] * other[1] for run, other in zip(one.tokens, one.heads, strict=True)]) == tokens * heads
            make = buffer.new_empty if apart else buffer.new_zeros
            result = make(x.shape[0], tokens, heads, x.shape[3]).transpose(1, 2)
            for peers, slots in groups:
                target = _Part.of(peers, place, result).see(result)
                if apart:
                    target.copy_(slots[place])
                else:
                    for index in range(peers.number):
                        target[index].add_(slots[place][index])
            found.append(result)
        return found


def _as_it_lies(started: Travelling, shape: tuple[int, ...], heads: Sequence[int]) -> Sequence[Tensor]:
    """``[B, H, S, D]`` of each tensor, of what arrives as :class:`_Sizes` says."""
    peers, tokens, batch, all_heads, width = shape
    if peers == 1:
        rows = wait(started).view(shape[1:]).permute(1, 2, 0, 3)
        # Not split(), a method of Python's.
        return (rows,) if len(heads) == 1 else rows.split_with_sizes(heads, 1)
    rows = wait(started).view(shape).permute(2, 1, 0, 3, 4)
    return (rows.reshape(batch, tokens, peers * all_heads, width).transpose(1, 2),)


# -- one attention call


class Exchange:
    """The all-to-alls of one call, forward and backward: all sizes, computed once.

    A block is what a Ulysses group holds together: its ranks' sharded tokens, then the replicated ones.

    Args:
        extra_tokens: of each rank and sharded tensor, beside those that the layouts know; they travel behind its own.
    """

    def __init__(
        self,
        query_layout: SequenceLayout,
        key_layout: SequenceLayout,
        mesh: SequenceMesh,
        heads: Heads,
        *,
        extra_tokens: int = 0,
    ) -> None:
        self.query_layout, self.key_layout = query_layout, key_layout
        self.mesh, self.heads = mesh, heads
        self._extra_tokens = extra_tokens
        # Of query, key and value.
        self._layouts = (query_layout, key_layout, key_layout)
        self._heads = (heads.of_query, heads.of_key, heads.of_key)
        self._replicates = bool(query_layout.replicated or key_layout.replicated)

    def token_sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Sharded tokens of each rank of the Ulysses group."""
        first = self.mesh.ring.index * self.mesh.ulysses.size
        return tuple([layout.sharded_size(rank) for rank in range(first, first + self.mesh.ulysses.size)])

    def block_size(self, layout: SequenceLayout) -> int:
        """Tokens of a block, the replicated ones among them."""
        return sum(self.token_sizes(layout)) + num_replicated(layout)

    def token_runs(self, layout: SequenceLayout) -> tuple[Run, ...]:
        """Where in a block each peer's own tokens are."""
        sizes = [size + self._extra_tokens for size in self.token_sizes(layout)]
        return tuple(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))

    def _of_all(self, run: Run) -> tuple[Run, ...]:
        return (run,) * self.mesh.ulysses.size

    def tokens_to_heads(self, layouts: Sequence[SequenceLayout], heads: Sequence[tuple[Run, ...]]) -> Transfer:
        """Of sharded tokens ``[B, H, S_local, D]`` to ``[B, H_local, sharded tokens of the block, D]``."""
        index, tokens = self.mesh.ulysses.index, [self.token_runs(layout) for layout in layouts]
        sent = [Share(self._of_all((0, runs[index][1])), one) for runs, one in zip(tokens, heads, strict=True)]
        arriving = [Share(runs, self._of_all((0, one[index][1]))) for runs, one in zip(tokens, heads, strict=True)]
        return Transfer(sent, arriving, self.mesh.ulysses)

    # -- in

    @lazy
    def _entering(self) -> Transfer:
        return self.tokens_to_heads(self._layouts, self._heads)

    def start_enter(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Sequence[Tensor]]:
        """``[B, H, S_local, D]`` each to ``[B, H_local, S_block, D]``."""
        if not self._replicates:
            return self._entering.start((query, key, value))
        sharded, texts = zip(*self.by_kind(query, key, value), strict=True)
        finish = self._entering.start(sharded)
        return lambda: self.with_replicated(finish(), texts)

    def start_enter_sharded(self, *sharded: Tensor) -> Callable[[], Sequence[Tensor]]:
        """The same of sharded tokens alone."""
        return self._entering.start(sharded)

    def by_kind(self, *tensors: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Sharded and replicated tokens of query, key and value."""
        return [split_by_kind(x, layout, self.mesh.rank) for x, layout in zip(tensors, self._layouts, strict=True)]

    def with_replicated(self, blocks: Sequence[Tensor], texts: Sequence[Tensor | None]) -> list[Tensor]:
        """Blocks of query, key and value, with this rank's heads of the replicated tokens behind the sharded ones."""
        index = self.mesh.ulysses.index
        return [
            block if text is None else torch.cat([block, text.narrow(1, *heads[index])], dim=2)
            for block, text, heads in zip(blocks, texts, self._heads, strict=True)
        ]

    # -- out

    @lazy
    def _leaving(self) -> Transfer:
        layout = self.query_layout
        return self.heads_to_tokens(num_replicated(layout) if layout.replicated else None)

    def heads_to_tokens(self, num_common: int | None) -> Transfer:
        """Of a block ``[B, H_local, S_block, D_v]`` each peer's own tokens; of the same again, the ``num_common`` behind all of them."""
        own, heads = self.token_runs(self.query_layout), self.heads.of_query
        index = self.mesh.ulysses.index
        mine = self._of_all((0, heads[index][1]))
        sent, arriving = [Share(own, mine)], [Share(self._of_all((0, own[index][1])), heads)]
        if num_common is not None:
            sent.append(Share(self._of_all((sum(own[-1]), num_common)), mine))
            arriving.append(Share(self._of_all((0, num_common)), heads))
        return Transfer(sent, arriving, self.mesh.ulysses)

    def start_leave(self, out: Tensor) -> Finish:
        """``[B, H_local, S_block, D_v]`` to ``[B, H, S_local, D_v]``: every rank gets the replicated tokens."""
        if not self.query_layout.replicated:
            finish = self._leaving.start((out,))
            return lambda: finish()[0]
        finish = self._leaving.start((out, out))
        return lambda: join_kinds(finish(), self.query_layout, self.mesh.rank)

    # -- gradients

    @lazy
    def _gradient_entering(self) -> Transfer:
        layout, heads, index = self.query_layout, self.heads.of_query, self.mesh.ulysses.index
        mine = self._of_all((0, heads[index][1]))
        own, text = self.token_runs(layout), self._of_all((0, num_replicated(layout)))
        sent, arriving = [Share(self._of_all((0, own[index][1])), heads)], [Share(own, mine)]
        if layout.replicated:  # given to all, so their gradients add up
            sent.append(Share(text, heads))
            arriving.append(Share(text, mine))
        return Transfer(sent, arriving, self.mesh.ulysses)

    def enter_gradient(self, grad_out: Tensor) -> Tensor:
        """The transpose of :meth:`start_leave`."""
        kinds = split_by_kind(grad_out, self.query_layout, self.mesh.rank)
        return _cat(self._gradient_entering.start([x for x in kinds if x is not None])())

    @lazy
    def _gradients_leaving(self) -> Transfer:
        index = self.mesh.ulysses.index
        pairs = list(zip([self.token_runs(layout) for layout in self._layouts], self._heads, strict=True))
        sent = [Share(own, self._of_all((0, heads[index][1]))) for own, heads in pairs]
        arriving = [Share(self._of_all((0, own[index][1])), heads) for own, heads in pairs]
        return Transfer(sent, arriving, self.mesh.ulysses)

    def leave_gradients(self, *grads: Tensor) -> list[Tensor]:
        """The transpose of :meth:`start_enter`, for query, key and value: a rank saw its own heads of its replicated tokens."""
        found = self._gradients_leaving.start(grads)()
        whole = []
        for grad, sharded, heads, layout in zip(grads, found, self._heads, self._layouts, strict=True):
            text = grad.new_zeros(grad.shape[0], sharded.shape[1], num_replicated(layout), grad.shape[3])
            own = grad.narrow(2, grad.shape[2] - text.shape[2], text.shape[2])
            text.narrow(1, *heads[self.mesh.ulysses.index]).copy_(own)
            whole.append(join_kinds((sharded, text), layout, self.mesh.rank) if layout.replicated else sharded)
        return whole


def num_replicated(layout: SequenceLayout) -> int:
    return sum([segment.total for segment in layout.replicated])


def split_by_kind(x: Tensor, layout: SequenceLayout, rank: int) -> tuple[Tensor, Tensor | None]:
    """The sharded and the replicated tokens of ``x`` ``[B, H, S_local, D]``; None where nothing is replicated."""
    if not layout.replicated:
        return x, None
    parts = x.split([segment.size(rank, layout.ranks) for segment in layout.segments], dim=2)
    pairs = list(zip(layout.segments, parts, strict=True))
    sharded, replicated = ([part for segment, part in pairs if segment.replicated == kind] for kind in (False, True))
    return _cat(sharded) if sharded else x[:, :, :0], _cat(replicated)


def join_kinds(kinds: Sequence[Tensor], layout: SequenceLayout, rank: int) -> Tensor:
    """The inverse of :func:`split_by_kind`, in the local order of ``layout``; lies in memory as SDPA's result."""
    starts, parts = [0, 0], []
    for segment in layout.segments:
        kind, length = int(segment.replicated), segment.size(rank, layout.ranks)
        parts.append(kinds[kind].transpose(1, 2).narrow(1, starts[kind], length))
        starts[kind] += length
    return torch.cat(parts, dim=1).transpose(1, 2)


def as_sdpa(out: Tensor) -> Tensor:
    """``out`` ``[B, H, S, D]`` in memory as SDPA's result lies: models go on with ``out.transpose(1, 2).view(...)``."""
    by_token = out.transpose(1, 2)
    return out if by_token.is_contiguous() else by_token.contiguous().transpose(1, 2)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
