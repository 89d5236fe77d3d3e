"""Ring attention: key and value blocks travel, partial results merge by lse (arXiv:2310.01889).

R ring ranks need R - 1 hops of one buffer that holds a key and a value block; the last hop is not sent. Per hop, rank i
sends B · H_kv · S_block · (D + D_v) elements, S_block being the length of the block that it passes on. While a block is
computed, the next one is in flight: two of them are in memory, beside a rank's own. A replicated segment never travels: it is
attended to once, together with a rank's own block.

Gathered (``rotate_method="allgather"``), all blocks arrive in one collective, while a rank's own is computed: as many bytes
where blocks are equally long (else shorter ones are filled up), R blocks at once in memory.

With a block mask, blocks do not go round: each rank sends its own straight to the ranks that see any of it. Where no rank sees
the block of the one s before it, there is no collective for s.

Launches: one to pack, and per block one of attention, one hop and one merge. With ``backend="triton"`` attention continues from what
was found for the blocks before: no merge.

Backward, the blocks travel again, and behind each of them the gradient that the ranks before have found for it (in
float32, for 16-bit input, too): R - 1 hops each. Nothing is saved but query, key, value, mask, out and lse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from para_core.attention.blocks import Block, BlockAttention, BlockGradients, LocalAttention, add_autograd_dependency
from para_core.attention.hooks import WireFormat
from para_core.attention.pack_ops import as_numbers
from para_core.attention.ring_plan import OWN, Hop, RingPlan
from para_core.attention.tiles import put, take
from para_core.distributed.collectives import Travelling, start_all_gather, start_ring_shift, wait
from para_core.kernels.exchange_reference import CopyRegion

# -- how blocks travel


class Packing:
    """Keys and values of a ring rank in one flat buffer: as they are, or rounded.

    Args:
        key, value: ``[B, H, S, D]``, ``[B, H, S, D_v]``, of whatever length.
        lengths: tokens that each ring rank packs.
        wire: not exact: they are rounded by it.
    """

    def __init__(self, key: Tensor, value: Tensor, lengths: Sequence[int], *, wire: WireFormat | None = None) -> None:
        self._wire, self._dtype, self._lengths = wire, key.dtype, lengths
        self._batch, self._heads, _, self._width = key.shape
        self._value_width = value.shape[3]
        # Elements of the buffer for a token and head.
        self._rows = self._width, self._value_width
        if wire is not None:
            self._rows = wire.row_size(self._width), wire.row_size(self._value_width)

    def numel(self, rank: int) -> int:
        """Elements of the buffer of a ring rank."""
        return self._batch * self._heads * self._lengths[rank] * sum(self._rows)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        if self._wire is not None:
            numel = self._batch * self._heads * key.shape[2] * sum(self._rows)
            return self._wire.pack([key, value], self._regions(key.shape[2]), numel)
        if self._width == self._value_width:
            return torch.stack([key, value]).view(-1)
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, buffer: Tensor, rank: int) -> Block:
        """What a ring rank packed; views, where nothing was rounded."""
        rows = (self._batch, self._heads, self._lengths[rank])
        if self._wire is not None:
            sizes = [*rows, self._width, *rows, self._value_width]
            key, value = self._wire.unpack(buffer, self._regions(rows[2]), sizes, self._dtype)
            return key, value
        if self._width == self._value_width:
            both = buffer.view(2, *rows, self._width)
            return both[0], both[1]
        keys, values = buffer.split([prod(rows) * self._width, prod(rows) * self._value_width])
        return keys.view(*rows, self._width), values.view(*rows, self._value_width)

    def _regions(self, length: int) -> list[int]:
        """Of so many tokens, rounded: the keys, and behind them the values."""
        key, value = (self._heads * row for row in self._rows)
        run = 0, length, 0, self._heads
        return as_numbers([CopyRegion(0, *run, 0, key), CopyRegion(1, *run, self._batch * length * key, value)])


# How what each rank has packed, ``sent``, gets to the others: these give the blocks that this rank sees, its own first. The next
# one is in flight while the caller computes. They let go of a block before they wait for the next: so must who takes them. What
# autograd follows is added to ``received``.


def ring_pass(
    own: Block, sent: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Hop, Block | None]]:
    """Each rank passes on what it got: neighbours talk to neighbours only.

    With a block mask, each sends its block straight to those that see any of it; None where another got one, and this rank none.
    """
    hops, dim = plan.hops, plan.dim
    passes_on = plan.spec.options.block_mask is None

    def start(hop: Hop) -> Travelling:
        if passes_on:
            return start_ring_shift(sent, packing.numel(hop.source), dim)
        # Where autograd follows each collective, they go back in the order in which they came, on every rank.
        x = add_autograd_dependency(sent if hop.sends else sent[:0], received[-1:])
        return start_ring_shift(x, packing.numel(hop.source) if hop.receives else 0, dim, distance=hop.step)

    arriving = [start(hops[0])]
    yield OWN, own
    for number, hop in enumerate(hops, start=1):
        buffer = wait(arriving.pop())  # what is done still holds what it sent
        if torch.is_grad_enabled():
            received.append(buffer)
        if passes_on:
            sent = buffer
        if number < len(hops):
            arriving.append(start(hops[number]))
        yield hop, packing.unpack(buffer, hop.source) if hop.receives else None


def all_gather_kv(
    own: Block, sent: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Hop, Block | None]]:
    """All of them in one collective."""
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
    key: Tensor, value: Tensor, packing: Packing, plan: RingPlan, received: list[Tensor], *, gather: bool = False
) -> Iterable[tuple[Hop, Block | None]]:
    if not plan.hops:
        return [(OWN, (key, value))]
    own = (key, value)
    if plan.has_replicated_keys:
        key, value = (take(x, 2, plan.travels) for x in own)
    sent = packing.pack(key, value)
    return (all_gather_kv if gather else ring_pass)(own, sent, packing, plan, received)


# -- forward


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: RingPlan,
    *,
    heads: Tensor | None = None,
    attn_func: LocalAttention | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this ring block's queries over the keys of all ring blocks.

    Args:
        query: ``[B, H, S_q, D]``, as ``plan.query_runs`` says.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``, likewise.
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``: rows as ``query``, columns by position in the whole sequence.
        heads: the key head of each query head, ``[H]``; None if they are grouped evenly.
        attn_func: computes attention on one device; None: ``plan.spec.options.backend``.

    Returns:
        ``[B, H, S_q, D_v]`` in query's dtype, and lse ``[B, H, S_q]``.
    """
    attention = BlockAttention(
        query,
        mask,
        plan.tiling,
        scale=plan.spec.scale,
        backend=plan.spec.options.backend,
        heads=heads,
        attn_func=attn_func,
    )
    packing = Packing(key, value, plan.block_sizes, wire=plan.wire)
    received: list[Tensor] = []
    last_hop = plan.hops[-1] if plan.hops else OWN
    gather = plan.spec.options.rotate_method == "allgather" and plan.spec.options.block_mask is None
    for hop, block in _blocks(key, value, packing, plan, received, gather=gather):
        if block is not None:
            attention.add(block, hop.step, is_last=hop is last_hop)
        # Or three blocks would be in memory while the next hop is on its way.
        del block
    out, lse = attention.result(key, value)
    if out.dtype != query.dtype:
        out = out.to(query.dtype)
    return add_autograd_dependency(out, [query, key, value, *received]), lse


