"""Ring attention: key and value blocks are passed around the ring, and partial results merge by lse
(arXiv:2310.01889).

R ring ranks need R - 1 hops of one buffer with a key and a value block. Per hop, rank i sends B · H_kv ·
S_block · (D + D_v) elements, where S_block is the length of the block that it passes on. The next block is in
flight while attention to the current one is computed, so two blocks are in memory in addition to the rank's
own. A replicated segment is not sent: each rank attends to it once, together with its own sharded keys.

With ``rotate_method="allgather"`` one collective gathers all blocks while attention to the rank's own is
computed. It sends the same number of bytes if all blocks have equal lengths (otherwise shorter ones are
padded), and holds R blocks in memory.

The host launches one operator to pack, and per block one attention, one hop and one merge. With
``backend="triton"`` attention continues from the earlier blocks' result, without a merge.

The gradient (:mod:`para_core.attention.gradients.ring`) passes the blocks around again.

The styles ``"alltoall"`` and ``"allgather"`` of ``rotate_method``; :mod:`.direct_ring`, :mod:`.gathered` and
the sparse attention use :class:`Packing`, too. Tests: tests/attention/test_exactness.py, and
tests/attention/test_traffic.py for bytes and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend, Block
from para_core.attention.pack_ops import as_numbers
from para_core.attention.ring_plan import OWN_BLOCK, Hop, RingPlan, RingStyle
from para_core.attention.wire import AS_IT_IS, Wire
from para_core.distributed.collectives import start_all_gather, start_ring_shift, wait
from para_core.kernels.pack_reference import CopyRegion
from para_core.layout.runs import take


class Packing:
    """The format in which a ring rank sends keys and values, ``[B, H, S, D]`` and ``[B, H, S, D_v]``: one
    flat buffer.

    Args:
        key, value: Tensors whose batch, heads, widths and dtype are those of all blocks.
        lengths: The number of tokens that each ring rank sends.
        wire: The format in which numbers are sent.
    """

    def __init__(self, key: Tensor, value: Tensor, lengths: Sequence[int], *, wire: Wire = AS_IT_IS) -> None:
        self._wire, self._dtype, self._lengths = wire, key.dtype, lengths
        self._batch, self._heads, _, self._width = key.shape
        self._value_width = value.shape[3]
        # These are the numbers of buffer elements per token and head, for keys and for values.
        self._rows = self._width + wire.row_padding, self._value_width + wire.row_padding
        self._numel_of_token = self._batch * self._heads * sum(self._rows)

    def numel(self, rank: int) -> int:
        """Return the number of elements of the buffer that ring rank ``rank`` sends."""
        return self._lengths[rank] * self._numel_of_token

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the buffer of ``key`` and ``value``, in their dtype unless the wire rounds them: gradients
        are packed in float32.
        """
        if self._wire.needs_regions:
            numel = key.shape[2] * self._numel_of_token
            return self._wire.pack([key, value], self._regions(key.shape[2]), numel)
        if self._width == self._value_width:
            return torch.stack([key, value]).view(-1)
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, buffer: Tensor, rank: int) -> Block:
        """Return the keys and values of a buffer from ring rank ``rank``: views, unless the format has to be undone."""
        rows = (self._batch, self._heads, self._lengths[rank])
        if self._wire.needs_regions:
            sizes = [*rows, self._width, *rows, self._value_width]
            key, value = self._wire.unpack(buffer, self._regions(rows[2]), sizes, self._dtype)
            return key, value
        if self._width == self._value_width:
            both = buffer.view(2, *rows, self._width)
            return both[0], both[1]
        keys, values = buffer.split([prod(rows) * self._width, prod(rows) * self._value_width])
        return keys.view(*rows, self._width), values.view(*rows, self._value_width)

    def pad(self, buffer: Tensor) -> Tensor:
        """Return ``buffer``, this rank's, with zeros up to the size of the largest buffer, for an all-gather."""
        missing = self._largest_numel() - buffer.numel()
        if missing == 0:
            return buffer
        return torch.cat([buffer, buffer.new_zeros(missing)])

    def unpack_gathered(self, buffers: Tensor, rank: int) -> Block:
        """Return the keys and values of ring rank ``rank``, given the padded buffers of all ranks."""
        return self.unpack(buffers.narrow(0, rank * self._largest_numel(), self.numel(rank)), rank)

    def _largest_numel(self) -> int:
        """Return the number of elements of the largest buffer. This is asked once per ring rank in each call."""
        return max(self._lengths) * self._numel_of_token

    def _regions(self, length: int) -> list[int]:
        """Return the regions of the keys and of the values of ``length`` tokens in the buffer, as integers."""
        key, value = (self._heads * row for row in self._rows)
        run = 0, length, 0, self._heads
        return as_numbers(
            [CopyRegion(0, *run, 0, key), CopyRegion(1, *run, self._batch * length * key, value)]
        )


