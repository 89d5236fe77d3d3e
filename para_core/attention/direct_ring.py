"""A ring in which each rank sends its block directly to the ranks that see any of its keys, as a block mask
says.

The hop over a distance of s ranks is left out if no rank sees a key of the rank s positions before it. A call
with a block mask takes this style, whatever ``rotate_method`` is (:meth:`BlockMask.style_of`), unless that
brings all keys to every rank.

With R ring ranks there are between 0 and R - 1 hops, each an all-to-all over the whole ring in which idle
ranks take part with 0 elements. In the hop over distance s, ring rank i sends

    B · e · H_kv · (D + D_v) · T_i bytes if ring rank i + s (modulo R) sees any of its keys, else 0,

where T_i is its number of sharded keys, and e the bytes per element. Three blocks are in memory in addition
to the rank's own keys and values: the packed copy that it sends, which lives until the last hop, the block
with which it computes, and the next one, which is in flight.

:class:`~para_core.modes.block_sparse.BlockSparseAttnMode` leads here, through para_core/attention/usp.py. The
gradient is in para_core/attention/gradients/direct_ring.py. Tests: tests/attention/test_block_sparse.py
(results, hops and bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend, Block
from para_core.attention.block_sparse import BlockMask
from para_core.attention.local import add_autograd_dependency
from para_core.attention.ring import Packing, pack_sent_keys
from para_core.attention.ring_plan import RingStyle
from para_core.distributed.cached_property import cached_property
from para_core.distributed.collectives import Travelling, start_ring_shift, wait


class DirectHop(NamedTuple):
    """The exchange over a distance of ``step`` ring ranks, in which all ring ranks take part.

    ``sends`` tells whether this rank sends its block to the rank ``step`` positions after it, and
    ``receives`` whether it receives the block of ``source``, the rank ``step`` positions before it.
    """

    step: int
    source: int
    sends: bool
    receives: bool


# Before all hops a rank computes with its own block. As for ring_plan.OWN_BLOCK, only the step is read.
_OWN_BLOCK = DirectHop(0, 0, sends=False, receives=False)


class DirectRing(RingStyle):
    """The ring of a call with a block mask. Other masks by position are ignored where hops are chosen: they
    can only hide more keys.

    A call has at least one :class:`BlockMask` among ``plan.spec.positional_masks``, which all ranks know whole.
    """

    gradient = "gradients.direct_ring:direct_ring_backward"

    @cached_property
    def hops(self) -> list[DirectHop]:
        """The exchanges in which any rank sends a block.

        They have the same steps on every rank, in the same order. Otherwise ranks would wait for each other
        forever.
        """
        plan = self.plan
        if not plan.rotates:
            return []
        spec, size, index = plan.spec, plan.dim.size, plan.dim.index
        masks = [mask for mask in spec.positional_masks if isinstance(mask, BlockMask)]
        queries = [spec.queries.runs(rank) for rank in range(size)]
        keys = [spec.keys.runs(rank, replicated=False) for rank in range(size)]
        hops = []
        for step in range(1, size):
            sees = [
                all(mask.sees_any(queries[rank], keys[(rank - step) % size]) for mask in masks)
                for rank in range(size)
            ]
            if any(sees):
                hops.append(DirectHop(step, plan.source(step), sees[(index + step) % size], sees[index]))
        return hops

    def over_ring(self, attend: Attend) -> Attend:
        """Return attention to the keys of all ring ranks that this rank's queries see."""
        plan, wire = self.plan, self.plan.spec.options.wire

        def forward(into: Accumulator, key: Tensor, value: Tensor, _block: int, _is_last: bool) -> None:
            # The hops number the blocks, as in every ring.
            packing = Packing(key, value, plan.block_sizes, wire=wire)
            for hop, block in self.blocks(key, value, packing, into.received):
                if block is not None:
                    # No block counts as the last: with a positional mask, such as the block mask, attention goes
                    # tile by tile, and a later tile may have the same queries (blocks.attend_by_backend).
                    attend(into, *block, hop.step, False)
                # Drop the block here, or three received blocks would be in memory while the next hop is in
                # flight.
                del block

        return forward

    def blocks(
        self, key: Tensor, value: Tensor, packing: Packing, received: list[Tensor]
    ) -> Iterator[tuple[DirectHop, Block | None]]:
        """Yield ``(hop, block)``, this rank's own block first; the block is None if this rank receives none.

        Each block is in flight while the caller computes with the one before; the caller must drop it before
        it asks for the next, or one more stays in memory. ``received`` gets the buffers on which a result
        with gradient must depend. The backward (gradients/direct_ring.py) passes through the same blocks.
        Collective: the caller must take them all.
        """
        hops = self.hops
        if not hops:
            yield _OWN_BLOCK, (key, value)
            return
        sent = pack_sent_keys(packing, key, value, self.plan)
        arriving = [self._start(hops[0], sent, packing, received)]
        yield _OWN_BLOCK, (key, value)
        for number, hop in enumerate(hops, start=1):
            buffer = wait(arriving.pop())
            if torch.is_grad_enabled():
                received.append(buffer)
            if number < len(hops):
                arriving.append(self._start(hops[number], sent, packing, received))
            if hop.receives:
                yield hop, packing.unpack(buffer, hop.source)
            else:
                yield hop, None

    def _start(self, hop: DirectHop, sent: Tensor, packing: Packing, received: list[Tensor]) -> Travelling:
        """Start ``hop``, with ``sent`` or nothing. ``received`` are the buffers of the earlier hops, if
        autograd records them.
        """
        numel = 0
        if not hop.sends:
            sent = sent[:0]
        if hop.receives:
            numel = packing.numel(hop.source)
        # The dependency makes autograd run the collectives of the backward in the same (reverse) order on
        # every rank.
        sent = add_autograd_dependency(sent, received[-1:])
        return start_ring_shift(sent, numel, self.plan.dim, distance=hop.step)
