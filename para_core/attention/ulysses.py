"""Ulysses: trade a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Per attention call one all-to-all in, for query, key and value together, and one out. With ``n`` ranks, S_r tokens and
H_r heads on rank r, and e bytes per element, rank r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split as ``torch.tensor_split`` does; a rank gets the key heads that its query heads see, so that where there are
fewer of them than ranks, several get the same one. A replicated segment is not sent on the way in: each rank takes its
own heads of it; only its output is gathered over heads.

Launches, whatever the number of ranks: peers that get equally many heads are served by one strided copy. Where heads and tokens
divide: one concatenation in, one copy out and, with more than one sample, one before it.

Backward, both all-to-alls are transposed: the gradient of the output comes in (with that of replicated tokens, once per
rank), those of query, key and value go out together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from para_core.collectives import start_all_to_all, wait
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


@dataclass(frozen=True)
class Alike:
    """Consecutive peers that get equally many heads of each tensor, which begin at equal distances.

    Args:
        heads: of each tensor ``(first, count, step)``: the i-th of these peers gets the ``count`` heads from first + i · step on;
            step is ``count``, or 0 where all get the same.
    """

    number: int
    heads: tuple[tuple[int, int, int], ...]


def alike(heads: Sequence[Sequence[Run]]) -> tuple[Alike, ...]:
    """The peers, in runs of such as are :class:`Alike`, where ``heads`` has of each tensor what each peer gets.

    >>> alike([[(0, 2), (2, 2), (4, 1)]])
    (Alike(number=2, heads=((0, 2, 2),)), Alike(number=1, heads=((4, 1, 1),)))
    """
    found: list[Alike] = []
    for runs in zip(*heads, strict=True):
        if found and (steps := _steps(found[-1], runs)) is not None:
            last = found[-1].heads
            grown = tuple([(first, count, step) for (first, count, _), step in zip(last, steps, strict=True)])
            found[-1] = Alike(found[-1].number + 1, grown)
        else:
            found.append(Alike(1, tuple([(start, count, count) for start, count in runs])))
    return tuple(found)


def _steps(before: Alike, runs: Sequence[Run]) -> list[int] | None:
    """The steps of ``before`` with one peer more, which gets ``runs``; None if that one differs."""
    steps = []
    for (first, count, step), (start, number) in zip(before.heads, runs, strict=True):
        possible = (count, 0) if before.number == 1 else (step,)
        fitting = [one for one in possible if start == first + before.number * one]
        if number != count or not fitting:
            return None
        steps.append(fitting[0])
    return steps


# -- tokens for heads


@dataclass(frozen=True)
class Table:
    """Tensors that have the same tokens, and travel as the columns of one table.

    Args:
        heads: of each tensor, what each peer gets.
        tokens: how many come from each peer.
    """

    heads: tuple[tuple[Run, ...], ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Sizes:
    """Of an exchange of tensors of certain shapes.

    Args:
        rows: of each class of peers, and of each table, the elements that one of them gets.
        send, receive: elements to and from each peer.
        arriving: the latter by table.
        tables: of each the shape ``(S_block, B, columns)`` in which it arrives, the columns of each tensor, and its head dim.
        one_width: there is one table, and all of its tensors have the same head dim.
    """

    rows: list[list[int]]
    send: list[int]
    receive: list[int]
    arriving: list[list[int]]
    tables: list[tuple[tuple[int, int, int], list[int], list[int]]]
    one_width: bool


class TokensToHeads:
    """How tensors travel of which each peer of ``dim`` gets its heads of this rank's tokens."""

    def __init__(self, tables: Sequence[Table], dim: MeshDim) -> None:
        self._tables, self._dim = tables, dim
        # One list of classes for all tensors: what a peer gets is in one place.
        self._classes = alike([runs for table in tables for runs in table.heads])
        self._even = len(self._classes) == 1 and all(len(set(table.tokens)) == 1 for table in tables)
        self._known: dict[tuple[torch.Size, ...], _Sizes] = {}

    def start(self, tables: Sequence[Sequence[Tensor]]) -> Callable[[], list[list[Tensor]]]:
        """Begin one all-to-all for all tensors, ``[B, H, S_local, D]`` each.

        Returns:
            What waits for ``[B, H_local, S_block, D]`` of each, tokens in rank order; views of what arrived, if there is one table.
        """
        sizes = self._sizes_of(tables)
        started = start_all_to_all(self._pack(tables, sizes), sizes.send, sizes.receive, self._dim, even=self._even)

        def finish() -> list[list[Tensor]]:
            found = _by_table(wait(started), sizes.arriving)
            return [_columns(flat, *row) for flat, row in zip(found, sizes.tables, strict=True)]

        return finish

    def _sizes_of(self, tables: Sequence[Sequence[Tensor]]) -> _Sizes:
        """Found once for tensors of the same sizes."""
        shapes = tuple([x.shape for table in tables for x in table])
        if shapes in self._known and not torch.compiler.is_compiling():
            return self._known[shapes]
        batch = tables[0][0].shape[0]
        widths = [[x.shape[3] for x in tensors] for tensors in tables]
        own = [
            [runs[self._dim.index][1] * width for runs, width in zip(table.heads, row, strict=True)]
            for table, row in zip(self._tables, widths, strict=True)
        ]
        arriving = [
            [batch * table.tokens[peer] * sum(columns) for table, columns in zip(self._tables, own, strict=True)]
            for peer in range(self._dim.size)
        ]
        # Of each class, and of each table, the elements of one peer.
        rows = []
        for peers in self._classes:
            counts = iter(peers.heads)
            rows.append([sum([x.shape[0] * x.shape[2] * x.shape[3] * next(counts)[1] for x in xs]) for xs in tables])
        found = _Sizes(
            rows=rows,
            send=[sum(row) for row, peers in zip(rows, self._classes, strict=True) for _ in range(peers.number)],
            receive=[sum(row) for row in arriving],
            arriving=arriving,
            tables=[
                ((sum(table.tokens), batch, sum(columns)), columns, row)
                for table, columns, row in zip(self._tables, own, widths, strict=True)
            ],
            one_width=len(tables) == 1 and len(set(widths[0])) == 1,
        )
        if not torch.compiler.is_compiling():
            self._known[shapes] = found
        return found

    def _pack(self, tables: Sequence[Sequence[Tensor]], sizes: _Sizes) -> Tensor:
        """One flat buffer for all peers."""
        if len(self._classes) == 1 and sizes.one_width:
            (peers,) = self._classes
            return torch.cat([_for_peers(x, peers, place) for place, x in enumerate(tables[0])], dim=3).view(-1)
        buffer = tables[0][0].new_empty(sum(sizes.send))
        offset = 0
        for peers, row in zip(self._classes, sizes.rows, strict=True):
            region = buffer.narrow(0, offset, peers.number * sum(row)).view(peers.number, sum(row))
            offset += region.numel()
            place = before = 0
            for xs, number in zip(tables, row, strict=True):
                pieces = [_for_peers(x, peers, place + index) for index, x in enumerate(xs)]
                _fill(region.narrow(1, before, number), pieces)
                place, before = place + len(xs), before + number
        return buffer


