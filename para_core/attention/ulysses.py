"""Ulysses: exchange a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Each attention call runs one all-to-all before attention, for query, key and value together (in), and one after it, for
the output (out). With S_r tokens and H_r heads on rank r, and e bytes per element, rank r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split like :func:`torch.tensor_split`. A rank gets the key heads that its query heads need, so several ranks
get the same key head if there are fewer key heads than ranks. A replicated segment is not sent on the way in, because
each rank takes its own heads of it; its output is gathered over heads.

The number of launches does not depend on the number of ranks: one strided copy packs the slices of all peers that have
equal sizes. If heads and tokens divide evenly, this is one concatenation before the first all-to-all, one copy after
the second and, with more than one sample, one copy before it.

The backward runs the transposed all-to-alls: one for the gradient of the output (those of replicated tokens are summed
over ranks), and one for the gradients of query, key and value together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from para_core.attention.peer_slices import PeerSlices
from para_core.attention.spec import AttentionSpec
from para_core.attention.transfer import SlicedAllToAll
from para_core.distributed.cached_property import cached_property
from para_core.layout.sequence import Run, Segment, SequenceLayout

# A Start is a function that begins the exchange of some tensors and returns a Finish: a function that waits for the
# exchange and returns its results.
Finish = Callable[[], Sequence[Tensor]]
Start = Callable[[Sequence[Tensor]], Finish]


@dataclass(frozen=True)
class Heads:
    """The query heads and key heads that each of ``ranks`` Ulysses ranks computes, as runs ``(start, count)``."""

    num_heads: int
    num_kv_heads: int
    ranks: int

    @cached_property
    def of_query(self) -> tuple[Run, ...]:
        """The query heads of each rank, split like ``torch.tensor_split``."""
        heads = Segment("heads", self.num_heads)
        return tuple([heads.runs(rank, self.ranks)[0] for rank in range(self.ranks)])

    @cached_property
    def of_key(self) -> tuple[Run, ...]:
        """The key heads that the query heads of each rank need. Neighbouring ranks may need the same key head."""
        if self.num_kv_heads == self.num_heads:
            return self.of_query
        group = self.num_heads // self.num_kv_heads
        return tuple(
            [
                (start // group, -(-(start + count) // group) - start // group if count else 0)
                for start, count in self.of_query
            ]
        )

    def key_of_each_query(self, rank: int, device: torch.device) -> Tensor | None:
        """Return the index of the key head of each query head of ``rank``, both counted from 0 there.

        Return None if query heads form groups of equal size, and group i uses key head i.
        """
        (start, count), (first_key, num_keys) = self.of_query[rank], self.of_key[rank]
        group = self.num_heads // self.num_kv_heads if self.num_kv_heads else 1
        if start % group == 0 and count == num_keys * group:
            return None
        return torch.arange(start, start + count, device=device) // group - first_key


class UlyssesPlan:
    """The Ulysses exchanges of one attention call, forward and backward.

    A *block* is all tokens of a Ulysses group, with some of the heads: the sharded tokens of the group's ranks,
    followed by the replicated tokens. With ``comm_dtype`` the tensors of the forward are rounded for sending.
    """

    def __init__(self, spec: AttentionSpec, heads: Heads) -> None:
        query_layout, key_layout = spec.query_layout, spec.key_layout
        self.query_layout, self.key_layout = query_layout, key_layout
        self.mesh, self.heads = spec.mesh, heads
        self._comm_dtype = spec.options.comm_dtype
        # These two tuples are in the order query, key, value.
        self._layouts = (query_layout, key_layout, key_layout)
        self._heads = (heads.of_query, heads.of_key, heads.of_key)
        self._replicates = bool(query_layout.replicated or key_layout.replicated)

    def token_sizes(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Return the number of sharded tokens that each rank of this rank's Ulysses group holds."""
        first = self.mesh.ring.index * self.mesh.ulysses.size
        return tuple([layout.sharded_size(rank) for rank in range(first, first + self.mesh.ulysses.size)])

    def block_size(self, layout: SequenceLayout) -> int:
        """Return the number of tokens in a block: the sharded ones of this Ulysses group, and all replicated ones."""
        return sum(self.token_sizes(layout)) + num_replicated(layout)

    def transfer(
        self,
        layouts: Sequence[SequenceLayout],
        heads: Sequence[tuple[Run, ...]],
        num_common: int | None = None,
        *,
        to_heads: bool,
        comm_dtype: torch.dtype | None = None,
    ) -> SlicedAllToAll:
        """Return an all-to-all of sharded tokens between local tensors and blocks.

        A local tensor is ``[B, H, S_local, D]``, a block is ``[B, H_local, sharded tokens of the group, D]``.

        Args:
            layouts, heads: For each tensor, its layout, and the heads that each Ulysses rank computes.
            num_common: If not None, one more tensor with this number of replicated tokens is exchanged. From blocks to
                local tensors, every rank gets all heads; in reverse, the contributions of all ranks are summed.
            to_heads: Whether to exchange local tensors for blocks; otherwise the reverse.
            comm_dtype: The dtype to which tensors are rounded for sending (not exact); None to send them unchanged.
        """
        index, ranks = self.mesh.ulysses.index, self.mesh.ulysses.size
        local, block = [], []
        for layout, of_peers in zip(layouts, heads, strict=True):
            sizes, own_heads = self.token_sizes(layout), ((0, of_peers[index][1]),) * ranks
            tokens = tuple(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))
            local.append(PeerSlices(((0, tokens[index][1]),) * ranks, of_peers))
            block.append(PeerSlices(tokens, own_heads))
        if num_common is not None:
            common = ((0, num_common),) * ranks
            local.append(PeerSlices(common, of_peers))
            block.append(PeerSlices(common, own_heads))
        sent, arriving = (local, block) if to_heads else (block, local)
        return SlicedAllToAll(sent, arriving, self.mesh.ulysses, comm_dtype=comm_dtype)

    @cached_property
    def _num_common(self) -> int | None:
        """The number of replicated queries; None if the query layout has no replicated segment."""
        return num_replicated(self.query_layout) if self.query_layout.replicated else None

    @cached_property
    def _entering(self) -> SlicedAllToAll:
        return self.transfer(self._layouts, self._heads, to_heads=True, comm_dtype=self._comm_dtype)

    @cached_property
    def start_enter(self) -> Start:
        """A function that starts the all-to-all of ``(query, key, value)``, each ``[B, H, S_local, D]``.

        It returns a function that waits, and returns their blocks, ``[B, H_local, S_block, D]``. Replicated tokens are
        not sent: each rank takes its own heads of them.
        """
        return self._start_enter_with_replicated if self._replicates else self._entering.start

    def _start_enter_with_replicated(self, tensors: Sequence[Tensor]) -> Finish:
        kinds = [split_by_kind(x, layout, self.mesh.rank) for x, layout in zip(tensors, self._layouts, strict=True)]
        finish = self._entering.start([sharded for sharded, _ in kinds])
        index = self.mesh.ulysses.index

        def with_own_heads() -> list[Tensor]:
            return [
                block if text is None else torch.cat([block, text.narrow(1, *heads[index])], dim=2)
                for block, (_, text), heads in zip(finish(), kinds, self._heads, strict=True)
            ]

        return with_own_heads

    @cached_property
    def _leaving(self) -> SlicedAllToAll:
        layouts, heads = [self.query_layout], [self.heads.of_query]
        return self.transfer(layouts, heads, self._num_common, to_heads=False, comm_dtype=self._comm_dtype)

    @cached_property
    def start_leave(self) -> Start:
        """A function that starts the all-to-all of ``(out,)``, the output's block ``[B, H_local, S_block, D_v]``.

        It returns a function that waits, and returns all heads of this rank's tokens, ``([B, H, S_local, D_v],)``.
        """
        return self._leaving.start if self._num_common is None else self._start_leave_with_replicated

    def _start_leave_with_replicated(self, tensors: Sequence[Tensor]) -> Finish:
        (out,) = tensors
        finish = self._leaving.start((out, self.replicated_of(out, self.query_layout)))
        return lambda: (join_kinds(finish(), self.query_layout, self.mesh.rank),)

    @staticmethod
    def replicated_of(block: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the replicated tokens of a block, which are its last tokens."""
        number = num_replicated(layout)
        return block.narrow(2, block.shape[2] - number, number)

    @cached_property
    def _gradient_entering(self) -> SlicedAllToAll:
        return self.transfer([self.query_layout], [self.heads.of_query], self._num_common, to_heads=True)

    def enter_gradient(self, grad_out: Tensor) -> Tensor:
        """Exchange the gradient of the local output for that of its block: the transpose of :attr:`start_leave`."""
        kinds = split_by_kind(grad_out, self.query_layout, self.mesh.rank)
        return _cat(self._gradient_entering.start([x for x in kinds if x is not None])())

    @cached_property
    def _gradients_leaving(self) -> SlicedAllToAll:
        return self.transfer(self._layouts, self._heads, to_heads=False)

    def leave_gradients(self, *grads: Tensor) -> list[Tensor]:
        """Exchange gradients of the blocks for those of the local tensors: the transpose of :attr:`start_enter`."""
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
    """Return the sharded tokens of ``x``, ``[B, H, S_local, D]``, and the replicated ones (None if there are none)."""
    if not layout.replicated:
        return x, None
    parts = x.split([segment.size(rank, layout.ranks) for segment in layout.segments], dim=2)
    pairs = list(zip(layout.segments, parts, strict=True))
    sharded, replicated = ([part for segment, part in pairs if segment.replicated == kind] for kind in (False, True))
    return _cat(sharded) if sharded else x[:, :, :0], _cat(replicated)


def join_kinds(kinds: Sequence[Tensor], layout: SequenceLayout, rank: int) -> Tensor:
    """Undo :func:`split_by_kind`. The result has the memory layout of SDPA's result, ``[B, S, H, D]``."""
    starts, parts = [0, 0], []
    for segment in layout.segments:
        kind, length = int(segment.replicated), segment.size(rank, layout.ranks)
        parts.append(kinds[kind].transpose(1, 2).narrow(1, starts[kind], length))
        starts[kind] += length
    return torch.cat(parts, dim=1).transpose(1, 2)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
