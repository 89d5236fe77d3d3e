"""Ring attention: key and value blocks travel, partial results merge by lse (arXiv:2310.01889).

R ring ranks need R - 1 hops of one buffer that holds a key and a value block; the last hop is not sent. Per hop, rank i
sends B · H_kv · S_block · (D + D_v) elements, S_block being the length of the block that it passes on. While a block is
computed, the next one is in flight. A replicated segment never travels: it is attended to once, together with a rank's
own block.

Backward, the blocks travel again, and behind each of them the gradient that the ranks before have found for it (in
float32, for 16-bit input, too): R - 1 hops each. Nothing is kept but query, key, value, mask, out and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from para_core.attention.causal import Tile, coalesce, cut, join_neighbours, visible_tiles
from para_core.attention.local import local_attention_backward, local_attention_with_lse, lse_dtype
from para_core.collectives import pack, start_ring_shift, wait
from para_core.kernels.merge_reference import merge
from para_core.layout import Run, SequenceLayout
from para_core.mesh import SequenceMesh

# (query, key, value, *, mask, is_causal, scale) -> out, lse: `local_attention_with_lse`, or a user's own.
AttendWithLse = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RingCall:
    """What one ring call is about, tensors aside.

    ``query_layout`` and ``key_layout`` are of the whole sequence. A rank's block is what its Ulysses group holds.
    """

    query_layout: SequenceLayout
    key_layout: SequenceLayout
    mesh: SequenceMesh
    is_causal: bool
    scale: float | None

    def block_sizes(self) -> list[int]:
        """Keys that travel in the block of each ring rank."""
        layout, width = self.key_layout, self.mesh.ulysses.size
        return [
            sum([layout.sharded_size(rank) for rank in range(index * width, (index + 1) * width)])
            for index in range(self.mesh.ring.size)
        ]

    def query_runs(self) -> list[Run]:
        """Positions of this block's queries, in the order in which the block holds them."""
        return own_runs(self.query_layout, self.mesh)

    def key_runs(self, step: int) -> list[Run]:
        """Positions of the keys of the block that is here at ``step``."""
        if step == 0:
            return own_runs(self.key_layout, self.mesh)
        source = (self.mesh.ring.index - step) % self.mesh.ring.size
        return _sharded_runs(self.key_layout, self.mesh, source)


def own_runs(layout: SequenceLayout, mesh: SequenceMesh) -> list[Run]:
    """Positions of what this rank's block holds: all of a Ulysses group's shards, then replicated tokens.

    One rank alone keeps its tokens in the order in which it got them.
    """
    if mesh.ulysses.size == 1:
        return list(layout.runs(mesh.rank))
    return _sharded_runs(layout, mesh, mesh.ring.index) + list(layout.runs(0, replicated=True))


def _sharded_runs(layout: SequenceLayout, mesh: SequenceMesh, ring_index: int) -> list[Run]:
    first = ring_index * mesh.ulysses.size
    return [run for rank in range(first, first + mesh.ulysses.size) for run in layout.runs(rank, replicated=False)]


def _travelling(x: Tensor, call: RingCall) -> list[Tensor]:
    """The parts of this rank's own block that no other block holds, in order; along dim 2."""
    layout, mesh = call.key_layout, call.mesh
    if mesh.ulysses.size > 1:
        return [x.narrow(2, 0, call.block_sizes()[mesh.ring.index])]
    parts = x.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=2)
    return [part for part, segment in zip(parts, layout.segments, strict=True) if not segment.replicated]


def _blocks(key: Tensor, value: Tensor, call: RingCall) -> Iterator[tuple[Tensor, Tensor]]:
    """The key and value blocks that this rank sees, its own first; the next is in flight while the caller computes."""
    dim = call.mesh.ring
    if dim.size == 1:
        yield key, value
        return
    sizes = call.block_sizes()
    buffer = pack([_travelling(x, call) for x in (key, value)])
    for step in range(dim.size):
        source = (dim.index - step) % dim.size
        if step + 1 < dim.size:
            shapes = _block_shapes(key, value, sizes[(source - 1) % dim.size])
            arriving = start_ring_shift(buffer, sum([prod(shape) for shape in shapes]), dim)
        yield (key, value) if step == 0 else _unpack(buffer, _block_shapes(key, value, sizes[source]))
        if step + 1 < dim.size:
            buffer = wait(arriving)


