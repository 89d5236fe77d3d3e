"""Ring attention: key and value blocks are passed around the ring, and partial results merge by lse
(arXiv:2310.01889).

R ring ranks need R - 1 hops of one buffer with a key and a value block. Per hop, rank i sends B · H_kv ·
S_block · (D + D_v) elements, where S_block is the length of the block that it passes on. The next block is in
flight while attention to the current one is computed, so two blocks are in memory in addition to the rank's
own. A replicated segment is not sent: each rank attends to it once, together with its own block.

With ``rotate_method="allgather"`` one collective gathers all blocks while attention to the rank's own is
computed. It sends the same number of bytes if all blocks have equal lengths (otherwise shorter ones are
padded), and holds R blocks in memory.

With a block mask each rank sends its block directly to the ranks that see any of its keys. The hop over a
distance of s ranks is left out if no rank sees a key of the rank s positions before it.

The host launches one operator to pack, and per block one attention, one hop and one merge. With
``backend="triton"`` attention continues from the earlier blocks' result, without a merge.

In the backward the blocks are passed around again, with R - 1 hops. The gradient of each block follows the
block with as many hops, and every rank adds its share; gradients are in float32 also for 16-bit input. Only
query, key, value, mask, out and lse are saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend, Block, QueryGradients
from para_core.attention.attention_plan import OWN, Hop, RingPlan
from para_core.attention.local import add_autograd_dependency
from para_core.attention.pack_ops import as_numbers
from para_core.distributed.collectives import Travelling, start_all_gather, start_ring_shift, wait
from para_core.kernels.pack_reference import SCALE_BYTES, CopyRegion
from para_core.layout.runs import put, take


class Packing:
    """The format in which a ring rank sends keys and values, ``[B, H, S, D]`` and ``[B, H, S, D_v]``: one
    flat buffer.

    ``lengths`` are the numbers of tokens that each ring rank sends. ``comm_dtype`` rounds to 8 bits (not
    exact).
    """

    def __init__(
        self, key: Tensor, value: Tensor, lengths: Sequence[int], *, comm_dtype: torch.dtype | None = None
    ) -> None:
        self._comm_dtype, self._dtype, self._lengths = comm_dtype, key.dtype, lengths
        self._batch, self._heads, _, self._width = key.shape
        self._value_width = value.shape[3]
        # These are the numbers of buffer elements per token and head, for keys and for values.
        scale = 0
        if comm_dtype is not None:
            scale = SCALE_BYTES
        self._rows = self._width + scale, self._value_width + scale

    def numel(self, rank: int) -> int:
        """Return the number of elements of the buffer that ring rank ``rank`` sends."""
        return self._batch * self._heads * self._lengths[rank] * sum(self._rows)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        if self._comm_dtype is not None:
            numel = self._batch * self._heads * key.shape[2] * sum(self._rows)
            regions = self._regions(key.shape[2])
            packed: Tensor = torch.ops.para_core.pack.default([key, value], regions, numel, self._comm_dtype)
            return packed
        if self._width == self._value_width:
            return torch.stack([key, value]).view(-1)
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, buffer: Tensor, rank: int) -> Block:
        """Return the keys and values of a buffer from ring rank ``rank``.
        They are views unless they were rounded.
        """
        rows = (self._batch, self._heads, self._lengths[rank])
        if self._comm_dtype is not None:
            arguments = self._regions(rows[2]), [*rows, self._width, *rows, self._value_width]
            key, value = torch.ops.para_core.unpack.default(buffer, *arguments, self._comm_dtype, self._dtype)
            return key, value
        if self._width == self._value_width:
            both = buffer.view(2, *rows, self._width)
            return both[0], both[1]
        keys, values = buffer.split([prod(rows) * self._width, prod(rows) * self._value_width])
        return keys.view(*rows, self._width), values.view(*rows, self._value_width)

    def _regions(self, length: int) -> list[int]:
        """Return the regions of the keys and of the values of ``length`` tokens in a rounded buffer, as integers."""
        key, value = (self._heads * row for row in self._rows)
        run = 0, length, 0, self._heads
        return as_numbers(
            [CopyRegion(0, *run, 0, key), CopyRegion(1, *run, self._batch * length * key, value)]
        )


# The two generators below send this rank's packed block, ``sent``, and yield this rank's own block first,
# then those that arrive. Communication runs while the caller computes. The caller must drop each block before
# it asks for the next one, or one more block stays in memory. With gradients enabled, the generators append
# the received buffers to ``received``, so that the caller can make the result depend on them.


def ring_pass(
    own: Block, sent: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Hop, Block | None]]:
    """Yield ``(hop, block)`` for the keys and values of each ring rank, this rank's own first.

    Blocks are passed on from neighbour to neighbour. With a block mask, each rank instead sends its block
    directly to the ranks that see any of its keys; the block is None in a hop in which only other ranks
    receive one.
    """
    hops, dim = plan.hops, plan.dim
    passes_on = plan.spec.options.block_mask is None

    def start(hop: Hop) -> Travelling:
        if passes_on:
            return start_ring_shift(sent, packing.numel(hop.source), dim)
        x, numel = sent, 0
        if not hop.sends:
            x = sent[:0]
        if hop.receives:
            numel = packing.numel(hop.source)
        # The dependency makes autograd run the collectives of the backward in the same (reverse) order on
        # every rank.
        x = add_autograd_dependency(x, received[-1:])
        return start_ring_shift(x, numel, dim, distance=hop.step)

    arriving = [start(hops[0])]
    yield OWN, own
    for number, hop in enumerate(hops, start=1):
        # Remove the finished collective from the list, because it keeps the buffer that it sent in memory.
        buffer = wait(arriving.pop())
        if torch.is_grad_enabled():
            received.append(buffer)
        if passes_on:
            sent = buffer
        if number < len(hops):
            arriving.append(start(hops[number]))
        if hop.receives:
            yield hop, packing.unpack(buffer, hop.source)
        else:
            yield hop, None


def all_gather_kv(
    own: Block, sent: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Hop, Block | None]]:
    """Yield ``(hop, block)`` for the keys and values of each ring rank, this rank's own first, by one all-gather."""
    sizes = [packing.numel(rank) for rank in range(plan.dim.size)]
    largest = max(sizes)
    if sent.numel() < largest:
        sent = torch.cat([sent, sent.new_zeros(largest - sent.numel())])
    arriving = start_all_gather(sent, plan.dim)
    yield OWN, own
    blocks = wait(arriving)
    if torch.is_grad_enabled():
        received.append(blocks)
    for hop in plan.hops:
        yield hop, packing.unpack(blocks.narrow(0, hop.source * largest, sizes[hop.source]), hop.source)


