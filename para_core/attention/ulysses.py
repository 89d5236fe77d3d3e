"""Ulysses: trade a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Per attention call one all-to-all in, for query, key and value together, and one out. With ``n`` ranks, S_r tokens and
H_r heads on rank r, and e bytes per element, rank r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split like :func:`torch.tensor_split`. A rank gets the key heads that its query heads need, so several ranks
get the same key head if there are fewer key heads than ranks. A replicated segment is not sent on the way in, because
each rank takes its own heads of it; its output is gathered over heads.

Launches for any number of ranks: one strided copy serves all peers whose parts have equal sizes. If heads and tokens
divide evenly, that is one concatenation in, one copy out and, with more than one sample, one copy before it.

The backward runs the transposed all-to-alls: one for the gradient of the output (for replicated tokens, that of each
rank), one for the gradients of query, key and value together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from para_core.attention.hooks import wire_format
from para_core.attention.peer_slices import PeerSlices
from para_core.attention.spec import AttentionSpec
from para_core.attention.transfer import SlicedAllToAll
from para_core.distributed.cached_property import cached_property
from para_core.distributed.layout import Run, Segment, SequenceLayout

# Waits for an exchange that was started, and returns its results.
Finish = Callable[[], Sequence[Tensor]]
Start = Callable[[Sequence[Tensor]], Finish]


@dataclass(frozen=True)
class Heads:
    """The query heads and key heads that each of ``ranks`` Ulysses ranks computes, as ``(start, count)``.

    Args:
        chunk, chunks: The value describes part ``chunk`` of ``chunks`` parts of each rank's heads.
    """

    num_heads: int
    num_kv_heads: int
    ranks: int
    chunk: int = 0
    chunks: int = 1

    @cached_property
    def of_query(self) -> tuple[Run, ...]:
        """The query heads of each rank, split like ``torch.tensor_split`` over the ranks and then into chunks."""
        runs = []
        for rank in range(self.ranks):
            start, count = Segment("heads", self.num_heads).runs(rank, self.ranks)[0]
            offset, part = Segment("heads", count).runs(self.chunk, self.chunks)[0]
            runs.append((start + offset, part))
        return tuple(runs)

    @cached_property
    def of_key(self) -> tuple[Run, ...]:
        """The key heads that the query heads of each rank need. Neighbouring ranks may need the same one."""
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
        """Return these heads in ``chunks`` parts."""
        return [replace(self, chunk=chunk, chunks=chunks) for chunk in range(chunks)]

    def is_grouped(self, rank: int) -> bool:
        """Whether on ``rank`` key head i belongs to the i-th of equally large groups of query heads."""
        (start, count), (_, num_keys) = self.of_query[rank], self.of_key[rank]
        group = self.num_heads // self.num_kv_heads if self.num_kv_heads else 1
        return start % group == 0 and count == num_keys * group

    def key_of_each_query(self, rank: int, device: torch.device) -> Tensor | None:
        """Return the key head of each query head of ``rank``, both counted from 0 on that rank; None if they are
        grouped evenly.
        """
        if self.is_grouped(rank):
            return None
        (start, count), (first_key, _) = self.of_query[rank], self.of_key[rank]
        group = self.num_heads // self.num_kv_heads
        return torch.arange(start, start + count, device=device) // group - first_key


# -- one attention call


class UlyssesPlan:
    """The all-to-alls of one call, forward and backward.

    A block contains all tokens of a Ulysses group: the sharded tokens of its ranks, then the replicated ones. With
    ``comm_dtype`` the exchanges of the forward are rounded.

    Args:
        heads: The heads of each rank, or a part of them.
    """

    def __init__(self, spec: AttentionSpec, heads: Heads) -> None:
        query_layout, key_layout = spec.query_layout, spec.key_layout
        self.query_layout, self.key_layout = query_layout, key_layout
        self.mesh, self.heads = spec.mesh, heads
        self._comm_dtype = spec.options.comm_dtype
        # For query, key and value.
        self._layouts = (query_layout, key_layout, key_layout)
        self._heads = (heads.of_query, heads.of_key, heads.of_key)
        self._replicates = bool(query_layout.replicated or key_layout.replicated)

    def token_sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Return the number of sharded tokens of each rank of the Ulysses group."""
        first = self.mesh.ring.index * self.mesh.ulysses.size
        return tuple([layout.sharded_size(rank) for rank in range(first, first + self.mesh.ulysses.size)])

    def block_size(self, layout: SequenceLayout) -> int:
        """Return the number of tokens in a block, including replicated ones."""
        return sum(self.token_sizes(layout)) + num_replicated(layout)

    def token_runs(self, layout: SequenceLayout) -> tuple[Run, ...]:
        """Return the run of each peer's sharded tokens in a block."""
        sizes = self.token_sizes(layout)
        return tuple(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))

    def transfer(
        self,
        layouts: Sequence[SequenceLayout],
        heads: Sequence[tuple[Run, ...]],
        num_common: int | None = None,
        *,
        to_heads: bool,
        comm_dtype: torch.dtype | None = None,
    ) -> SlicedAllToAll:
        """Return the exchange of sharded tokens from ``[B, H, S_local, D]`` to
        ``[B, H_local, sharded tokens of the block, D]``, or back.

        Args:
            to_heads: The direction: from tokens to heads, or back.
            num_common: If given, one more tensor of this many replicated tokens is exchanged. Towards tokens every rank
                gets its heads from all ranks; towards heads the contributions of all ranks are summed.
        """
        index, ranks = self.mesh.ulysses.index, self.mesh.ulysses.size
        local, block = [], []
        for layout, of_peers in zip(layouts, heads, strict=True):
            tokens, own_heads = self.token_runs(layout), ((0, of_peers[index][1]),) * ranks
            local.append(PeerSlices(((0, tokens[index][1]),) * ranks, of_peers))
            block.append(PeerSlices(tokens, own_heads))
        if num_common is not None:
            common = ((0, num_common),) * ranks
            local.append(PeerSlices(common, of_peers))
            block.append(PeerSlices(common, own_heads))
        sent, arriving = (local, block) if to_heads else (block, local)
        return SlicedAllToAll(sent, arriving, self.mesh.ulysses, wire=wire_format(comm_dtype))

    @cached_property
    def _num_common(self) -> int | None:
        """Number of replicated queries; None if the query layout has no replicated segment."""
        return num_replicated(self.query_layout) if self.query_layout.replicated else None

    # -- in

    @cached_property
    def _entering(self) -> SlicedAllToAll:
        return self.transfer(self._layouts, self._heads, to_heads=True, comm_dtype=self._comm_dtype)

    @cached_property
    def start_enter(self) -> Start:
        """Starts the exchange of query, key and value: each ``[B, H, S_local, D]`` becomes
        ``[B, H_local, S_block, D]``. Replicated tokens are not sent: each rank takes its own heads of them.
        """
        return self._start_enter_with_replicated if self._replicates else self._entering.start

    def _start_enter_with_replicated(self, tensors: Sequence[Tensor]) -> Finish:
        kinds = [split_by_kind(x, layout, self.mesh.rank) for x, layout in zip(tensors, self._layouts, strict=True)]
        finish = self._entering.start([sharded for sharded, _ in kinds])
        return lambda: self._with_replicated(finish(), [text for _, text in kinds])

    def _with_replicated(self, blocks: Sequence[Tensor], texts: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the blocks of query, key and value, with this rank's heads of the replicated tokens after the sharded
        ones.
        """
        index = self.mesh.ulysses.index
        return [
            block if text is None else torch.cat([block, text.narrow(1, *heads[index])], dim=2)
            for block, text, heads in zip(blocks, texts, self._heads, strict=True)
        ]

    # -- out

    @cached_property
    def _leaving(self) -> SlicedAllToAll:
        layouts, heads = [self.query_layout], [self.heads.of_query]
        return self.transfer(layouts, heads, self._num_common, to_heads=False, comm_dtype=self._comm_dtype)

    @cached_property
    def start_leave(self) -> Start:
        """Starts the exchange of the output: ``[B, H_local, S_block, D_v]`` becomes ``[B, H, S_local, D_v]``, in which
        every rank gets all heads of the replicated tokens.
        """
        return self._leaving.start if self._num_common is None else self._start_leave_with_replicated

    def _start_leave_with_replicated(self, tensors: Sequence[Tensor]) -> Finish:
        (out,) = tensors
        finish = self._leaving.start((out, self.replicated_of(out, self.query_layout)))
        return lambda: (join_kinds(finish(), self.query_layout, self.mesh.rank),)

    @staticmethod
    def replicated_of(block: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the replicated tokens of a block, which follow the sharded ones."""
        number = num_replicated(layout)
        return block.narrow(2, block.shape[2] - number, number)

    # -- gradients

    @cached_property
    def _gradient_entering(self) -> SlicedAllToAll:
        return self.transfer([self.query_layout], [self.heads.of_query], self._num_common, to_heads=True)

    def enter_gradient(self, grad_out: Tensor) -> Tensor:
        """Run the transpose of :attr:`start_leave`."""
        kinds = split_by_kind(grad_out, self.query_layout, self.mesh.rank)
        return _cat(self._gradient_entering.start([x for x in kinds if x is not None])())

    @cached_property
    def _gradients_leaving(self) -> SlicedAllToAll:
        return self.transfer(self._layouts, self._heads, to_heads=False)

    def leave_gradients(self, *grads: Tensor) -> list[Tensor]:
        """Run the transpose of :attr:`start_enter` for the gradients of query, key and value."""
        results = list(self._gradients_leaving.start(grads)())
        for index, (grad, heads, layout) in enumerate(zip(grads, self._heads, self._layouts, strict=True)):
            if layout.replicated:
                own = self.replicated_of(grad, layout)
                text = own.new_zeros(own.shape[0], results[index].shape[1], *own.shape[2:])
                text.narrow(1, *heads[self.mesh.ulysses.index]).copy_(own)
                results[index] = join_kinds((results[index], text), layout, self.mesh.rank)
        return results


def num_replicated(layout: SequenceLayout) -> int:
    return sum([segment.total for segment in layout.replicated])


def split_by_kind(x: Tensor, layout: SequenceLayout, rank: int) -> tuple[Tensor, Tensor | None]:
    """Return the sharded and the replicated tokens of ``x``, ``[B, H, S_local, D]``; None instead of the latter if
    there are none.
    """
    if not layout.replicated:
        return x, None
    parts = x.split([segment.size(rank, layout.ranks) for segment in layout.segments], dim=2)
    pairs = list(zip(layout.segments, parts, strict=True))
    sharded, replicated = ([part for segment, part in pairs if segment.replicated == kind] for kind in (False, True))
    return _cat(sharded) if sharded else x[:, :, :0], _cat(replicated)


def join_kinds(kinds: Sequence[Tensor], layout: SequenceLayout, rank: int) -> Tensor:
    """Undo :func:`split_by_kind`. The result has the memory layout of SDPA's result."""
    starts, parts = [0, 0], []
    for segment in layout.segments:
        kind, length = int(segment.replicated), segment.size(rank, layout.ranks)
        parts.append(kinds[kind].transpose(1, 2).narrow(1, starts[kind], length))
        starts[kind] += length
    return torch.cat(parts, dim=1).transpose(1, 2)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