def _block_shapes(key: Tensor, value: Tensor, num_tokens: int) -> list[tuple[int, ...]]:
    return [(x.shape[0], x.shape[1], num_tokens, x.shape[3]) for x in (key, value)]


def _unpack(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    key, value = [part.view(shape) for part, shape in zip(buffer.split([prod(s) for s in shapes]), shapes, strict=True)]
    return key, value


class _Order:
    """The tokens of a block: as it holds them, or, for a causal mask, by ascending position."""

    def __init__(self, runs: Sequence[Run], *, ascending: bool) -> None:
        self._lengths = [length for _, length in runs]
        self._order = list(range(len(runs)))
        if ascending:
            self._order.sort(key=lambda index: runs[index])
        self._as_held = self._order == list(range(len(runs)))
        self.positions = coalesce(runs) if ascending else list(runs)

    def arrange(self, x: Tensor) -> Tensor:
        """``x`` along dim 2, from the order in which the block holds it to this one."""
        if self._as_held:
            return x
        parts = x.split(self._lengths, dim=2)
        return torch.cat([parts[index] for index in self._order], dim=2)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        if self._as_held:
            return x
        parts = x.split([self._lengths[index] for index in self._order], dim=2)
        place = {index: place for place, index in enumerate(self._order)}
        return torch.cat([parts[place[index]] for index in range(len(parts))], dim=2)


class _Tiling:
    """How a call is cut into attention without a causal mask, or with SDPA's own: pieces of queries, tiles of keys."""

    def __init__(self, call: RingCall) -> None:
        self._call = call
        self.queries = _Order(call.query_runs(), ascending=call.is_causal)
        if call.is_causal:
            keys = [run for step in range(call.mesh.ring.size) for run in coalesce(call.key_runs(step))]
            self._pieces = cut(self.queries.positions, keys) or [(0, 0)]
            self.lengths = [length for _, length in self._pieces]
        else:
            self.lengths = [sum([length for _, length in self.queries.positions])]

    def keys(self, step: int) -> _Order:
        """The block of keys that is here at ``step``."""
        return _Order(self._call.key_runs(step), ascending=self._call.is_causal)

    def tiles(self, piece: int, keys: _Order) -> list[Tile]:
        """What a piece of the queries sees of a block."""
        if self._call.is_causal:
            return visible_tiles(self._pieces[piece], keys.positions)
        return [Tile(0, sum([length for _, length in keys.positions]), diagonal=False)]

    def split(self, x: Tensor) -> list[Tensor]:
        """``x``, whose dim 2 is that of the block's queries, or 1, for each piece."""
        if x.shape[2] == 1 and self.lengths != [1]:
            return [x] * len(self.lengths)
        return list(self.queries.arrange(x).split(self.lengths, dim=2))


def columns(mask: Tensor, positions: Sequence[Run]) -> Tensor:
    """The columns of a block's keys, of a mask for all keys."""
    if mask.shape[-1] == 1:
        return mask
    parts = [mask.narrow(-1, start, length) for start, length in join_neighbours(positions)]
    return parts[0] if len(parts) == 1 else torch.cat([mask[..., :0], *parts], dim=-1)


def _of_tile(mask: Tensor | None, tile: Tile) -> Tensor | None:
    if mask is None or mask.shape[-1] == 1:
        return mask
    return mask.narrow(-1, tile.first_key, tile.num_keys)


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
    tiling = _Tiling(call)
    queries = tiling.split(query)
    rows = [None] * len(queries) if mask is None else tiling.split(mask)
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(queries)
    for step, block in enumerate(_blocks(key, value, call)):
        order = tiling.keys(step)
        k, v = (expand(order.arrange(x), heads) for x in block)
        for piece, (q, mask_rows) in enumerate(zip(queries, rows, strict=True)):
            seen = None if mask_rows is None else columns(mask_rows, order.positions)
            for tile in tiling.tiles(piece, order):
                partial = attend(
                    q,
                    k.narrow(2, tile.first_key, tile.num_keys),
                    v.narrow(2, tile.first_key, tile.num_keys),
                    mask=_of_tile(seen, tile),
                    is_causal=tile.diagonal,
                    scale=call.scale,
                )
                found[piece] = _merged(found[piece], partial)
    results = [_nothing(q, value) if result is None else result for q, result in zip(queries, found, strict=True)]
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
    return tiling.queries.restore(out.to(query.dtype)), tiling.queries.restore(lse)


def _merged(so_far: tuple[Tensor, Tensor] | None, partial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
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
    dim = call.mesh.ring
    sizes = call.block_sizes()
    block_backward = _BlockBackward(grad_out, query, mask, out, lse, call, heads, mask_gradient)
    arriving: Tensor | None = None
    own: list[Tensor] = []
    for step, block in enumerate(_blocks(key, value, call)):
        grads = block_backward(*block, step)
        if step == 0:
            own = grads
            continue
        if arriving is not None:  # on its way while this rank computed its own share
            earlier = _unpack(wait(arriving), _block_shapes(key, value, sizes[(dim.index - step) % dim.size]))
            grads = [one.add_(other) for one, other in zip(grads, earlier, strict=True)]
        next_shapes = _block_shapes(key, value, sizes[(dim.index - step - 1) % dim.size])
        arriving = start_ring_shift(pack([[grad] for grad in grads]), sum([prod(shape) for shape in next_shapes]), dim)
    if arriving is not None:
        home = _unpack(wait(arriving), _block_shapes(key, value, sizes[dim.index]))
        for grad, arrived in zip(own, home, strict=True):
            parts = _travelling(grad, call)
            for part, found in zip(parts, arrived.split([part.shape[2] for part in parts], dim=2), strict=True):
                part.add_(found)
    grad_query, grad_mask = block_backward.query_gradient(), block_backward.mask_gradient()
    return grad_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), grad_mask


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
        self._tiling = _Tiling(call)
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
                    key.narrow(2, tile.first_key, tile.num_keys),
                    value.narrow(2, tile.first_key, tile.num_keys),
                    out,
                    lse[..., 0],
                    mask=_of_tile(seen, tile),
                    is_causal=tile.diagonal,
                    scale=self._call.scale,
                    mask_gradient=bool(self._grad_rows),
                )
                self._grad_queries[piece].add_(grad_query)
                for total, found in zip(grads, grad_block, strict=True):
                    self._add_heads(total.narrow(2, tile.first_key, tile.num_keys), found)
                if grad_mask is not None:
                    self._add_columns(self._grad_rows[piece], grad_mask, order, tile)
        return [order.restore(grad) for grad in grads]

    def _add_heads(self, total: Tensor, found: Tensor) -> None:
        if self._heads is None:
            total.add_(found)
        else:
            total.index_add_(1, self._heads, found.to(total.dtype))

    @staticmethod
    def _add_columns(total: Tensor, found: Tensor, keys: _Order, tile: Tile) -> None:
        """Add ``found`` ``[B, H, S_q, num_keys]`` where ``total`` has the tile's columns; sum where it broadcasts."""
        before = 0
        for start, length in keys.positions:
            first, last = max(before, tile.first_key), min(before + length, tile.first_key + tile.num_keys)
            if first < last:
                where = total if total.shape[3] == 1 else total.narrow(3, start + first - before, last - first)
                where.add_(found.narrow(3, first - tile.first_key, last - first).sum_to_size(where.shape))
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
