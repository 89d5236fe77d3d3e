"""Ulysses: trade a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Per attention call one all-to-all in, for query, key and value together, and one out. With ``n`` ranks, S_r tokens and
H_r heads on rank r, and e bytes per element, rank r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split as ``torch.tensor_split`` does; a rank gets the key heads that its query heads see, so that where there are
fewer of them than ranks, several get the same one. A replicated segment is not sent on the way in: each rank takes its
own heads of it; only its output is gathered over heads.

Backward, both all-to-alls are transposed: the gradient of the output comes in (with that of replicated tokens, once per
rank), those of query, key and value go out together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from para_core.attention.approximate.wire import Wire
from para_core.collectives import pack, start_all_to_all, wait
from para_core.layout import Run, Segment, SequenceLayout
from para_core.mesh import MeshDim, SequenceMesh


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

    def of_query(self) -> list[Run]:
        """As ``torch.tensor_split`` cuts, over the ranks and then into chunks."""
        found = []
        for rank in range(self.ranks):
            start, count = Segment("heads", self.num_heads).runs(rank, self.ranks)[0]
            offset, part = Segment("heads", count).runs(self.chunk, self.chunks)[0]
            found.append((start + offset, part))
        return found

    def cut(self, chunks: int) -> list[Heads]:
        """The same heads in ``chunks`` parts."""
        return [replace(self, chunk=chunk, chunks=chunks) for chunk in range(chunks)]

    def of_key(self) -> list[Run]:
        """The key heads that the query heads of each rank see; neighbours may share one."""
        if self.num_kv_heads == self.num_heads:
            return self.of_query()
        group = self.num_heads // self.num_kv_heads
        return [
            (start // group, -(-(start + count) // group) - start // group if count else 0)
            for start, count in self.of_query()
        ]

    def key_of_each_query(self, rank: int, device: torch.device) -> Tensor | None:
        """For each query head of ``rank`` its key head, both counted on that rank; None if they are the same."""
        if self.num_kv_heads == self.num_heads:
            return None
        (start, count), (first_key, _) = self.of_query()[rank], self.of_key()[rank]
        group = self.num_heads // self.num_kv_heads
        return torch.arange(start, start + count, device=device) // group - first_key


@dataclass(frozen=True)
class Sent:
    """``[B, H, S_local, D]``, the heads of it that each peer gets, and the tokens that come from each peer."""

    x: Tensor
    heads: Sequence[Run]
    token_sizes: Sequence[int]


# Waits for what has been started, and returns it.
Finish = Callable[[], Tensor]


def tokens_to_heads(groups: Sequence[Sequence[Sent]], dim: MeshDim) -> list[Tensor]:
    """:func:`start_tokens_to_heads`, finished."""
    return start_tokens_to_heads(groups, dim)()


def start_tokens_to_heads(groups: Sequence[Sequence[Sent]], dim: MeshDim) -> Callable[[], list[Tensor]]:
    """Begin to send each peer its heads of this rank's tokens: one all-to-all for all tensors.

    Args:
        groups: tensors of one group have the same tokens, and travel as the columns of one table; where there is one
            group, what arrives is used in place.

    Returns:
        What waits for ``[B, H_local, S_block, D]`` of each tensor, tokens in rank order.
    """
    to_peers = [[_rows([(sent.x, sent.heads[peer]) for sent in group]) for group in groups] for peer in range(dim.size)]
    widths = [[sent.heads[dim.index][1] * sent.x.shape[3] for sent in group] for group in groups]
    batch = groups[0][0].x.shape[0]
    arriving = [
        [batch * group[0].token_sizes[peer] * sum(width) for group, width in zip(groups, widths, strict=True)]
        for peer in range(dim.size)
    ]
    started = _start_exchange(to_peers, [sum(sizes) for sizes in arriving], dim)

    def finish() -> list[Tensor]:
        received = wait(started)
        if len(groups) == 1:
            tables = [received]
        else:
            parts = [
                x.split(row) for x, row in zip(received.split([sum(row) for row in arriving]), arriving, strict=True)
            ]
            tables = [torch.cat([part[index] for part in parts]) for index in range(len(groups))]
        found = []
        for group, width, table in zip(groups, widths, tables, strict=True):
            columns = table.view(sum(group[0].token_sizes), batch, sum(width)).split(width, dim=2)
            for sent, column in zip(group, columns, strict=True):
                shape = (sent.heads[dim.index][1], sent.x.shape[3])
                found.append(torch.unflatten(column, 2, shape).permute(1, 2, 0, 3))
        return found

    return finish


def _rows(parts: Sequence[tuple[Tensor, Run]]) -> list[Tensor]:
    """The heads of each ``[B, H, S, D]`` as ``[S, B, heads, D]``."""
    return [x.narrow(1, start, count).permute(2, 0, 1, 3) for x, (start, count) in parts]


@dataclass(frozen=True)
class Returned:
    """``[B, H_local, S_block, D]``, the tokens of it that each peer gets, and the heads that come from each peer."""

    x: Tensor
    tokens: Sequence[Run]
    heads: Sequence[Run]


def heads_to_tokens(tensors: Sequence[Returned], dim: MeshDim) -> list[Tensor]:
    """:func:`start_heads_to_tokens`, finished."""
    return start_heads_to_tokens(tensors, dim)()


def start_heads_to_tokens(tensors: Sequence[Returned], dim: MeshDim) -> Callable[[], list[Tensor]]:
    """Begin to send each peer its tokens of this rank's heads: one all-to-all for all tensors.

    Returns:
        What waits for ``[B, H, S_local, D]`` of each tensor; where several peers hold the same head, the sum.
    """
    # Heads first: what arrives is then all heads of this rank's tokens, in order.
    to_peers = [
        [[one.x.narrow(2, *one.tokens[peer]).permute(1, 0, 2, 3)] for one in tensors] for peer in range(dim.size)
    ]
    shapes = [
        [(one.heads[peer][1], one.x.shape[0], one.tokens[dim.index][1], one.x.shape[3]) for one in tensors]
        for peer in range(dim.size)
    ]
    sizes = [[heads * batch * tokens * width for heads, batch, tokens, width in row] for row in shapes]
    started = _start_exchange(to_peers, [sum(row) for row in sizes], dim)

    def finish() -> list[Tensor]:
        received = wait(started)
        if len(tensors) == 1 and not _overlap(tensors[0].heads):
            return [_stacked(received, shapes, 0)]
        parts = [x.split(row) for x, row in zip(received.split([sum(row) for row in sizes]), sizes, strict=True)]
        return [
            _summed(one.heads, [(part[index], row[index]) for part, row in zip(parts, shapes, strict=True)])
            if _overlap(one.heads)
            else _stacked(torch.cat([part[index] for part in parts]), shapes, index)
            for index, one in enumerate(tensors)
        ]

    return finish


def _overlap(heads: Sequence[Run]) -> bool:
    return any(start + count > following for (start, count), (following, _) in itertools.pairwise(heads))


def _stacked(flat: Tensor, shapes: Sequence[Sequence[tuple[int, ...]]], index: int) -> Tensor:
    heads = sum([row[index][0] for row in shapes])
    return flat.view(heads, *shapes[0][index][1:]).permute(1, 0, 2, 3)


def _summed(heads: Sequence[Run], parts: Sequence[tuple[Tensor, tuple[int, ...]]]) -> Tensor:
    """``[B, H, S, D]`` of parts ``[heads, B, S, D]`` (flat, and their shapes) that may hold the same heads."""
    flat, shape = parts[0]
    whole = flat.new_zeros(max(start + count for start, count in heads), *shape[1:])
    for (start, count), (part, part_shape) in zip(heads, parts, strict=True):
        whole.narrow(0, start, count).add_(part.view(part_shape))
    return whole.permute(1, 0, 2, 3)


def _start_exchange(
    to_peers: Sequence[Sequence[Sequence[Tensor]]], receive_sizes: Sequence[int], dim: MeshDim
) -> Tensor:
    """All-to-all of what each peer gets: tables, the columns of each table given one by one."""
    send_sizes = [sum([column.numel() for table in tables for column in table]) for tables in to_peers]
    packed = pack([table for tables in to_peers for table in tables])
    return start_all_to_all(packed, send_sizes, receive_sizes, dim)


# -- one attention call


@dataclass(frozen=True)
class Exchange:
    """The all-to-alls of one call, forward and backward.

    A block is what a Ulysses group holds together: its ranks' sharded tokens, then the replicated ones.
    """

    query_layout: SequenceLayout
    key_layout: SequenceLayout
    mesh: SequenceMesh
    heads: Heads
    comm_dtype: torch.dtype | None = None  # of what travels forward; None: as it is

    def token_sizes(self, layout: SequenceLayout) -> list[int]:
        """Sharded tokens of each rank of the Ulysses group."""
        first = self.mesh.ring.index * self.mesh.ulysses.size
        return [layout.sharded_size(rank) for rank in range(first, first + self.mesh.ulysses.size)]

    def block_size(self, layout: SequenceLayout) -> int:
        """Tokens of a block, the replicated ones among them."""
        return sum(self.token_sizes(layout)) + sum([segment.total for segment in layout.replicated])

    def start_enter(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], list[Tensor]]:
        """``[B, H, S_local, D]`` each to ``[B, H_local, S_block, D]``."""
        layouts = (self.query_layout, self.key_layout, self.key_layout)
        heads = (self.heads.of_query(), self.heads.of_key(), self.heads.of_key())
        kinds = [split_by_kind(x, one, self.mesh.rank) for x, one in zip((query, key, value), layouts, strict=True)]
        wire = Wire(self.comm_dtype, min(query.shape[3], value.shape[3]))
        sizes = [self.token_sizes(layout) for layout in layouts]
        sent = [
            Sent(wire.write(sharded), one, [number + wire.scale_rows for number in numbers])
            for (sharded, _), one, numbers in zip(kinds, heads, sizes, strict=True)
        ]
        groups = [sent] if self.query_layout is self.key_layout else [sent[:1], sent[1:]]
        mine, blocks = self.mesh.ulysses.index, start_tokens_to_heads(groups, self.mesh.ulysses)

        def finish() -> list[Tensor]:
            found = []
            for block, (_, text), one, numbers in zip(blocks(), kinds, heads, sizes, strict=True):
                sharded = wire.read_each(block, numbers, query.dtype)
                found.append(sharded if text is None else torch.cat([sharded, text.narrow(1, *one[mine])], dim=2))
            return found

        return finish

    def start_leave(self, out: Tensor) -> Finish:
        """``[B, H_local, S_block, D_v]`` to ``[B, H, S_local, D_v]``: every rank gets the replicated tokens."""
        heads, tokens, texts = self.heads.of_query(), *self._token_runs(self.query_layout)
        wire = Wire(self.comm_dtype, out.shape[3])
        numbers, scales = wire.write_apart(out)
        if wire.scale_rows:
            # Behind the tokens of each peer, and behind the replicated ones, what they are scaled by.
            runs = [*tokens, texts[0]]
            parts = [part for run in runs for part in (numbers.narrow(2, *run), scales)]
            numbers = torch.cat(parts, dim=2)
            tokens, texts = (
                _with_scales(tokens, wire.scale_rows),
                [_with_scales(runs, wire.scale_rows)[-1] for _ in texts],
            )
        returned = [Returned(numbers, tokens, heads)]
        if self.query_layout.replicated:
            returned.append(Returned(numbers, texts, heads))
        kinds = start_heads_to_tokens(returned, self.mesh.ulysses)
        return lambda: self._joined([wire.read(kind, out.dtype) for kind in kinds()], self.query_layout)

    def _token_runs(self, layout: SequenceLayout) -> tuple[list[Run], list[Run]]:
        """Where in a block each peer's own tokens are, and the replicated ones."""
        sizes = self.token_sizes(layout)
        own = [(sum(sizes[:peer]), size) for peer, size in enumerate(sizes)]
        return own, [(sum(sizes), sum([segment.total for segment in layout.replicated]))] * len(sizes)

    def _joined(self, kinds: Sequence[Tensor], layout: SequenceLayout) -> Tensor:
        return kinds[0] if len(kinds) == 1 else join_kinds(kinds[0], kinds[1], layout, self.mesh.rank)

    def enter_gradient(self, grad_out: Tensor) -> Tensor:
        """The transpose of :meth:`start_leave`: replicated tokens were given to all, so their gradients add up."""
        layout, heads, dim = self.query_layout, self.heads.of_query(), self.mesh.ulysses
        sharded, text = split_by_kind(grad_out, layout, self.mesh.rank)
        groups = [[Sent(sharded, heads, self.token_sizes(layout))]]
        if text is None:
            return tokens_to_heads(groups, dim)[0]
        groups.append([Sent(text, heads, [text.shape[2]] * dim.size)])
        block, texts = tokens_to_heads(groups, dim)
        return torch.cat([block, torch.unflatten(texts, 2, (dim.size, text.shape[2])).sum(2)], dim=2)

    def leave_gradients(self, *grads: Tensor) -> list[Tensor]:
        """The transpose of :meth:`start_enter`, for query, key and value: a rank saw its own heads of its replicated tokens."""
        heads = (self.heads.of_query(), self.heads.of_key(), self.heads.of_key())
        layouts = (self.query_layout, self.key_layout, self.key_layout)
        totals = (self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads)
        found = heads_to_tokens(
            [
                Returned(grad, self._token_runs(layout)[0], one)
                for grad, one, layout in zip(grads, heads, layouts, strict=True)
            ],
            self.mesh.ulysses,
        )
        whole = []
        for grad, sharded, one, layout, total in zip(grads, found, heads, layouts, totals, strict=True):
            if not layout.replicated:
                whole.append(sharded)
                continue
            own = grad.narrow(2, *self._token_runs(layout)[1][0])
            text = own.new_zeros(own.shape[0], total, *own.shape[2:])
            text.narrow(1, *one[self.mesh.ulysses.index]).copy_(own)
            whole.append(join_kinds(sharded, text, layout, self.mesh.rank))
        return whole


def _with_scales(runs: Sequence[Run], scale_rows: int) -> list[Run]:
    """Runs of a tensor after so many more rows have been put behind each."""
    return [(start + place * scale_rows, length + scale_rows) for place, (start, length) in enumerate(runs)]


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
