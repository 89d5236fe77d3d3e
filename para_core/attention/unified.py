"""Ulysses inside, ring outside: SDPA over a sequence that is sharded over a ``ring × ulysses`` mesh."""

from __future__ import annotations

from torch import Tensor

from para_core.attention.local import local_attention, repeat_heads
from para_core.attention.ring import ring_attention
from para_core.attention.ulysses import ulysses_attention
from para_core.layout import SequenceLayout
from para_core.mesh import SequenceMesh


def unified_attention(
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
    """This rank's queries attend to all keys of the sequence.

    Args:
        query: ``[B, H, S_q_local, D]``, as ``query_layout`` says.
        key, value: ``[B, H_kv, S_k_local, D]``, ``[B, H_kv, S_k_local, D_v]``, as ``key_layout`` says; H_kv divides H.

    Returns:
        ``[B, H, S_q_local, D_v]``.
    """
    if not key_layout.sharded and not is_causal:
        # Every rank holds all keys: nothing has to move.
        return local_attention(query, key, value, scale=scale)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_kv_heads != num_heads and num_kv_heads % mesh.ulysses.size:
        # A rank's query heads may need a part of a neighbour's key heads: repeat before cutting by heads.
        key, value = repeat_heads(key, num_heads), repeat_heads(value, num_heads)

    def attend_block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query, key, value, query_layout, key_layout, mesh, is_causal=is_causal, scale=scale)

    if mesh.ulysses.size == 1 and not query_layout.replicated and not key_layout.replicated:
        return attend_block(query, key, value)
    return ulysses_attention(query, key, value, attend_block, query_layout, key_layout, mesh)
