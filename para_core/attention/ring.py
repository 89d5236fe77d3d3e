"""Ring attention: key and value blocks travel, partial results merge by lse (arXiv:2310.01889).

R ring ranks need R - 1 hops of one buffer that holds a key and a value block; the last hop is not sent. Per hop, rank i
sends B · H_kv · S_block · (D + D_v) elements, S_block being the length of the block that it passes on. While a block is
computed, the next one is in flight. A replicated segment never travels: it is attended to once, together with a rank's
own block.

Gathered (``rotate_method="allgather"``), all blocks arrive in one collective, while a rank's own is computed: as many bytes, R
blocks at once in memory.

With a block mask, blocks do not go round: each rank sends its own straight to the ranks that see any of it. Where no rank sees
the block of the one s before it, there is no collective for s.

Backward, the blocks travel again, and behind each of them the gradient that the ranks before have found for it (in
float32, for 16-bit input, too): R - 1 hops each. Nothing is kept but query, key, value, mask, out and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from para_core.attention.blocks import (
    asked_blocks,
    block_shapes,
    blocks_in_turn,
    rotated_blocks,
    tied,
    travelling,
    unpack,
)
from para_core.attention.causal import Tile, intersect, join_neighbours
from para_core.attention.local import local_attention_backward, local_attention_with_lse, lse_dtype
from para_core.attention.tiling import Order, RingCall, Tiling
from para_core.collectives import pack, start_ring_shift, wait
from para_core.kernels.merge_reference import merge
from para_core.layout import Run

# (query, key, value, *, mask, is_causal, scale) -> out, lse: `local_attention_with_lse`, or a user's own.
AttendWithLse = Callable[..., tuple[Tensor, Tensor]]


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """The columns of a block's keys, of a mask for all keys."""
    if mask.shape[-1] == 1:
        return mask
    parts = [mask.narrow(-1, start, length) for start, length in join_neighbours(positions)]
    return parts[0] if len(parts) == 1 else torch.cat([mask[..., :0], *parts], dim=-1)


def _take(x: Tensor, dim: int, tile: Tile) -> Tensor:
    """The keys of a tile, of a block's tensor."""
    parts = [x.narrow(dim, *run) for run in tile.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _of_tile(mask: Tensor | None, tile: Tile) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else _take(mask, -1, tile)


def expand(x: Tensor, heads: Tensor | None) -> Tensor:
    """``x`` ``[B, H_kv, S, D]`` with the key head of each query head."""
    return x if heads is None else x.index_select(1, heads)


# -- forward


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: RingCall,
    *,
    heads: Tensor | None = None,
    attend: AttendWithLse = local_attention_with_lse,
) -> tuple[Tensor, Tensor]:
    """Attention of this ring block's queries over the keys of all ring blocks.

    Args:
        query: ``[B, H, S_q, D]``, as :func:`own_runs` says.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``, likewise.
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``: rows as ``query``, columns by position in the whole sequence.
        heads: the key head of each query head, ``[H]``; None if they are the same.

    Returns:
        ``[B, H, S_q, D_v]`` in query's dtype, and lse ``[B, H, S_q]``.
    """
    tiling = Tiling(call)
    queries = tiling.split(query)
    rows = [None] * len(queries) if mask is None else tiling.split(mask)
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(queries)
    received: list[Tensor] = []
    for step, block in blocks_in_turn(call)(key, value, call, received):
        if block is None:
            continue
        order = tiling.keys(step)
        k, v = (expand(order.arrange(x), heads) for x in block)
        for piece, (q, mask_rows) in enumerate(zip(queries, rows, strict=True)):
            seen = None if mask_rows is None else columns(mask_rows, order.positions)
            for tile in tiling.tiles(piece, order):
                partial = attend(
                    q,
                    _take(k, 2, tile),
                    _take(v, 2, tile),
                    mask=_of_tile(seen, tile),
                    is_causal=tile.diagonal,
                    scale=call.scale,
                )
                found[piece] = merged(found[piece], partial)
    results = [_nothing(q, value) if result is None else result for q, result in zip(queries, found, strict=True)]
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
    out = tied(tiling.queries.restore(out.to(query.dtype)), [query, key, value, *received])
    return out, tiling.queries.restore(lse)


