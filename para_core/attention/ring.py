"""Ring attention: key and value blocks travel, partial results merge by lse (arXiv:2310.01889).

R ring ranks need R − 1 hops of one buffer that holds a key and a value block; the last hop is not sent. Per hop, rank i
sends B · H · S_block · (D + D_v) elements. While a block is computed, the next one is in flight. A replicated segment
never travels: it is attended to once, together with a rank's own block.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from para_core.attention.local import local_attention, local_attention_with_lse
from para_core.collectives import pack, start_ring_shift, wait
from para_core.kernels.merge_reference import merge
from para_core.layout import SequenceLayout
from para_core.mesh import SequenceMesh


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: SequenceLayout,
    key_layout: SequenceLayout,
    mesh: SequenceMesh,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of this ring block's queries over the keys of all ring blocks.

    Args:
        query: ``[B, H, S_q, D]``: the sharded tokens of this rank's Ulysses group in rank order, then replicated ones.
        key, value: ``[B, H, S_k, D]``, ``[B, H, S_k, D_v]``, likewise.
        is_causal: by positions in the whole sequence: query i sees keys 0 … i.

    Returns:
        ``[B, H, S_q, D_v]`` in query's dtype.
    """
    dim = mesh.ring
    # One sharded segment, cut alike on both sides: blocks are runs of positions, and SDPA's own causal flag does.
    in_order = query_layout is key_layout and len(query_layout.segments) == 1 and not query_layout.replicated
    if dim.size == 1 and (in_order or not is_causal):
        return local_attention(query, key, value, is_causal=is_causal, scale=scale)

    block_sizes = [sum([size for _, size in _sharded_runs(key_layout, mesh, index)]) for index in range(dim.size)]
    elements_per_token = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])
    buffer = pack([x.narrow(2, 0, block_sizes[dim.index]) for x in (key, value)]) if dim.size > 1 else key
    out, lse = query, query
    for step in range(dim.size):
        source = (dim.index - step) % dim.size
        if step + 1 < dim.size:
            next_size = block_sizes[(source - 1) % dim.size]
            arriving = start_ring_shift(buffer, next_size * elements_per_token, dim)
        block = (key, value) if step == 0 else _unpack(buffer, key, value, block_sizes[source])
        above = is_causal and in_order and source > dim.index
        # A block wholly above the diagonal is not computed; unless its hop has a backward, in which every rank must join.
        if not above or (torch.is_grad_enabled() and buffer.requires_grad):
            mask = torch.zeros(1, 1, dtype=torch.bool, device=query.device) if above else None
            if is_causal and not in_order:
                mask = _causal_mask(query_layout, key_layout, mesh, source, own=step == 0, device=query.device)
            partial, partial_lse = local_attention_with_lse(
                query, *block, mask=mask, is_causal=is_causal and in_order and step == 0, scale=scale
            )
            if step == 0:
                out, lse = partial.to(partial_lse.dtype), partial_lse
            else:
                out, lse = merge(out, lse, partial, partial_lse)
        if step + 1 < dim.size:
            buffer = wait(arriving)
    return out.to(query.dtype)


def _unpack(buffer: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The key and value block in ``buffer``, shaped as ``key`` and ``value`` but for their number of tokens."""
    shapes = [(x.shape[0], x.shape[1], num_tokens, x.shape[3]) for x in (key, value)]
    flat_key, flat_value = buffer.split([prod(shape) for shape in shapes])
    return flat_key.view(shapes[0]), flat_value.view(shapes[1])


def _sharded_runs(layout: SequenceLayout, mesh: SequenceMesh, ring_index: int) -> list[tuple[int, int]]:
    """``(start, length)`` of the sharded tokens of a ring block, in the order in which its Ulysses group holds them."""
    first = ring_index * mesh.ulysses.size
    return [run for rank in range(first, first + mesh.ulysses.size) for run in layout.runs(rank, replicated=False)]


def _causal_mask(
    query_layout: SequenceLayout,
    key_layout: SequenceLayout,
    mesh: SequenceMesh,
    source: int,
    *,
    own: bool,
    device: torch.device,
) -> Tensor:
    """``[S_q, S_k]``, True where a query may see a key of ring block ``source``, by position in the whole sequence."""
    query_runs = _sharded_runs(query_layout, mesh, mesh.ring.index) + list(query_layout.runs(0, replicated=True))
    key_runs = _sharded_runs(key_layout, mesh, source) + (list(key_layout.runs(0, replicated=True)) if own else [])
    queries, keys = (
        torch.cat([torch.arange(start, start + length, device=device) for start, length in [(0, 0), *runs]])
        for runs in (query_runs, key_runs)
    )
    return queries[:, None] >= keys[None, :]
