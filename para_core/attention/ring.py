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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from para_core.attention.approximate.wire import Wire
from para_core.attention.call import OWN, Call, Hop
from para_core.attention.local import continued_attention, local_attention_backward, local_attention_with_lse
from para_core.attention.low_rows import LowRows
from para_core.attention.merge import Merged
from para_core.attention.tiles import join_neighbours, put, take
from para_core.collectives import Travelling, start_all_gather, start_ring_shift, wait
from para_core.layout import Run

# (query, key, value, *, mask, is_causal, scale) -> out, lse: a user's own.
LocalAttention = Callable[..., tuple[Tensor, Tensor]]
Block = tuple[Tensor, Tensor]  # keys and values


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """The columns of keys at these positions, of a mask for all keys."""
    return mask if mask.shape[-1] == 1 else take(mask, -1, join_neighbours(positions))


def expand(x: Tensor, heads: Tensor | None) -> Tensor:
    """``x`` ``[B, H_kv, S, D]`` with the key head of each query head, where these are not grouped evenly."""
    return x if heads is None else x.index_select(1, heads)


# -- how blocks travel


class Packing:
    """Keys and values of a ring rank in one flat buffer: as they are, or rounded.

    Args:
        key, value: ``[B, H, S, D]``, ``[B, H, S, D_v]``, of whatever length.
        lengths: tokens that each ring rank packs.
    """

    def __init__(self, key: Tensor, value: Tensor, lengths: Sequence[int], wire: Wire | None = None) -> None:
        self._wire, self._dtype = wire, key.dtype
        self._lengths = lengths if wire is None else [length + wire.scale_rows for length in lengths]
        self._batch, self._heads, _, self._width = key.shape
        self._value_width = value.shape[3]

    def numel(self, rank: int) -> int:
        """Elements of the buffer of a ring rank."""
        return self._batch * self._heads * self._lengths[rank] * (self._width + self._value_width)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        if self._wire is not None:
            key, value = self._wire.write(key), self._wire.write(value)
        if self._width == self._value_width:
            return torch.stack([key, value]).view(-1)
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, buffer: Tensor, rank: int) -> Block:
        """What a ring rank packed; views, where nothing was rounded."""
        rows = (self._batch, self._heads, self._lengths[rank])
        if self._width == self._value_width:
            both = buffer.view(2, *rows, self._width)
            key, value = both[0], both[1]
        else:
            keys, values = buffer.split([prod(rows) * self._width, prod(rows) * self._value_width])
            key, value = keys.view(*rows, self._width), values.view(*rows, self._value_width)
        if self._wire is None:
            return key, value
        return self._wire.read(key, self._dtype), self._wire.read(value, self._dtype)


# How what each rank has packed, ``sent``, gets to the others: these give the blocks that this rank sees, its own first. The next
# one is in flight while the caller computes. They let go of a block before they wait for the next: so must who takes them. What
# autograd follows is added to ``received``.


def one_by_one(
    own: Block, sent: Tensor, packing: Packing, call: Call, received: list[Tensor]
) -> Iterator[tuple[Hop, Block | None]]:
    """Each rank passes on what it got: neighbours talk to neighbours only.

    With a block mask, each sends its block straight to those that see any of it; None where another got one, and this rank none.
    """
    hops, dim = call.hops, call.mesh.ring
    passes_on = call.options.block_mask is None

    def start(hop: Hop) -> Travelling:
        if passes_on:
            return start_ring_shift(sent, packing.numel(hop.source), dim)
        # Where autograd follows each collective, they go back in the order in which they came, on every rank.
        x = tied(sent if hop.sends else sent[:0], received[-1:])
        return start_ring_shift(x, packing.numel(hop.source) if hop.receives else 0, dim, distance=hop.step)

    arriving = [start(hops[0])]
    yield OWN, own
    for place, hop in enumerate(hops, start=1):
        buffer = wait(arriving.pop())  # what is done still holds what it sent
        if torch.is_grad_enabled():
            received.append(buffer)
        if passes_on:
            sent = buffer
        if place < len(hops):
            arriving.append(start(hops[place]))
        yield hop, packing.unpack(buffer, hop.source) if hop.receives else None


def _gathered(
    own: Block, sent: Tensor, packing: Packing, call: Call, received: list[Tensor]
) -> Iterator[tuple[Hop, Block | None]]:
    """All of them in one collective."""
    sizes = [packing.numel(rank) for rank in range(call.mesh.ring.size)]
    largest = max(sizes)
    if sent.numel() < largest:
        sent = torch.cat([sent, sent.new_zeros(largest - sent.numel())])
    arriving = start_all_gather(sent, call.mesh.ring)
    yield OWN, own
    blocks = wait(arriving)
    if torch.is_grad_enabled():
        received.append(blocks)
    for hop in call.hops:
        yield hop, packing.unpack(blocks.narrow(0, hop.source * largest, sizes[hop.source]), hop.source)


