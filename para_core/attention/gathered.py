"""A ring with the bits of one process: all keys and values are gathered, and one attention computes a rank's
queries.

One collective gathers the blocks of all ring ranks, which are then put into the order of the sequence. It
sends the bytes of ``rotate_method="allgather"``. Nothing is merged, so a query adds up its keys in the order
of one process. That costs the overlap: no attention is computed while blocks are on their way. A rank holds
all keys and values of one call, B · H_kv / U · S · (D + D_v) elements for U Ulysses ranks, and in addition
what it received, until they are in order.

A causal call without a gradient gets a mask tensor of this rank's queries and all keys, because PyTorch's
causal mask begins at the first key: a CPU computes the same bits with it. Each call makes it again and holds
its S_q · S bools, in addition to the keys. On a GPU another backend may compute a call with a mask tensor,
with other bits.

On a CPU, queries are computed in the blocks of one process (:mod:`.query_blocks`), as the last block of a
call may get other bits; not in compiled code, and not for a gradient.

:class:`GatheredKeys` is the style of ``rotate_method="gathered"``, which ``same_bits`` needs over a ring
(``adapters/same_bits.py``). The gradient is in :mod:`para_core.attention.gradients.gathered`. Tests:
tests/attention/test_gathered.py and tests/same_bits/test_attention.py; of every style, with gradients,
tests/attention/test_exactness.py and tests/attention/test_traffic.py.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend, Block
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.query_blocks import QueryBlocks, place_in_blocks
from para_core.attention.ring import Packing, pack_sent_keys
from para_core.attention.ring_plan import RingStyle
from para_core.attention.tiles import Tiling
from para_core.distributed.cached_property import cached_property
from para_core.distributed.collectives import start_all_gather, wait
from para_core.layout.runs import join_neighbours


class GatheredKeys(RingStyle):
    """The ring in which every rank gets all keys and values, in the order of the sequence, before it attends."""

    gradient = "gradients.gathered:gathered_backward"
    has_all_keys = True

    @cached_property
    def is_local(self) -> bool:
        """Whether one call of plain SDPA can compute attention: always, with a mask tensor if the call is
        causal and this rank does not have all queries.
        """
        return True

    @cached_property
    def tiling(self) -> Tiling:
        """The pieces of this rank's queries, and the tiles of all keys that they see."""
        return self.mask_tiling

    def gather_call(self, call: LocalAttentionCall) -> LocalAttentionCall:
        """Return ``call``, to this rank's keys, with all keys. Its mask has a column for each of them.
        Collective.

        Its queries may be put among zeros (:mod:`.query_blocks`): :meth:`select_queries` takes their results.
        """
        key, value = self.gather(call.key, call.value, [])
        call = call._replace(key=key, value=value)
        if self._has_all_queries:
            return call
        if call.is_causal:
            call = call._replace(mask=self._hide_later_keys(call.mask, key.device), is_causal=False)
        if not self._uses_blocks(call.query):
            return call
        mask = call.mask
        if mask is not None and mask.shape[-2] > 1:
            mask = self._blocks.place(mask)
        return call._replace(query=self._blocks.place(call.query), mask=mask)

    def select_queries(self, out: Tensor) -> Tensor:
        """Return the results of this rank's queries from ``out``, that of a call that :meth:`gather_call` returned."""
        if self._has_all_queries or not self._uses_blocks(out):
            return out
        return self._blocks.take(out)

    def _uses_blocks(self, x: Tensor) -> bool:
        """Whether queries are computed in the blocks of one process. Lengths in a graph may be symbolic, and
        have no known blocks.
        """
        return x.is_cpu and not torch.compiler.is_compiling()

    @cached_property
    def _blocks(self) -> QueryBlocks:
        return place_in_blocks(self.plan.query_runs, self.plan.spec.query_layout.total)

    def over_ring(self, attend: Attend) -> Attend:
        """Return attention to the keys of all ring ranks, which is collective: ``attend`` for all of them at once."""

        def forward(into: Accumulator, key: Tensor, value: Tensor, _: int, is_last: bool) -> None:
            keys, values = self.gather(key, value, into.received)
            attend(into, keys, values, 0, is_last)

        return forward

    def gather(self, key: Tensor, value: Tensor, received: list[Tensor]) -> Block:
        """Return the keys and values of all ring ranks, in the order of the sequence. Collective.

        With gradients enabled, what arrives is appended to ``received``.
        """
        plan = self.plan
        if not plan.rotates:
            # All keys are here already, in the order of the sequence (AttentionSpec.keys).
            return key, value
        packing = Packing(key, value, plan.block_sizes)
        buffers = wait(start_all_gather(packing.pad(pack_sent_keys(packing, key, value, plan)), plan.dim))
        if torch.is_grad_enabled():
            received.append(buffers)
        blocks = [packing.unpack_gathered(buffers, rank) for rank in range(plan.dim.size)]
        keys = self._arrange([block[0] for block in blocks], key)
        values = self._arrange([block[1] for block in blocks], value)
        return keys, values

    def _arrange(self, blocks: list[Tensor], local: Tensor) -> Tensor:
        """Return the tokens of ``blocks``, sent by each ring rank, and the replicated ones of ``local``, in order."""
        layout = self.plan.spec.keys
        sent = [
            list(block.split([length for _, length in layout.runs(rank, replicated=False)], dim=2))
            for rank, block in enumerate(blocks)
        ]
        index = self.plan.dim.index
        replicated = [
            local.narrow(2, start, length) for start, length in layout.offsets(index, replicated=True)
        ]
        # Lengths may be symbolic, so runs are not sorted. All ranks hold equally many pieces, and the n-th
        # pieces of all ranks are neighbours in the sequence (:class:`Layout` of layout/pieces.py).
        parts: list[Tensor] = []
        for pieces in zip(*layout.pieces, strict=True):
            if pieces[0].replicated:
                parts.append(replicated.pop(0))
                continue
            of_ranks = [of_rank.pop(0) for of_rank in sent]
            if pieces[0].descending:
                of_ranks.reverse()
            parts.extend(of_ranks)
        return torch.cat(parts, dim=2)

    @cached_property
    def _has_all_queries(self) -> bool:
        """Whether this rank computes all queries, in the order of the sequence, as PyTorch's causal mask expects."""
        return join_neighbours(self.plan.query_runs) == [(0, self.plan.spec.query_layout.total)]

    def _hide_later_keys(self, mask: Tensor | None, device: torch.device) -> Tensor:
        """Return ``mask`` with the keys hidden that come after a query, for this rank's queries and all keys."""
        positions = [
            torch.arange(start, start + length, device=device) for start, length in self.plan.query_runs
        ]
        keys = torch.arange(self.plan.spec.key_layout.total, device=device)
        visible = keys <= torch.cat(positions)[None, None, :, None]
        if mask is None:
            return visible
        if mask.dtype == torch.bool:
            return mask & visible
        return mask.masked_fill(~visible, -inf)