def _for_peers(x: Tensor, peers: Alike, place: int) -> Tensor:
    """The heads of ``x`` ``[B, H, S, D]`` that each of these peers gets, a view ``[peers, S, B, heads, D]``."""
    first, count, step = peers.heads[place]
    batch, heads, tokens, width = x.shape
    if step == count:
        if peers.number * count != heads:
            x = x.narrow(1, first, peers.number * count)
        return x.view(batch, peers.number, count, tokens, width).permute(1, 3, 0, 2, 4)
    shared = x.narrow(1, first, count).permute(2, 0, 1, 3)
    return shared.expand(peers.number, *shared.shape)


def _fill(target: Tensor, pieces: Sequence[Tensor]) -> None:
    """Write pieces ``[peers, S, B, heads, D]`` side by side into rows ``[peers, S · B · all columns]``."""
    peers, tokens, batch, _, width = pieces[0].shape
    if not torch.is_grad_enabled() and all(piece.shape[4] == width for piece in pieces):
        heads = sum([piece.shape[3] for piece in pieces])
        torch.cat(list(pieces), dim=3, out=target.view(peers, tokens, batch, heads, width))
        return
    columns = [piece.shape[3] * piece.shape[4] for piece in pieces]
    table = target.view(peers, tokens, batch, sum(columns))
    before = 0
    for number, piece in zip(columns, pieces, strict=True):
        # Not split(): autograd allows no change of a view that came with others.
        table.narrow(3, before, number).view(piece.shape).copy_(piece)
        before += number