def merged(so_far: tuple[Tensor, Tensor] | None, partial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if so_far is None:
        return partial
    # What has been merged is float32 until the last block is in.
    return merge(so_far[0].to(so_far[1].dtype), so_far[1], *partial)


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
    call: RingCall,
    *,
    heads: Tensor | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if asked for, mask; args as in :func:`ring_attention`."""
    block_backward = _BlockBackward(grad_out, query, mask, out, lse, call, heads, mask_gradient)
    sum_up = _rotate_gradients if call.blocks is None else _return_gradients
    grad_key, grad_value = sum_up(block_backward, key, value, call)
    grad_query, grad_mask = block_backward.query_gradient(), block_backward.mask_gradient()
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_mask


def _rotate_gradients(block_backward: _BlockBackward, key: Tensor, value: Tensor, call: RingCall) -> list[Tensor]:
    """The gradients of this rank's keys and values: what was found for a block travels behind it, and at last home."""
    dim, sizes = call.mesh.ring, call.block_sizes()
    arriving: Tensor | None = None
    own: list[Tensor] = []
    for step, block in rotated_blocks(key, value, call):
        grads = block_backward(*block, step)
        if step == 0:
            own = grads
            continue
        if arriving is not None:  # on its way while this rank computed its own share
            earlier = unpack(wait(arriving), block_shapes(key, value, sizes[(dim.index - step) % dim.size]))
            grads = [one.add_(other) for one, other in zip(grads, earlier, strict=True)]
        next_shapes = block_shapes(key, value, sizes[(dim.index - step - 1) % dim.size])
        arriving = start_ring_shift(pack([[grad] for grad in grads]), sum([prod(shape) for shape in next_shapes]), dim)
    if arriving is not None:
        _add_home(own, wait(arriving), call)
    return own


def _return_gradients(block_backward: _BlockBackward, key: Tensor, value: Tensor, call: RingCall) -> list[Tensor]:
    """The same where blocks were sent straight to who asked: each of these sends what it found straight back."""
    dim = call.mesh.ring
    # A rank alone with its keys keeps its place in the sequence, which is none in a ring of one.
    num_tokens = call.block_sizes()[dim.index] if dim.size > 1 else 0
    home = sum([prod(shape) for shape in block_shapes(key, value, num_tokens)])
    own: list[Tensor] = []
    arriving: list[Tensor] = []
    for step, block in asked_blocks(key, value, call):
        grads = [] if block is None else block_backward(*block, step)
        if step == 0:
            own = grads
            continue
        sent = pack([[grad] for grad in grads]) if grads else own[0].new_empty(0)
        arrives = home if call.sees((dim.index + step) % dim.size, dim.index) else 0
        arriving.append(start_ring_shift(sent, arrives, dim, distance=-step))
    for found in map(wait, arriving):
        if found.numel():
            _add_home(own, found, call)
    return own


def _add_home(own: Sequence[Tensor], arrived: Tensor, call: RingCall) -> None:
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
        call: RingCall,
        heads: Tensor | None,
        mask_gradient: bool,
    ) -> None:
        self._tiling = Tiling(call)
        split = self._tiling.split
        self._pieces = list(zip(split(query), split(grad_out), split(out), split(lse[..., None]), strict=True))
        self._rows = [None] * len(self._pieces) if mask is None else split(mask)
        self._one_row = mask is not None and mask.shape[2] == 1
        self._call, self._heads, self._dtype = call, heads, lse.dtype
        self._grad_queries = [torch.zeros_like(q, dtype=lse.dtype) for q, *_ in self._pieces]
        self._grad_rows: list[Tensor] = []
        if mask_gradient:
            self._grad_rows = [torch.zeros_like(rows, dtype=lse.dtype) for rows in self._rows if rows is not None]

    def __call__(self, key: Tensor, value: Tensor, step: int) -> list[Tensor]:
        """The gradients of a block of keys and values, in the dtype of lse."""
        order = self._tiling.keys(step)
        key, value = order.arrange(key), order.arrange(value)
        grads = [x.new_zeros(x.shape, dtype=self._dtype) for x in (key, value)]
        key, value = expand(key, self._heads), expand(value, self._heads)
        for piece, (query, grad_out, out, lse) in enumerate(self._pieces):
            rows = self._rows[piece]
            seen = None if rows is None else columns(rows, order.positions)
            for tile in self._tiling.tiles(piece, order):
                grad_query, *grad_block, grad_mask = local_attention_backward(
                    grad_out,
                    query,
                    _take(key, 2, tile),
                    _take(value, 2, tile),
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
