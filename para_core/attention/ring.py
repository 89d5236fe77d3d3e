"""Ring attention: key and value blocks travel, partial results merge by lse (arXiv:2310.01889).

R ring ranks need R - 1 hops of one buffer that holds a key and a value block; the last hop is not sent. Per hop, rank i
sends B · H_kv · S_block · (D + D_v) elements, S_block being the length of the block that it passes on. While a block is
computed, the next one is in flight: two of them are in memory, beside a rank's own. A replicated segment never travels: it is
attended to once, together with a rank's own block.

Gathered (``rotate_method="allgather"``), all blocks arrive in one collective, while a rank's own is computed: as many bytes
where blocks are equally long (else shorter ones are filled up), R blocks at once in memory.

With a block mask, blocks do not go round: each rank sends its own straight to the ranks that see any of it. Where no rank sees
the block of the one s before it, there is no collective for s.

Launches: one to pack, and per block one of attention, one hop and one merge.

Backward, the blocks travel again, and behind each of them the gradient that the ranks before have found for it (in
float32, for 16-bit input, too): R - 1 hops each. Nothing is saved but query, key, value, mask, out and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from para_core.attention.approximate.wire import Wire
from para_core.attention.call import Call
from para_core.attention.local import local_attention_backward, local_attention_with_lse, lse_dtype
from para_core.attention.low_rows import LowRows
from para_core.attention.merge import merge
from para_core.attention.tiles import Order, Tile, intersect, join_neighbours
from para_core.collectives import Travelling, start_all_gather, start_ring_shift, wait
from para_core.layout import Run

# (query, key, value, *, mask, is_causal, scale) -> out, lse: `local_attention_with_lse`, or a user's own.
LocalAttention = Callable[..., tuple[Tensor, Tensor]]
# A ring block of keys and values; None where this rank has none to see.
RingBlock = tuple[Tensor, Tensor] | None


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """The columns of a block's keys, of a mask for all keys."""
    if mask.shape[-1] == 1:
        return mask
    parts = [mask.narrow(-1, start, length) for start, length in join_neighbours(positions)]
    return parts[0] if len(parts) == 1 else torch.cat([mask[..., :0], *parts], dim=-1)


def take(x: Tensor, dim: int, tile: Tile) -> Tensor:
    """The keys of a tile, of a block's tensor."""
    if tile.runs == ((0, x.shape[dim]),):
        return x
    parts = [x.narrow(dim, *run) for run in tile.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _of_tile(mask: Tensor | None, tile: Tile) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else take(mask, -1, tile)


def expand(x: Tensor, heads: Tensor | None) -> Tensor:
    """``x`` ``[B, H_kv, S, D]`` with the key head of each query head, where these are not grouped evenly."""
    return x if heads is None else x.index_select(1, heads)


# -- how blocks travel


def travelling(x: Tensor, call: Call) -> list[Tensor]:
    """The parts of this rank's own block that no other block holds, in order; along dim 2."""
    layout, mesh = call.key_layout, call.mesh
    if not layout.replicated:
        return [x]
    if mesh.ulysses.size > 1:
        return [x.narrow(2, 0, call.block_sizes[mesh.ring.index])]
    parts = x.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=2)
    return [part for part, segment in zip(parts, layout.segments, strict=True) if not segment.replicated]


def block_shapes(key: Tensor, value: Tensor, num_tokens: int) -> list[tuple[int, ...]]:
    return [(x.shape[0], x.shape[1], num_tokens, x.shape[3]) for x in (key, value)]