def _blocks(
    key: Tensor, value: Tensor, packing: Packing, call: Call, received: list[Tensor], *, gather: bool = False
) -> Iterable[tuple[Hop, Block | None]]:
    if not call.hops:
        return [(OWN, (key, value))]
    sent = packing.pack(take(key, 2, call.travels), take(value, 2, call.travels))
    return (_gathered if gather else one_by_one)((key, value), sent, packing, call, received)


def tied(x: Tensor, received: Sequence[Tensor]) -> Tensor:
    """``x`` and nothing of ``received``: but if autograd follows these, they have a gradient of 0, on every rank.

    A rank that needs nothing of what it got would otherwise not join in that collective's backward.
    """
    if not torch.is_grad_enabled():
        return x
    for one in received:
        if one.requires_grad:
            x = x + one[:0].sum().to(x.dtype)
    return x


# -- forward


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    *,
    heads: Tensor | None = None,
    attend: LocalAttention | None = None,
    comm_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this ring block's queries over the keys of all ring blocks.

    Args:
        query: ``[B, H, S_q, D]``, as ``call.query_runs`` says.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``, likewise.
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``: rows as ``query``, columns by position in the whole sequence.
        heads: the key head of each query head, ``[H]``; None if they are grouped evenly.
        attend: computes attention on one device; None: ``call.options.backend``.
        comm_dtype: what travels is rounded to it; None: as it is.

    Returns:
        ``[B, H, S_q, D_v]`` in query's dtype, and lse ``[B, H, S_q]``.
    """
    tiling = call.tiling
    by_position = tiling.by_position  # or one tile is all keys of a block, as they lie
    queries = tiling.split(query)
    low = LowRows.of(mask)
    lows: Sequence[LowRows | None] = [None] * len(queries) if low is None else low.split(tiling.split)
    rows = _split(mask if low is None else low.mask, call)
    merged = [Merged() for _ in queries]
    wire = None if comm_dtype is None else Wire(min(key.shape[3], value.shape[3]))
    packing = Packing(key, value, call.block_sizes, wire)
    received: list[Tensor] = []
    # Where the lse of a partial result is to be corrected, it must not be merged yet.
    backend, continues = call.options.backend, attend is None and low is None
    attend = partial(local_attention_with_lse, backend=backend) if attend is None else attend
    last_hop = call.hops[-1] if call.hops else OWN
    gather = call.options.rotate_method == "allgather" and call.options.block_mask is None
    for hop, block in _blocks(key, value, packing, call, received, gather=gather):
        if block is None:
            continue
        k, v = block
        if by_position or heads is not None:
            k, v = [expand(tiling.keys[hop.step].arrange(x), heads) for x in block]
        tensors: tuple[Tensor, ...] = ()
        for piece, tile in tiling.tiles(hop.step):
            seen = rows[piece]
            tile_mask = None if seen is None else columns(seen, tile.positions)
            tensors = (
                queries[piece],
                take(k, 2, tile.runs) if by_position else k,
                take(v, 2, tile.runs) if by_position else v,
            )
            if continues:
                continued_attention(
                    merged[piece],
                    *tensors,
                    mask=tile_mask,
                    is_causal=tile.diagonal,
                    scale=call.scale,
                    backend=backend,
                    is_last=hop is last_hop and not by_position,
                )
                continue
            out, lse = attend(*tensors, mask=tile_mask, is_causal=tile.diagonal, scale=call.scale)
            of_piece = lows[piece]
            if of_piece is not None and tile_mask is not None:
                lse = of_piece.lse_of_tile(lse, tile_mask, diagonal=tile.diagonal)
            merged[piece].add(out, lse)
        # Or three blocks would be in memory while the next hop is on its way.
        del block, k, v, tensors
    # No keys for the queries that see none.
    nothing = key[:, :, :0], value[:, :, :0]
    results = [
        (one.out, one.lse) if one.count else local_attention_with_lse(q, *nothing)
        for q, one in zip(queries, merged, strict=True)
    ]
    out = tiling.join([out for out, _ in results])
    if out.dtype != query.dtype:
        out = out.to(query.dtype)
    return tied(out, [query, key, value, *received]), tiling.join([lse for _, lse in results])


def _split(mask: Tensor | None, call: Call) -> Sequence[Tensor | None]:
    """The rows of ``mask`` for each piece of the queries."""
    return [None] * len(call.tiling.pieces) if mask is None else call.tiling.split(mask)


# -- backward


def ring_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    call: Call,
    *,
    heads: Tensor | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if asked for, mask; args as in :func:`ring_attention`."""
    tiling = call.tiling
    low = LowRows.of(mask)
    if low is not None:
        mask = low.mask
        grad_out, lse = low.for_gradient(grad_out, lse)
    queries, grads, outs, lses = [tiling.split(x) for x in (query, grad_out, out, lse[..., None])]
    pieces = [
        _Piece(
            queries[number],
            grads[number],
            outs[number],
            lses[number],
            rows,
            grad_query=torch.zeros_like(queries[number], dtype=lse.dtype),
            grad_mask=torch.zeros_like(rows, dtype=lse.dtype) if mask_gradient and rows is not None else None,
        )
        for number, rows in enumerate(_split(mask, call))
    ]
    grad_key, grad_value = _key_gradients(pieces, key, value, call, heads)
    grad_query = tiling.join([piece.grad_query for piece in pieces])
    grad_rows = [piece.grad_mask for piece in pieces if piece.grad_mask is not None]
    grad_mask = None
    if grad_rows and mask is not None:
        grad_mask = torch.stack(grad_rows).sum(0) if mask.shape[2] == 1 else tiling.join(grad_rows)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_mask