# -- backward


def ring_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: RingPlan,
    *,
    heads: Tensor | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if asked for, mask; args as in :func:`ring_attention`."""
    gradients = BlockGradients(
        grad_out,
        query,
        out,
        lse,
        mask,
        plan.tiling,
        scale=plan.spec.scale,
        backend=plan.spec.options.backend,
        heads=heads,
        mask_gradient=mask_gradient,
    )
    grad_key, grad_value = _key_gradients(gradients, key, value, plan)
    grad_query, grad_mask = gradients.result()
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_mask


def _key_gradients(gradients: BlockGradients, key: Tensor, value: Tensor, plan: RingPlan) -> list[Tensor]:
    """The gradients of this rank's keys and values.

    What was found for a block travels behind it, and at last home; with a block mask, from each rank straight home.
    """
    dim, packing = plan.dim, Packing(key, value, plan.block_sizes)
    own: list[Tensor] = []
    arriving: list[Travelling] = []  # on its way while this rank computes its own share
    for hop, block in _blocks(key, value, packing, plan, []):
        grads = [] if block is None else gradients.add(block, hop.step)
        del block
        if hop.step == 0:
            own = grads
        elif plan.spec.options.block_mask is None:
            if arriving:
                earlier = packing.unpack(wait(arriving.pop()), hop.source)
                grads = [grad.add_(other) for grad, other in zip(grads, earlier, strict=True)]
            arriving.append(start_ring_shift(packing.pack(*grads), packing.numel(plan.source(hop.step + 1)), dim))
        else:
            sent = packing.pack(*grads) if grads else own[0].new_empty(0)
            arrives = packing.numel(dim.index) if hop.sends else 0
            arriving.append(start_ring_shift(sent, arrives, dim, distance=-hop.step))
    for buffer in map(wait, arriving):
        if buffer.numel():
            for total, part in zip(own, packing.unpack(buffer, dim.index), strict=True):
                put(total, 2, plan.travels, part)
    return own