# The two generators below send this rank's packed block, ``sent``, and yield ``local_block``, this rank's,
# first, then those that arrive. Communication runs while the caller computes. The caller must take all
# blocks, because each rank waits for the sends of the others, and must drop each block before it asks for the
# next one, or one more block stays in memory. With gradients enabled, the generators append the received
# buffers to ``received``, so that the caller can make the result depend on them.
Bring = Callable[[Block, Tensor, Packing, RingPlan, list[Tensor]], Iterator[tuple[Hop, Block]]]


def pass_on_blocks(
    local_block: Block, sent: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Hop, Block]]:
    """Yield ``(hop, block)`` for the keys and values of each ring rank, this rank's own first.

    Blocks are passed on from neighbour to neighbour. Collective: R - 1 hops. Only for a plan with hops.
    """
    hops, dim = plan.hops, plan.dim
    arriving = [start_ring_shift(sent, packing.numel(hops[0].source), dim)]
    del sent
    yield OWN_BLOCK, local_block
    for number, hop in enumerate(hops, start=1):
        # Remove the finished collective from the list, because it keeps the buffer that it sent in memory.
        buffer = wait(arriving.pop())
        if torch.is_grad_enabled():
            received.append(buffer)
        if number < len(hops):
            arriving.append(start_ring_shift(buffer, packing.numel(hops[number].source), dim))
        yield hop, packing.unpack(buffer, hop.source)


def gather_blocks(
    local_block: Block, sent: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Hop, Block]]:
    """Yield ``(hop, block)`` for the keys and values of each ring rank, this rank's own first, by one
    all-gather. Collective.
    """
    arriving = start_all_gather(packing.pad(sent), plan.dim)
    del sent
    yield OWN_BLOCK, local_block
    blocks = wait(arriving)
    if torch.is_grad_enabled():
        received.append(blocks)
    for hop in plan.hops:
        yield hop, packing.unpack_gathered(blocks, hop.source)


class Ring(RingStyle):
    """The ring in which blocks are passed on from neighbour to neighbour."""

    gradient = "gradients.ring:ring_backward"
    # The generator that brings the blocks.
    bring: Bring = staticmethod(pass_on_blocks)

    def over_ring(self, attend: Attend) -> Attend:
        """Return attention to the keys of all ring ranks: ``attend`` for each block, this rank's own first.

        It takes this rank's keys and values, at the positions ``plan.key_runs(0)``.
        """
        plan, bring, wire = self.plan, self.bring, self.plan.spec.options.wire

        def forward(into: Accumulator, key: Tensor, value: Tensor, _: int, is_last: bool) -> None:
            if not plan.hops:
                attend(into, key, value, 0, is_last)
                return
            packing = Packing(key, value, plan.block_sizes, wire=wire)
            last_hop = plan.hops[-1]
            # Do not keep what is packed here, or one more block would be in memory.
            for hop, block in bring(
                (key, value), pack_sent_keys(packing, key, value, plan), packing, plan, into.received
            ):
                attend(into, *block, hop.step, is_last and hop is last_hop)
                # Drop the block here, or three received blocks would be in memory while the next hop is in
                # flight.
                del block

        return forward


class GatheredRing(Ring):
    """The ring in which one collective gathers all blocks."""

    bring = staticmethod(gather_blocks)


def pack_sent_keys(packing: Packing, key: Tensor, value: Tensor, plan: RingPlan) -> Tensor:
    """Return the buffer with the keys and values of this rank's block that are sent: all but the replicated ones."""
    if plan.has_replicated_keys:
        return packing.pack(take(key, 2, plan.sent_runs), take(value, 2, plan.sent_runs))
    return packing.pack(key, value)
