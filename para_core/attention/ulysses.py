"""Ulysses: exchange a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Each attention call runs one all-to-all before attention, for query, key and value together (in), and one
after it, for the output (out). With S_r sharded tokens and H_r heads on rank r, and e bytes per element, rank
r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split like :func:`torch.tensor_split`. A rank gets the key heads that its query heads need, so
several ranks get the same key head if there are fewer key heads than ranks. A replicated segment is not sent
on the way in, because each rank takes its own heads of it; its output is gathered over heads.

Keys and values arrive in the order of the sequence, as one device has them. A sequence of several sharded
segments needs one more copy for that. Queries are ordered, too, where it costs nothing or positions matter
(:attr:`~para_core.attention.spec.AttentionSpec.orders_queries`).

The number of launches does not depend on the number of ranks: one strided copy packs the slices of all peers
that have equal sizes. If heads and tokens divide evenly, this is one concatenation before the first
all-to-all, one copy after the second and, with more than one sample, one copy before it.

The backward runs the transposed all-to-alls: one for the gradient of the output (those of replicated tokens
are summed over ranks), and one for the gradients of query, key and value together.

:class:`~para_core.attention.attention_plan.AttentionPlan` makes the :class:`UlyssesPlan`, and :mod:`.usp` and
its gradient call it. How a tensor is packed is in :mod:`.swap`, :mod:`.to_heads` and :mod:`.to_tokens`.
Tests: tests/attention/test_exactness.py, and tests/attention/test_traffic.py for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.block_rows import BlockRows
from para_core.attention.spec import AttentionSpec
from para_core.attention.to_heads import ToHeads
from para_core.attention.to_tokens import ToTokens
from para_core.distributed.cached_property import cached_property
from para_core.layout.sequence import Run, Segment

# A function that exchanges some tensors, and returns the results.
Exchange = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Heads:
    """The query heads and key heads that each of ``ranks`` Ulysses ranks computes, as runs ``(start, count)``."""

    num_heads: int
    num_kv_heads: int
    ranks: int

    @cached_property
    def query_runs(self) -> tuple[Run, ...]:
        """The query heads of each rank, split like ``torch.tensor_split``."""
        heads = Segment("heads", self.num_heads)
        return tuple([heads.runs(rank, self.ranks)[0] for rank in range(self.ranks)])

    @cached_property
    def key_runs(self) -> tuple[Run, ...]:
        """The key heads that the query heads of each rank need.
        Neighbouring ranks may need the same key head.
        """
        if self.num_kv_heads == self.num_heads:
            return self.query_runs
        group = self.num_heads // self.num_kv_heads
        runs = []
        for start, count in self.query_runs:
            first, end = start // group, -(-(start + count) // group)
            if count == 0:
                end = first
            runs.append((first, end - first))
        return tuple(runs)

    def key_of_each_query(self, rank: int, device: torch.device) -> Tensor | None:
        """Return the index of the key head of each query head of ``rank``, both counted from 0 there.

        Return None if ``rank`` has a single key head or whole groups of query heads, because SDPA then pairs
        the same heads.

        >>> heads = Heads(num_heads=6, num_kv_heads=2, ranks=4)  # Of 2, 2, 1 and 1 query heads.
        >>> [heads.key_of_each_query(rank, torch.device("cpu")) for rank in range(4)]
        [None, tensor([0, 1]), None, None]
        """
        (start, count), (first_key, num_keys) = self.query_runs[rank], self.key_runs[rank]
        group = 1
        if self.num_kv_heads:
            group = self.num_heads // self.num_kv_heads
        if num_keys == 1 or (start % group == 0 and count == num_keys * group):
            return None
        return torch.arange(start, start + count, device=device) // group - first_key


class UlyssesPlan:
    """The Ulysses exchanges of one attention call, forward and backward.

    A *block* is all tokens of a Ulysses group in the order of the sequence, with some of the heads; queries
    are rank by rank if not ``ordered``. *Enter* exchanges this rank's tokens for a block, and *leave* undoes
    it. The tensors of the forward are sent in the format of the options, gradients and masks as they are.
    """

    def __init__(self, spec: AttentionSpec, heads: Heads, *, ordered: bool, one_shape: bool = False) -> None:
        self._dim, self._wire, self.heads = spec.mesh.ulysses, spec.options.wire, heads
        self._one_shape = one_shape
        first = spec.mesh.ring.index * self._dim.size
        self.queries = BlockRows(spec.query_layout, first, self._dim.size, self._dim.index, ordered=ordered)
        self.keys = self.queries
        if spec.key_layout is not spec.query_layout or not ordered:
            self.keys = BlockRows(spec.key_layout, first, self._dim.size, self._dim.index)
        # These two tuples are in the order query, key, value.
        self._rows = (self.queries, self.keys, self.keys)
        self._heads = (heads.query_runs, heads.key_runs, heads.key_runs)

    @cached_property
    def enter(self) -> Exchange:
        """A function that exchanges ``(query, key, value)``, each ``[B, H, S_local, D]``, by one all-to-all
        for their blocks, ``[B, H_local, S_block, D]``.

        Replicated tokens are not sent: each rank takes its own heads of them.
        """
        swap = ToHeads(self._rows, self._heads, self._dim, wire=self._wire, one_shape=self._one_shape)
        return swap.exchange

    @cached_property
    def leave(self) -> Exchange:
        """A function that exchanges ``(out,)``, the output's block ``[B, H_local, S_block, D_v]``, by one
        all-to-all for all heads of this rank's tokens, ``([B, H, S_local, D_v],)``. Collective, as is
        :attr:`enter`.
        """
        swap = ToTokens(
            [self.queries],
            [self.heads.query_runs],
            self._dim,
            replicated=True,
            wire=self._wire,
            one_shape=self._one_shape,
        )
        return swap.exchange

    def enter_mask(self, mask: Tensor, heads: Sequence[Run]) -> Tensor:
        """Exchange the mask's rows of this rank for those of the block. ``heads`` are the runs of the mask's
        heads that each rank gets. Collective. Differentiable, and may be traced.
        """
        return ToHeads([self.queries], [heads], self._dim).exchange([mask])[0]

    @cached_property
    def _enter_gradient(self) -> Exchange:
        return ToHeads([self.queries], [self.heads.query_runs], self._dim, replicated=True).exchange

    def enter_gradient(self, grad_out: Tensor) -> Tensor:
        """Exchange the gradient of the local output for that of its block: the transpose of :attr:`leave`.
        Collective.
        """
        return self._enter_gradient([grad_out])[0]

    @cached_property
    def _leave_gradients(self) -> Exchange:
        return ToTokens(self._rows, self._heads, self._dim).exchange

    def leave_gradients(self, *grads: Tensor) -> list[Tensor]:
        """Exchange gradients of the blocks of query, key and value for those of the local tensors: the
        transpose of :attr:`enter`. Collective.
        """
        return list(self._leave_gradients(grads))
