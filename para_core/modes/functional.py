"""Attention over a mesh as plain functions: ``scaled_dot_product_attention``'s signature, plus ``mesh=``."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.attend import AttnFunc
from para_core.attention.options import AttnKeywords
from para_core.layout import SequenceLayout
from para_core.mesh import sequence_mesh
from para_core.modes.unified import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode


def unified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mesh: DeviceMesh | ProcessGroup,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | None = None,
    assume_equal: bool = False,
    attn_func: AttnFunc | None = None,
    **options: Unpack[AttnKeywords],
) -> Tensor:
    """SDPA over a sequence that is sharded over ``mesh``: each rank gives its part and gets its part of the result.

    Args:
        query, key, value: this rank's part, ``[B, H, S_local, D]``; everything up to ``enable_gqa`` as in SDPA.
        mesh: see :class:`UnifiedAttnMode`.
        layout: who holds which queries, and which keys unless ``key_layout`` says so. Equal parts if left out.
        assume_equal: skip the exchange that turns bad input on one rank into an error on all.
        attn_func, options: see :class:`UnifiedAttnMode`.

    Raises:
        ValueError: on every rank, in eager code, for input that does not fit on any of them.
    """
    ranks = sequence_mesh(mesh, group_dim="ulysses")
    mode = UnifiedAttnMode(
        ranks, layout=layout, key_layout=key_layout, assume_equal=assume_equal, attn_func=attn_func, **options
    )
    return mode.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mesh: DeviceMesh | ProcessGroup,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | None = None,
    assume_equal: bool = False,
    attn_func: AttnFunc | None = None,
    **options: Unpack[AttnKeywords],
) -> Tensor:
    """:func:`unified_attention` on a mesh (or group) whose ranks all form the ring."""
    ranks = sequence_mesh(mesh, group_dim="ring")
    mode = RingAttnMode(
        ranks, layout=layout, key_layout=key_layout, assume_equal=assume_equal, attn_func=attn_func, **options
    )
    return mode.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mesh: DeviceMesh | ProcessGroup,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | None = None,
    assume_equal: bool = False,
    attn_func: AttnFunc | None = None,
    **options: Unpack[AttnKeywords],
) -> Tensor:
    """:func:`unified_attention` on a mesh (or group) whose ranks all trade tokens for heads."""
    ranks = sequence_mesh(mesh, group_dim="ulysses")
    mode = UlyssesAttnMode(
        ranks, layout=layout, key_layout=key_layout, assume_equal=assume_equal, attn_func=attn_func, **options
    )
    return mode.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
