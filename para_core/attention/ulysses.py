"""Ulysses: trade a shard of the tokens for a shard of the heads, and back (arXiv:2309.14509).

Per attention call one all-to-all in, for query, key and value together, and one out. With ``n`` ranks, S_r tokens and
H_r heads on rank r, and e bytes per element, rank r sends

    in:   B · e · Σ_{j≠r} (S_r · (H_j · D + H_kv,j · (D + D_v)))   bytes
    out:  B · e · D_v · H_r · Σ_{j≠r} (S_j + replicated tokens)    bytes

Heads are split as ``torch.tensor_split`` does. A replicated segment is not sent on the way in: each rank takes its own
heads of it; only its output is gathered over heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from para_core.collectives import all_to_all, pack
from para_core.layout import Segment, SequenceLayout
from para_core.mesh import MeshDim, SequenceMesh

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def split_by_kind(x: Tensor, layout: SequenceLayout, rank: int) -> tuple[Tensor, Tensor | None]:
    """The sharded and the replicated tokens of ``x`` ``[B, H, S_local, D]``; None where nothing is replicated."""
    if not layout.replicated:
        return x, None
    parts = x.split([segment.size(rank, layout.ranks) for segment in layout.segments], dim=2)
    pairs = list(zip(layout.segments, parts, strict=True))
    sharded = [part for segment, part in pairs if not segment.replicated]
    replicated = [part for segment, part in pairs if segment.replicated]
    return _cat(sharded) if sharded else x[:, :, :0], _cat(replicated)


def join_kinds(sharded: Tensor, replicated: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """The inverse of :func:`split_by_kind`, in the local order of ``layout``."""
    sizes = [segment.size(rank, layout.ranks) for segment in layout.segments]
    kinds = {
        False: iter(sharded.split([n for s, n in zip(layout.segments, sizes, strict=True) if not s.replicated], dim=2))
        if layout.sharded
        else iter(()),
        True: iter(replicated.split([n for s, n in zip(layout.segments, sizes, strict=True) if s.replicated], dim=2)),
    }
    return _cat([next(kinds[segment.replicated]) for segment in layout.segments])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Attend,
    query_layout: SequenceLayout,
    key_layout: SequenceLayout,
    mesh: SequenceMesh,
) -> Tensor:
    """Attention over the tokens of this rank's Ulysses group (its ring block), by ``attend`` on a share of the heads.

    Args:
        query, key, value: ``[B, H, S_local, D]``; key and value may have fewer heads if these divide by the Ulysses
            size, D_v may differ.
        attend: called with ``[B, H_local, S_block, D]``: the block's sharded tokens in rank order, replicated ones last.

    Returns:
        ``[B, H, S_local, D_v]``.
    """
    dim = mesh.ulysses
    query, text_query = split_by_kind(query, query_layout, mesh.rank)
    key, text_key = split_by_kind(key, key_layout, mesh.rank)
    value, text_value = split_by_kind(value, key_layout, mesh.rank)
    head_sizes = Segment("heads", query.shape[1]).sizes(dim.size)
    kv_head_sizes = Segment("heads", key.shape[1]).sizes(dim.size)
    group_ranks = [mesh.ring.index * dim.size + peer for peer in range(dim.size)]
    query_sizes = [query_layout.sharded_size(rank) for rank in group_ranks]
    key_sizes = [key_layout.sharded_size(rank) for rank in group_ranks]

    block = _tokens_to_heads(
        (query, key, value), (head_sizes, kv_head_sizes, kv_head_sizes), (query_sizes, key_sizes, key_sizes), dim
    )
    whole = [
        x if text is None else torch.cat([x, text.split(list(sizes), dim=1)[dim.index]], dim=2)
        for x, text, sizes in zip(
            block,
            (text_query, text_key, text_value),
            (head_sizes, kv_head_sizes, kv_head_sizes),
            strict=True,
        )
    ]
    out = attend(whole[0], whole[1], whole[2])
    return _heads_to_tokens(out, head_sizes, query_sizes, text_query, query_layout, mesh)


def _tokens_to_heads(
    tensors: Sequence[Tensor], head_sizes: Sequence[Sequence[int]], token_sizes: Sequence[Sequence[int]], dim: MeshDim
) -> list[Tensor]:
    """Send each rank its heads of each ``[B, H, S_local, D]``; receive ``[B, H_local, S_block, D]``."""
    batch = tensors[0].shape[0]
    pieces = [
        [x.split(list(sizes), dim=1)[peer].permute(2, 0, 1, 3) for x, sizes in zip(tensors, head_sizes, strict=True)]
        for peer in range(dim.size)
    ]
    send_sizes = [sum([piece.numel() for piece in to_peer]) for to_peer in pieces]
    # Elements per token that arrive here, for each tensor: [B, H_local, D].
    widths = [batch * sizes[dim.index] * x.shape[3] for x, sizes in zip(tensors, head_sizes, strict=True)]
    receive_sizes = [
        sum([sizes[peer] * width for sizes, width in zip(token_sizes, widths, strict=True)]) for peer in range(dim.size)
    ]
    received = all_to_all(pack([piece for to_peer in pieces for piece in to_peer]), send_sizes, receive_sizes, dim)
    from_peers = [
        part.split([sizes[peer] * width for sizes, width in zip(token_sizes, widths, strict=True)])
        for peer, part in enumerate(received.split(receive_sizes))
    ]
    blocks = []
    for index, (x, sizes) in enumerate(zip(tensors, head_sizes, strict=True)):
        tokens = torch.cat([parts[index] for parts in from_peers])
        shape = (sum(token_sizes[index]), batch, sizes[dim.index], x.shape[3])
        blocks.append(tokens.view(shape).permute(1, 2, 0, 3))
    return blocks


def _heads_to_tokens(
    out: Tensor,
    head_sizes: Sequence[int],
    token_sizes: Sequence[int],
    text: Tensor | None,
    layout: SequenceLayout,
    mesh: SequenceMesh,
) -> Tensor:
    """Send each rank its tokens of ``out`` ``[B, H_local, S_block, D]``, and all replicated ones; receive all heads."""
    dim = mesh.ulysses
    batch, _, _, width = out.shape
    num_text = 0 if text is None else text.shape[2]
    *to_peers, replicated = out.split([*token_sizes, num_text], dim=2)
    # Heads first: what arrives is then all heads of this rank's tokens, in order.
    pieces = [
        piece.permute(1, 0, 2, 3)
        for tokens in to_peers
        for piece in ((tokens,) if text is None else (tokens, replicated))
    ]
    send_sizes = [(size + num_text) * batch * head_sizes[dim.index] * width for size in token_sizes]
    receive_sizes = [(token_sizes[dim.index] + num_text) * batch * heads * width for heads in head_sizes]
    received = all_to_all(pack(pieces), send_sizes, receive_sizes, dim)
    local = token_sizes[dim.index]
    if text is None:
        return received.view(sum(head_sizes), batch, local, width).permute(1, 0, 2, 3)
    kinds = [
        part.split([batch * heads * local * width, batch * heads * num_text * width])
        for part, heads in zip(received.split(receive_sizes), head_sizes, strict=True)
    ]
    tokens, texts = (torch.cat([pair[kind] for pair in kinds]) for kind in range(2))
    return join_kinds(
        tokens.view(sum(head_sizes), batch, local, width).permute(1, 0, 2, 3),
        texts.view(sum(head_sizes), batch, num_text, width).permute(1, 0, 2, 3),
        layout,
        mesh.rank,
    )