@dataclass(frozen=True)
class _Piece:
    """Queries that see the same keys of every block; gradients, in the dtype of lse, are added up in place."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor  # [B, H, S_q, 1]
    mask: Tensor | None
    grad_query: Tensor
    grad_mask: Tensor | None


def _key_gradients(
    pieces: Sequence[_Piece], key: Tensor, value: Tensor, call: Call, heads: Tensor | None
) -> list[Tensor]:
    """The gradients of this rank's keys and values.

    What was found for a block travels behind it, and at last home; with a block mask, from each rank straight home.
    """
    dim, packing = call.mesh.ring, Packing(key, value, call.block_sizes)
    own: list[Tensor] = []
    arriving: list[Travelling] = []  # on its way while this rank computes its own share
    for hop, block in _blocks(key, value, packing, call, []):
        grads = [] if block is None else _add_block(pieces, *block, hop.step, call, heads)
        del block
        if hop.step == 0:
            own = grads
        elif call.options.block_mask is None:
            if arriving:
                earlier = packing.unpack(wait(arriving.pop()), hop.source)
                grads = [one.add_(other) for one, other in zip(grads, earlier, strict=True)]
            arriving.append(start_ring_shift(packing.pack(*grads), packing.numel(call.source(hop.step + 1)), dim))
        else:
            sent = packing.pack(*grads) if grads else own[0].new_empty(0)
            arrives = packing.numel(dim.index) if hop.sends else 0
            arriving.append(start_ring_shift(sent, arrives, dim, distance=-hop.step))
    for buffer in map(wait, arriving):
        if buffer.numel():
            for total, found in zip(own, packing.unpack(buffer, dim.index), strict=True):
                put(total, 2, call.travels, found)
    return own


def _add_block(
    pieces: Sequence[_Piece], key: Tensor, value: Tensor, step: int, call: Call, heads: Tensor | None
) -> list[Tensor]:
    """The gradients of a block of keys and values, in the dtype of lse; those of queries and mask are added up."""
    order = call.tiling.keys[step]
    key, value = order.arrange(key), order.arrange(value)
    grads = [x.new_zeros(x.shape, dtype=pieces[0].lse.dtype) for x in (key, value)]
    key, value = expand(key, heads), expand(value, heads)
    for number, tile in call.tiling.tiles(step):
        piece = pieces[number]
        grad_query, *grad_block, grad_mask = local_attention_backward(
            piece.grad_out,
            piece.query,
            take(key, 2, tile.runs),
            take(value, 2, tile.runs),
            piece.out,
            piece.lse[..., 0],
            mask=None if piece.mask is None else columns(piece.mask, tile.positions),
            is_causal=tile.diagonal,
            scale=call.scale,
            backend=call.options.backend,
            mask_gradient=piece.grad_mask is not None,
        )
        piece.grad_query.add_(grad_query)
        for total, found in zip(grads, grad_block, strict=True):
            put(total, 2, tile.runs, found, heads)
        if piece.grad_mask is not None and grad_mask is not None:
            if piece.grad_mask.shape[3] == 1:
                piece.grad_mask.add_(grad_mask.sum_to_size(piece.grad_mask.shape))
            else:
                put(piece.grad_mask, 3, tile.positions, grad_mask)
    return [order.restore(grad) for grad in grads]
