"""Attention over a mesh as functions with the signature of ``scaled_dot_product_attention`` plus ``mesh=``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.attention_options import AttnKeywords
from para_core.attention.local import AttnFunc
from para_core.attention.mask_rows import mark_part
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.mesh import SequenceMesh, sequence_mesh
from para_core.layout.sequence import SequenceLayout, even_layout
from para_core.modes.unified import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode

_P = ParamSpec("_P")


def _attention(
    kind: type[UnifiedAttnMode],
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
    # Pass a SequenceMesh to the mode. If the mode got a DeviceMesh on NCCL, its constructor would run an
    # exchange to detect ranks that share a GPU, which is too costly for each call.
    ranks = sequence_mesh(mesh, group_dim=kind.group_dim)
    mode = kind(
        ranks, layout=layout, key_layout=key_layout, assume_equal=assume_equal, attn_func=attn_func, **options
    )
    attn_mask = _with_rows_of_rank(attn_mask, query, key, layout, ranks)
    return mode.attend(SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _with_rows_of_rank(
    mask: Tensor | None, query: Tensor, key: Tensor, layout: SequenceLayout | None, ranks: SequenceMesh
) -> Tensor | None:
    """Return ``mask``, marked as ``cp.shard`` would if it has a row per query of this rank and all columns.

    The caller of a function passes its own part of each tensor, so the rows are those of this rank. Other
    arguments are returned as they are, and refused later on every rank.
    """
    tensors = (mask, query, key)
    if torch.compiler.is_compiling() or not all(isinstance(x, Tensor) and x.ndim > 1 for x in tensors):
        return mask
    if mask is None or mask.shape[-2] != query.shape[-2] or mask.shape[-1] <= key.shape[-2]:
        return mask
    if layout is None:
        layout = even_layout(query.shape[-2] * ranks.ranks, ranks.ranks)
    rows = mask[...]
    mark_part(rows, -2, layout, ranks.rank)
    return rows


def _form(
    name: str,
    kind: type[UnifiedAttnMode],
    attention: Callable[Concatenate[type[UnifiedAttnMode], _P], Tensor],
    doc: str,
) -> Callable[_P, Tensor]:
    """Return the public function ``name``, which calls ``attention`` with the mode class ``kind`` as its
    first argument.

    Type checkers infer the signature of this function from ``attention``. ``doc`` is its docstring.
    """

    def form(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        return attention(kind, *args, **kwargs)

    described: Any = form
    full_signature = signature(attention)
    described.__signature__ = full_signature.replace(parameters=[*full_signature.parameters.values()][1:])
    form.__name__ = form.__qualname__ = name
    form.__doc__ = doc
    return form


unified_attention = _form(
    "unified_attention",
    UnifiedAttnMode,
    _attention,
    """Compute attention over a sequence that is sharded over ``mesh``, exactly.

    The arguments up to ``enable_gqa`` are those of ``scaled_dot_product_attention``. All ranks of ``mesh`` must call
    the function.

    Args:
        query, key, value (`torch.Tensor`): This rank's part of the sequence, ``[B, H, S_local, D]``.
        mesh (`DeviceMesh` or `ProcessGroup`): The ranks, as in :class:`UnifiedAttnMode`.
        layout (`SequenceLayout`, *optional*): The tokens that each rank holds of the queries, and of the keys too if
            ``key_layout`` is None. Defaults to parts of equal length in rank order.
        key_layout (`SequenceLayout`, *optional*): The tokens that each rank holds of the keys.
        assume_equal (`bool`, *optional*, defaults to `False`): Whether to skip the exchange that turns bad input on one
            rank into an error on all ranks.
        attn_func, options: As in :class:`UnifiedAttnMode`.

    Returns:
        `torch.Tensor`: Attention of this rank's queries over all keys, ``[B, H, S_local, D]``.

    Raises:
        ValueError: If the input of any rank does not fit. In eager code every rank raises it.
    """,
)
ring_attention = _form(
    "ring_attention",
    RingAttnMode,
    _attention,
    """Compute :func:`unified_attention` on a mesh, or a process group, whose ranks all form one ring.""",
)
ulysses_attention = _form(
    "ulysses_attention",
    UlyssesAttnMode,
    _attention,
    """Compute :func:`unified_attention` on a mesh, or a process group, whose ranks all use Ulysses.""",
)