def pack(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """One flat buffer of tensors ``[B, H, S, D]``, each given in parts along S."""
    if all(len(one) == 1 and one[0].shape == parts[0][0].shape for one in parts):
        return torch.stack([one[0] for one in parts]).view(-1)
    return torch.cat([(one[0] if len(one) == 1 else torch.cat(list(one), dim=2)).reshape(-1) for one in parts])


def unpack(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The inverse of :func:`pack`: views."""
    if all(shape == shapes[0] for shape in shapes):
        return list(buffer.view(len(shapes), *shapes[0]).unbind())
    return [part.view(shape) for part, shape in zip(buffer.split([prod(s) for s in shapes]), shapes, strict=True)]


class _Traveller:
    """What a block of keys and values is while it travels: as it is, or rounded."""

    def __init__(self, key: Tensor, value: Tensor, call: Call, wire: Wire | None) -> None:
        self._key, self._value, self._call, self._wire = key, value, call, wire
        self._extra = 0 if wire is None else wire.scale_rows
        self._of_a_token = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])

    def pack(self) -> Tensor:
        parts = [travelling(x, self._call) for x in (self._key, self._value)]
        if self._wire is not None:
            parts = [[self._wire.write(torch.cat(one, dim=2))] for one in parts]
        return pack(parts)

    def numel(self, source: int) -> int:
        """Elements of the block of a ring rank."""
        return self._of_a_token * (self._call.block_sizes[source] + self._extra)

    def unpack(self, buffer: Tensor, source: int) -> tuple[Tensor, Tensor]:
        num_tokens = self._call.block_sizes[source] + self._extra
        key, value = unpack(buffer, block_shapes(self._key, self._value, num_tokens))
        if self._wire is None:
            return key, value
        return self._wire.read(key, self._key.dtype), self._wire.read(value, self._value.dtype)


# These give the blocks that this rank sees, its own first, and the step of each: how many ranks before it its owner is. The
# next block is in flight while the caller computes. Where autograd follows what travels, it is added to ``received``. They
# let go of a block before they wait for the next: so must who takes them.


def _rotated(
    key: Tensor, value: Tensor, call: Call, wire: Wire | None = None, received: list[Tensor] | None = None
) -> Iterator[tuple[int, RingBlock]]:
    """Each rank passes on what it got: neighbours talk to neighbours only."""
    if not call.rotates:
        yield 0, (key, value)
        return
    dim, traveller = call.mesh.ring, _Traveller(key, value, call, wire)
    buffer = traveller.pack()
    for step in range(dim.size):
        arriving = None
        if step + 1 < dim.size:
            arriving = start_ring_shift(buffer, traveller.numel(call.source(step + 1)), dim)
        yield step, (key, value) if step == 0 else traveller.unpack(buffer, call.source(step))
        if arriving is not None:
            buffer = wait(arriving)
            if received is not None:
                received.append(buffer)


def _gathered(
    key: Tensor, value: Tensor, call: Call, wire: Wire | None = None, received: list[Tensor] | None = None
) -> Iterator[tuple[int, RingBlock]]:
    """All of them in one collective."""
    if not call.rotates:
        yield 0, (key, value)
        return
    dim, traveller = call.mesh.ring, _Traveller(key, value, call, wire)
    sizes = [traveller.numel(source) for source in range(dim.size)]
    arriving = start_all_gather(_filled_up(traveller.pack(), max(sizes)), dim)
    yield 0, (key, value)
    blocks = wait(arriving)
    if received is not None:
        received.append(blocks)
    for step in range(1, dim.size):
        source = call.source(step)
        yield step, traveller.unpack(blocks.narrow(0, source * max(sizes), sizes[source]), source)


def _filled_up(buffer: Tensor, size: int) -> Tensor:
    return buffer if buffer.numel() == size else torch.cat([buffer, buffer.new_zeros(size - buffer.numel())])


def _asked_for(
    key: Tensor, value: Tensor, call: Call, wire: Wire | None = None, received: list[Tensor] | None = None
) -> Iterator[tuple[int, RingBlock]]:
    """Each rank sends its block straight to those that see any of it; None where another got one, and this rank none."""
    dim, traveller = call.mesh.ring, _Traveller(key, value, call, wire)
    steps = [step for step in range(1, dim.size) if any(sees(call, i, (i - step) % dim.size) for i in range(dim.size))]
    own = traveller.pack() if steps else key

    def start(step: int, after: Tensor) -> Travelling:
        # Where autograd follows each collective, they go back in the order in which they came, on every rank.
        sent = tied(own if sees(call, (dim.index + step) % dim.size, dim.index) else own[:0], [after])
        arrives = traveller.numel(call.source(step)) if sees(call, dim.index, call.source(step)) else 0
        return start_ring_shift(sent, arrives, dim, distance=step)

    arriving = [start(steps[0], own)] if steps else []
    yield 0, (key, value)
    for place, step in enumerate(steps):
        buffer = wait(arriving.pop())
        if received is not None:
            received.append(buffer)
        if place + 1 < len(steps):
            arriving.append(start(steps[place + 1], buffer))
        yield step, traveller.unpack(buffer, call.source(step)) if sees(call, dim.index, call.source(step)) else None


def sees(call: Call, ring_index: int, source: int) -> bool:
    """Whether a ring rank sees a key that travels in the block of another."""
    blocks = call.options.block_mask
    return blocks is None or blocks.ring_sees(call.query_layout, call.key_layout, call.mesh, ring_index, source)


def _blocks(call: Call) -> Callable[..., Iterator[tuple[int, RingBlock]]]:
    if call.options.block_mask is not None:
        return _asked_for
    return _gathered if call.options.rotate_method == "allgather" else _rotated


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
    attend: LocalAttention = local_attention_with_lse,
    comm_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this ring block's queries over the keys of all ring blocks.

    Args:
        query: ``[B, H, S_q, D]``, as ``call.query_runs`` says.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``, likewise.
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``: rows as ``query``, columns by position in the whole sequence.
        heads: the key head of each query head, ``[H]``; None if they are grouped evenly.
        comm_dtype: what travels is rounded to it; None: as it is.

    Returns:
        ``[B, H, S_q, D_v]`` in query's dtype, and lse ``[B, H, S_q]``.
    """
    tiling = call.tiling
    low = _low_rows(mask)
    if low is not None:
        mask = low.mask
    queries = tiling.split(query)
    rows: Sequence[Tensor | None] = [None] * len(queries) if mask is None else tiling.split(mask)
    low_rows = None if low is None else list(zip(tiling.split(low.absorbed), tiling.split(low.highest), strict=True))
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(queries)
    wire = None if comm_dtype is None else Wire(comm_dtype, min(key.shape[3], value.shape[3]))
    received: list[Tensor] | None = [] if torch.is_grad_enabled() else None
    for step, block in _blocks(call)(key, value, call, wire, received):
        if block is None:
            continue
        order = tiling.keys[step]
        k, v = (expand(order.arrange(x), heads) for x in block)
        for piece, tiles in enumerate(tiling.tiles(step)):
            mask_rows = rows[piece]
            seen = None if mask_rows is None else columns(mask_rows, order.positions)
            for tile in tiles:
                tile_mask = _of_tile(seen, tile)
                out, lse = attend(
                    queries[piece],
                    take(k, 2, tile),
                    take(v, 2, tile),
                    mask=tile_mask,
                    is_causal=tile.diagonal,
                    scale=call.scale,
                )
                if low is not None and low_rows is not None and tile_mask is not None:
                    lse = low.lse_of_tile(lse, tile_mask, *low_rows[piece], diagonal=tile.diagonal)
                found[piece] = merged(found[piece], (out, lse))
        # Or three blocks would be in memory while the next hop is on its way.
        del block, k, v
    results = [_nothing(q, value) if result is None else result for q, result in zip(queries, found, strict=True)]
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
    out = tiling.queries.restore(out if out.dtype == query.dtype else out.to(query.dtype))
    if received is not None:
        out = tied(out, [query, key, value, *received])
    return out, tiling.queries.restore(lse)


def _low_rows(mask: Tensor | None) -> LowRows | None:
    """Of a float mask whose rows' lse is asked for: to merge by, or to find weights from again."""
    return None if mask is None or mask.dtype == torch.bool or mask.shape[-1] == 1 else LowRows.of(mask)


def merged(so_far: tuple[Tensor, Tensor] | None, partial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What has been merged is in the dtype of lse until the last block is in."""
    return partial if so_far is None else merge(*so_far, *partial)


def _nothing(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries that see no key."""
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    return out, query.new_full(query.shape[:-1], float("-inf"), dtype=lse_dtype(query))


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
    block_backward = _BlockBackward(grad_out, query, mask, out, lse, call, heads, mask_gradient)
    sum_up = _rotate_gradients if call.options.block_mask is None else _return_gradients
    grad_key, grad_value = sum_up(block_backward, key, value, call)
    grad_query, grad_mask = block_backward.query_gradient(), block_backward.mask_gradient()
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_mask


def _rotate_gradients(block_backward: _BlockBackward, key: Tensor, value: Tensor, call: Call) -> list[Tensor]:
    """The gradients of this rank's keys and values: what was found for a block travels behind it, and at last home."""
    dim, sizes = call.mesh.ring, call.block_sizes
    arriving: Travelling | None = None
    own: list[Tensor] = []
    for step, block in _rotated(key, value, call):
        grads = [] if block is None else block_backward(*block, step)
        del block
        if step == 0:
            own = grads
            continue
        if arriving is not None:  # on its way while this rank computed its own share
            earlier = unpack(wait(arriving), block_shapes(key, value, sizes[call.source(step)]))
            grads = [one.add_(other) for one, other in zip(grads, earlier, strict=True)]
        next_shapes = block_shapes(key, value, sizes[call.source(step + 1)])
        arriving = start_ring_shift(pack([[grad] for grad in grads]), sum([prod(shape) for shape in next_shapes]), dim)
    if arriving is not None:
        _add_home(own, wait(arriving), call)
    return own


def _return_gradients(block_backward: _BlockBackward, key: Tensor, value: Tensor, call: Call) -> list[Tensor]:
    """The same where blocks were sent straight to who asked: each of these sends what it found straight back."""
    dim = call.mesh.ring
    # A rank alone with its keys keeps its place in the sequence, which is none in a ring of one.
    num_tokens = call.block_sizes[dim.index] if dim.size > 1 else 0
    home = sum([prod(shape) for shape in block_shapes(key, value, num_tokens)])
    own: list[Tensor] = []
    arriving: list[Travelling] = []
    for step, block in _asked_for(key, value, call):
        grads = [] if block is None else block_backward(*block, step)
        if step == 0:
            own = grads
            continue
        sent = pack([[grad] for grad in grads]) if grads else own[0].new_empty(0)
        arrives = home if sees(call, (dim.index + step) % dim.size, dim.index) else 0
        arriving.append(start_ring_shift(sent, arrives, dim, distance=-step))
    for found in map(wait, arriving):
        if found.numel():
            _add_home(own, found, call)
    return own


def _add_home(own: Sequence[Tensor], arrived: Tensor, call: Call) -> None:
    """Add the gradients of what travelled, ``arrived``, to those of this rank's keys and values."""
    travelled = [travelling(grad, call) for grad in own]
    shapes = [(*parts[0].shape[:2], sum([part.shape[2] for part in parts]), parts[0].shape[3]) for parts in travelled]
    for parts, found in zip(travelled, unpack(arrived, shapes), strict=True):
        for part, grad in zip(parts, found.split([part.shape[2] for part in parts], dim=2), strict=True):
            part.add_(grad)


class _BlockBackward:
    """What one block of keys after the other adds to the gradients of this rank's queries and mask."""

    def __init__(
        self,
        grad_out: Tensor,
        query: Tensor,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        call: Call,
        heads: Tensor | None,
        mask_gradient: bool,
    ) -> None:
        self._tiling = call.tiling
        split = self._tiling.split
        low = _low_rows(mask)
        if low is not None:
            mask = low.mask
            grad_out, lse = low.for_gradient(grad_out, lse)
        self._pieces = list(zip(split(query), split(grad_out), split(out), split(lse[..., None]), strict=True))
        self._rows: Sequence[Tensor | None] = [None] * len(self._pieces) if mask is None else split(mask)
        self._one_row = mask is not None and mask.shape[2] == 1
        self._call, self._heads, self._dtype = call, heads, lse.dtype
        self._grad_queries = [torch.zeros_like(q, dtype=lse.dtype) for q, *_ in self._pieces]
        self._grad_rows: list[Tensor] = []
        if mask_gradient:
            self._grad_rows = [torch.zeros_like(rows, dtype=lse.dtype) for rows in self._rows if rows is not None]

    def __call__(self, key: Tensor, value: Tensor, step: int) -> list[Tensor]:
        """The gradients of a block of keys and values, in the dtype of lse."""
        order = self._tiling.keys[step]
        key, value = order.arrange(key), order.arrange(value)
        grads = [x.new_zeros(x.shape, dtype=self._dtype) for x in (key, value)]
        key, value = expand(key, self._heads), expand(value, self._heads)
        for piece, tiles in enumerate(self._tiling.tiles(step)):
            query, grad_out, out, lse = self._pieces[piece]
            rows = self._rows[piece]
            seen = None if rows is None else columns(rows, order.positions)
            for tile in tiles:
                grad_query, *grad_block, grad_mask = local_attention_backward(
                    grad_out,
                    query,
                    take(key, 2, tile),
                    take(value, 2, tile),
                    out,
                    lse[..., 0],
                    mask=_of_tile(seen, tile),
                    is_causal=tile.diagonal,
                    scale=self._call.scale,
                    mask_gradient=bool(self._grad_rows),
                )
                self._grad_queries[piece].add_(grad_query)
                lengths = [length for _, length in tile.runs]
                for total, found in zip(grads, grad_block, strict=True):
                    for run, part in zip(tile.runs, found.split(lengths, dim=2), strict=True):
                        self._add_heads(total.narrow(2, *run), part)
                if grad_mask is not None:
                    self._add_columns(self._grad_rows[piece], grad_mask, order, tile)
        return [order.restore(grad) for grad in grads]

    def _add_heads(self, total: Tensor, found: Tensor) -> None:
        if self._heads is None:
            total.add_(found)
        else:
            total.index_add_(1, self._heads, found.to(total.dtype))

    @staticmethod
    def _add_columns(total: Tensor, found: Tensor, keys: Order, tile: Tile) -> None:
        """Add ``found`` ``[B, H, S_q, num_keys]`` where ``total`` has the tile's columns; sum where it broadcasts."""
        if total.shape[3] == 1:
            total.add_(found.sum_to_size(total.shape))
            return
        before = done = 0
        for start, length in keys.positions:
            for first, number in intersect([(before, length)], tile.runs):
                where = total.narrow(3, start + first - before, number)
                where.add_(found.narrow(3, done, number).sum_to_size(where.shape))
                done += number
            before += length

    def query_gradient(self) -> Tensor:
        """Of all pieces, in the block's order, in the dtype of lse."""
        return self._whole(self._grad_queries)

    def mask_gradient(self) -> Tensor | None:
        """Like the mask, in the dtype of lse; None if it was not asked for."""
        if not self._grad_rows:
            return None
        return torch.stack(self._grad_rows).sum(0) if self._one_row else self._whole(self._grad_rows)

    def _whole(self, pieces: list[Tensor]) -> Tensor:
        return self._tiling.queries.restore(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2))