def _by_table(received: Tensor, arriving: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """What arrived, peer by peer, of each table."""
    if len(arriving[0]) == 1:
        return [received]
    if all(row == arriving[0] for row in arriving):
        return list(received.view(len(arriving), sum(arriving[0])).split(list(arriving[0]), dim=1))
    of_peers = [x.split(row) for x, row in zip(received.split([sum(row) for row in arriving]), arriving, strict=True)]
    return [torch.cat(parts) for parts in zip(*of_peers, strict=True)]


def _columns(flat: Tensor, shape: tuple[int, int, int], columns: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """Of a table ``[S, B, all columns]`` each tensor as ``[B, H, S, D]``."""
    if len(set(widths)) == 1 and widths[0]:
        width = widths[0]
        heads = flat.reshape(shape[0], shape[1], shape[2] // width, width).permute(1, 2, 0, 3)
        return list(heads.split([number // width for number in columns], dim=1))
    parts = flat.reshape(shape).split(list(columns), dim=2)
    return [
        part.view(shape[0], shape[1], number // width if width else 0, width).permute(1, 2, 0, 3)
        for part, number, width in zip(parts, columns, widths, strict=True)
    ]


# -- heads for tokens


@dataclass(frozen=True)
class Returned:
    """How ``[B, H_local, S_block, D]`` travels: the tokens that each peer gets, and the heads that come from each.

    Args:
        common: tokens that every peer gets behind its own.
        order: where in the result what arrives of a peer stands: ``(from, to, length)`` of its tokens. None: as it comes.
    """

    tokens: tuple[Run, ...]
    heads: tuple[Run, ...]
    common: Run = (0, 0)
    order: tuple[tuple[int, int, int], ...] | None = None

    def number(self, peer: int) -> int:
        """Tokens that a peer gets."""
        return self.tokens[peer][1] + self.common[1]


class HeadsToTokens:
    """How tensors travel of which each peer of ``dim`` gets its tokens of this rank's heads."""

    def __init__(self, returned: Sequence[Returned], dim: MeshDim) -> None:
        self._returned, self._dim = returned, dim
        self._even = all(
            len({length for _, length in runs}) == 1 for one in returned for runs in (one.tokens, one.heads)
        )
        self._joining = [(one, alike([one.heads]), one.number(dim.index)) for one in returned]
        self._known: dict[tuple[torch.Size, ...], tuple[list[int], list[list[int]]]] = {}

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin one all-to-all for all tensors ``[B, H_local, S_block, D]``.

        Returns:
            What waits for ``[B, H, S_local, D]`` of each, in memory as SDPA's result lies, ``[B, S_local, H, D]``; where several
            peers hold the same head, the sum.
        """
        send, arriving = self._sizes_of(tensors)
        receive = [sum(row) for row in arriving]
        started = start_all_to_all(self._pack(tensors), send, receive, self._dim, even=self._even)

        def finish() -> list[Tensor]:
            found = _by_table(wait(started), arriving)
            return [_joined(flat, x, *one) for flat, x, one in zip(found, tensors, self._joining, strict=True)]

        return finish

    def _sizes_of(self, tensors: Sequence[Tensor]) -> tuple[list[int], list[list[int]]]:
        """Elements to each peer, and from each, by tensor; found once for tensors of the same sizes."""
        shapes = tuple([x.shape for x in tensors])
        if shapes in self._known and not torch.compiler.is_compiling():
            return self._known[shapes]
        index = self._dim.index
        pairs = list(zip(tensors, self._returned, strict=True))
        peers = range(self._dim.size)
        arriving = [
            [x.shape[0] * x.shape[3] * one.number(index) * one.heads[peer][1] for x, one in pairs] for peer in peers
        ]
        send = [sum([x.shape[0] * x.shape[1] * x.shape[3] * one.number(peer) for x, one in pairs]) for peer in peers]
        if not torch.compiler.is_compiling():
            self._known[shapes] = (send, arriving)
        return send, arriving

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        rows = [x.permute(2, 0, 1, 3) for x in tensors]  # [S_block, B, H_local, D]
        if len(rows) == 1 and not self._returned[0].common[1]:
            # The peers' tokens stand in the block one behind the other: of one sample nothing has to be moved.
            (own,) = self._returned
            return rows[0].narrow(0, 0, sum([length for _, length in own.tokens])).reshape(-1)
        pieces = []
        for peer in range(self._dim.size):
            for x, one in zip(rows, self._returned, strict=True):
                pieces.append(x.narrow(0, *one.tokens[peer]))
                if one.common[1]:
                    pieces.append(x.narrow(0, *one.common))
        if len(rows) == 1:
            return torch.cat(pieces).view(-1)
        return torch.cat([piece.reshape(-1) for piece in pieces])


def _joined(flat: Tensor, like: Tensor, one: Returned, classes: Sequence[Alike], tokens: int) -> Tensor:
    """``[B, H, S_local, D]`` of what arrived of all peers, ``[S, B, heads, D]`` of each; ``like`` is what was sent."""
    batch, width = like.shape[0], like.shape[3]
    heads = max([start + count for start, count in one.heads])
    if len(classes) == 1 and classes[0].heads[0][1] * classes[0].number == heads and one.order is None:
        parts = flat.reshape(classes[0].number, tokens, batch, classes[0].heads[0][1], width)
        return parts.permute(2, 1, 0, 3, 4).reshape(batch, tokens, heads, width).transpose(1, 2)
    apart = sum([peers.number * peers.heads[0][1] for peers in classes]) == heads
    whole = (flat.new_empty if apart else flat.new_zeros)(batch, tokens, heads, width)
    offset = 0
    for peers in classes:
        first, count, step = peers.heads[0]
        for place in [None] if step == count else range(peers.number):
            number = peers.number if place is None else 1
            part = flat.reshape(-1).narrow(0, offset, number * tokens * batch * count * width)
            offset += part.numel()
            part = part.view(number, tokens, batch, count, width).permute(2, 1, 0, 3, 4)
            target = whole.narrow(2, first, number * count).view(batch, tokens, number, count, width)
            for source, to, length in one.order or ((0, 0, tokens),):
                into = target.narrow(1, to, length)
                into.copy_(part.narrow(1, source, length)) if apart else into.add_(part.narrow(1, source, length))
    return whole.transpose(1, 2)


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

    def token_sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Sharded tokens of each rank of the Ulysses group."""
        first = self.mesh.ring.index * self.mesh.ulysses.size
        return tuple([layout.sharded_size(rank) for rank in range(first, first + self.mesh.ulysses.size)])

    def block_size(self, layout: SequenceLayout) -> int:
        """Tokens of a block, the replicated ones among them."""
        return sum(self.token_sizes(layout)) + sum([segment.total for segment in layout.replicated])

    # -- in

    @lazy
    def _entering(self) -> TokensToHeads:
        query, key = self.heads.of_query, self.heads.of_key
        of_query, of_key = [
            tuple([size + self._extra_tokens for size in self.token_sizes(layout)])
            for layout in (self.query_layout, self.key_layout)
        ]
        if self.query_layout is self.key_layout:
            return TokensToHeads([Table((query, key, key), of_query)], self.mesh.ulysses)
        return TokensToHeads([Table((query,), of_query), Table((key, key), of_key)], self.mesh.ulysses)

    def start_enter_sharded(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], list[Tensor]]:
        """Of sharded tokens: ``[B, H, S_local, D]`` each to ``[B, H_local, sharded tokens of the block, D]``."""
        tables = [[query, key, value]] if self.query_layout is self.key_layout else [[query], [key, value]]
        finish = self._entering.start(tables)
        return lambda: [x for table in finish() for x in table]

    def start_enter(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], list[Tensor]]:
        """``[B, H, S_local, D]`` each to ``[B, H_local, S_block, D]``."""
        (query, text), (key, key_text), (value, value_text) = self.by_kind(query, key, value)
        finish = self.start_enter_sharded(query, key, value)
        return lambda: self.with_replicated(finish(), (text, key_text, value_text))

    def by_kind(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Sharded and replicated tokens of each."""
        rank = self.mesh.rank
        return [
            split_by_kind(query, self.query_layout, rank),
            split_by_kind(key, self.key_layout, rank),
            split_by_kind(value, self.key_layout, rank),
        ]

    def with_replicated(self, blocks: Sequence[Tensor], texts: Sequence[Tensor | None]) -> list[Tensor]:
        """Blocks of query, key and value, with this rank's heads of the replicated tokens behind the sharded ones."""
        index = self.mesh.ulysses.index
        runs = (self.heads.of_query[index], self.heads.of_key[index], self.heads.of_key[index])
        return [
            block if text is None else torch.cat([block, text.narrow(1, *run)], dim=2)
            for block, text, run in zip(blocks, texts, runs, strict=True)
        ]

    # -- out

    @lazy
    def _leaving(self) -> HeadsToTokens:
        layout = self.query_layout
        own, text = self.token_runs(layout)
        order = local_order(layout, self.mesh.rank)
        return HeadsToTokens([Returned(own, self.heads.of_query, text, order)], self.mesh.ulysses)

    def start_leave(self, out: Tensor) -> Finish:
        """``[B, H_local, S_block, D_v]`` to ``[B, H, S_local, D_v]``: every rank gets the replicated tokens."""
        finish = self._leaving.start([out])
        return lambda: finish()[0]

    def token_runs(self, layout: SequenceLayout) -> tuple[tuple[Run, ...], Run]:
        """Where in a block each peer's own tokens are, and the replicated ones."""
        sizes = self.token_sizes(layout)
        own = tuple([(sum(sizes[:peer]), size) for peer, size in enumerate(sizes)])
        return own, (sum(sizes), sum([segment.total for segment in layout.replicated]))

    # -- gradients

    @lazy
    def _gradient_entering(self) -> TokensToHeads:
        layout, heads, dim = self.query_layout, self.heads.of_query, self.mesh.ulysses
        tables = [Table((heads,), self.token_sizes(layout))]
        if layout.replicated:
            num_text = sum([segment.total for segment in layout.replicated])
            tables.append(Table((heads,), (num_text,) * dim.size))
        return TokensToHeads(tables, dim)

    def enter_gradient(self, grad_out: Tensor) -> Tensor:
        """The transpose of :meth:`start_leave`: replicated tokens were given to all, so their gradients add up."""
        sharded, text = split_by_kind(grad_out, self.query_layout, self.mesh.rank)
        found = self._gradient_entering.start([[sharded]] if text is None else [[sharded], [text]])()
        if text is None:
            return found[0][0]
        texts = torch.unflatten(found[1][0], 2, (self.mesh.ulysses.size, text.shape[2]))
        return torch.cat([found[0][0], texts.sum(2)], dim=2)

    @lazy
    def _gradients_leaving(self) -> HeadsToTokens:
        heads, layouts = self.heads, (self.query_layout, self.key_layout, self.key_layout)
        return HeadsToTokens(
            [
                Returned(self.token_runs(layout)[0], one)
                for layout, one in zip(layouts, (heads.of_query, heads.of_key, heads.of_key), strict=True)
            ],
            self.mesh.ulysses,
        )

    def leave_gradients(self, *grads: Tensor) -> list[Tensor]:
        """The transpose of :meth:`start_enter`, for query, key and value: a rank saw its own heads of its replicated tokens."""
        heads = (self.heads.of_query, self.heads.of_key, self.heads.of_key)
        layouts = (self.query_layout, self.key_layout, self.key_layout)
        found = self._gradients_leaving.start(grads)()
        whole = []
        for grad, sharded, one, layout in zip(grads, found, heads, layouts, strict=True):
            if not layout.replicated:
                whole.append(sharded)
                continue
            own = grad.narrow(2, *self.token_runs(layout)[1])
            text = own.new_zeros(own.shape[0], sharded.shape[1], *own.shape[2:])
            text.narrow(1, *one[self.mesh.ulysses.index]).copy_(own)
            whole.append(join_kinds(sharded, text, layout, self.mesh.rank))
        return whole


def local_order(layout: SequenceLayout, rank: int) -> tuple[tuple[int, int, int], ...] | None:
    """Where the sharded and then the replicated tokens of ``rank`` stand in ``layout``, as :class:`Returned` says; None: as they are."""
    if not layout.replicated:
        return None
    places = {False: 0, True: layout.sharded_size(rank)}
    order, to = [], 0
    for segment in layout.segments:
        length = segment.size(rank, layout.ranks)
        order.append((places[segment.replicated], to, length))
        places[segment.replicated] += length
        to += length
    return tuple(order)


def split_by_kind(x: Tensor, layout: SequenceLayout, rank: int) -> tuple[Tensor, Tensor | None]:
    """The sharded and the replicated tokens of ``x`` ``[B, H, S_local, D]``; None where nothing is replicated."""
    if not layout.replicated:
        return x, None
    parts = x.split([segment.size(rank, layout.ranks) for segment in layout.segments], dim=2)
    pairs = list(zip(layout.segments, parts, strict=True))
    sharded = [part for segment, part in pairs if not segment.replicated]
    replicated = [part for segment, part in pairs if segment.replicated]
    return _cat(sharded) if sharded else x[:, :, :0], _cat(replicated)


def join_kinds(sharded: Tensor, replicated: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """The inverse of :func:`split_by_kind`, in the local order of ``layout``."""
    sizes = [segment.size(rank, layout.ranks) for segment in layout.segments]
    kinds = {
        False: iter(sharded.split([n for s, n in zip(layout.segments, sizes, strict=True) if not s.replicated], dim=2))
        if layout.sharded
        else iter(()),
        True: iter(replicated.split([n for s, n in zip(layout.segments, sizes, strict=True) if s.replicated], dim=2)),
    }
    return _cat([next(kinds[segment.replicated]) for segment in layout.segments])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