def _blocks(
    key: Tensor,
    value: Tensor,
    packing: Packing,
    plan: RingPlan,
    received: list[Tensor],
    *,
    gather: bool = False,
) -> Iterable[tuple[Hop, Block | None]]:
    if not plan.hops:
        return [(OWN, (key, value))]
    own = (key, value)
    if plan.has_replicated_keys:
        key, value = (take(x, 2, plan.travels) for x in own)
    sent = packing.pack(key, value)
    if gather:
        return all_gather_kv(own, sent, packing, plan, received)
    return ring_pass(own, sent, packing, plan, received)


def ring(attend: Attend, plan: RingPlan) -> Attend:
    """Return attention to the keys of all ring ranks: ``attend`` for each block, this rank's own first.

    ``forward`` takes this rank's keys and values, at the positions ``plan.key_runs(0)``. ``backward`` sums
    the gradients of this rank's keys and values over the ranks.
    """
    options = plan.spec.options
    gather = options.rotate_method == "allgather" and options.block_mask is None

    def forward(into: Accumulator, key: Tensor, value: Tensor, _: int, is_last: bool) -> None:
        packing = Packing(key, value, plan.block_sizes, comm_dtype=options.comm_dtype)
        last_hop = OWN
        if plan.hops:
            last_hop = plan.hops[-1]
        for hop, block in _blocks(key, value, packing, plan, into.received, gather=gather):
            if block is not None:
                attend.forward(into, *block, hop.step, is_last and hop is last_hop)
            # Drop the block here, or three received blocks would be in memory while the next hop is in
            # flight.
            del block

    def backward(into: QueryGradients, key: Tensor, value: Tensor, _: int) -> Block:
        return _key_gradients(attend, into, key, value, plan)

    return Attend(forward, backward)


def _key_gradients(attend: Attend, into: QueryGradients, key: Tensor, value: Tensor, plan: RingPlan) -> Block:
    """Return the gradients of this rank's keys and values. Accumulate those of query and mask in ``into``.

    The gradient of a block follows it around the ring; with a block mask every rank sends its share to the
    owner.
    """
    dim, packing = plan.dim, Packing(key, value, plan.block_sizes)
    own: Block = (key, value)
    # These gradients are in flight while this rank computes its own share.
    arriving: list[Travelling] = []
    for hop, block in _blocks(key, value, packing, plan, []):
        grads = None
        if block is not None:
            grads = attend.backward(into, *block, hop.step)
        del block
        if hop.step == 0:
            if grads is not None:
                own = grads
        elif plan.spec.options.block_mask is None and grads is not None:
            if arriving:
                for grad, other in zip(grads, packing.unpack(wait(arriving.pop()), hop.source), strict=True):
                    grad.add_(other)
            arriving.append(
                start_ring_shift(packing.pack(*grads), packing.numel(plan.source(hop.step + 1)), dim)
            )
        else:
            if grads is None:
                sent = own[0].new_empty(0)
            else:
                sent = packing.pack(*grads)
            arrives = 0
            if hop.sends:
                arrives = packing.numel(dim.index)
            arriving.append(start_ring_shift(sent, arrives, dim, distance=-hop.step))
    for buffer in map(wait, arriving):
        if buffer.numel():
            for total, part in zip(own, packing.unpack(buffer, dim.index), strict=True):
                put(total, 2, plan.travels, part)
    return own
