"""Attention over a mesh as functions with the signature of ``scaled_dot_product_attention`` plus ``mesh=``.

Users call them, nothing in the library does. Each makes a mode of :mod:`.unified` and does not enter it.
Tests: tests/attention/test_exactness.py, tests/attention/test_gradients.py, and tests/test_compile.py for
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.local import AttnFunc
from para_core.attention.mask_rows import mark_part
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.mesh import SequenceMesh, sequence_mesh
from para_core.layout.sequence import SequenceLayout, even_layout
from para_core.modes.unified import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode

_P = ParamSpec("_P")


def _attend_over_mesh(
    kind: type[UnifiedAttnMode],
    /,
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
    **options: Any,
) -> Tensor:
    """Return the attention of :func:`unified_attention`, computed by a mode of the class ``kind``. Collective."""
    # Pass a SequenceMesh to the mode. If the mode got a DeviceMesh on NCCL, its constructor would run an
    # exchange to detect ranks that share a GPU, which is too costly for each call.
    sequence_ranks = sequence_mesh(mesh, group_dim=kind.group_dim)
    mode = kind(
        sequence_ranks,
        layout=layout,
        key_layout=key_layout,
        assume_equal=assume_equal,
        attn_func=attn_func,
        **options,
    )
    attn_mask = _mark_rows_of_rank(attn_mask, query, key, layout, key_layout, sequence_ranks)
    return mode.attend(SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _mark_rows_of_rank(
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | None,
    mesh: SequenceMesh,
) -> Tensor | None:
    """Return ``mask``, marked as ``cp.shard`` would if it has a row per query of this rank and all columns.

    The caller of a function passes its own part of each tensor, so the rows are those of this rank. Other
    arguments are returned as they are, and refused later on every rank. So is every mask in a graph, where
    sizes alone decide.
    """
    if torch.compiler.is_compiling() or mask is None:
        return mask
    for x in (mask, query, key):
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested or x.ndim < 2:
            return mask
    layout_of_keys = key_layout
    if key_layout is None:
        layout_of_keys = layout
    # Replicated keys are all on this rank, so only their layout tells that these are all columns.
    has_all_columns = mask.shape[-1] > key.shape[-2] or (
        layout_of_keys is not None and mask.shape[-1] == layout_of_keys.total
    )
    if mask.shape[-2] != query.shape[-2] or not has_all_columns:
        return mask
    if layout is None:
        layout = even_layout(query.shape[-2] * mesh.ranks, mesh.ranks)
    rows = mask[...]
    mark_part(rows, -2, layout, mesh.rank)
    return rows


def _make_function(
    name: str,
    kind: type[UnifiedAttnMode],
    attention: Callable[Concatenate[type[UnifiedAttnMode], _P], Tensor],
    doc: str,
) -> Callable[_P, Tensor]:
    """Return the public function ``name``, which calls ``attention`` with the mode class ``kind`` as its
    first argument.

    Type checkers infer the signature of this function from ``attention``. ``doc`` is its docstring.
    """

    def function(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        return attention(kind, *args, **kwargs)

    described: Any = function
    full_signature = signature(attention)
    described.__signature__ = full_signature.replace(parameters=[*full_signature.parameters.values()][1:])
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


unified_attention = _make_function(
    "unified_attention",
    UnifiedAttnMode,
    _attend_over_mesh,
    """Return attention over a sequence that is sharded over ``mesh``, exactly: a collective.

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
ring_attention = _make_function(
    "ring_attention",
    RingAttnMode,
    _attend_over_mesh,
    """Return what :func:`unified_attention` returns, computed by ring attention only.

    The arguments and errors are the same. All ranks of a process group form the ring; a ``ulysses`` dim of a mesh must
    have size 1, otherwise ValueError is raised.
    """,
)
ulysses_attention = _make_function(
    "ulysses_attention",
    UlyssesAttnMode,
    _attend_over_mesh,
    """Return what :func:`unified_attention` returns, computed by Ulysses attention only.

    The arguments and errors are the same. All ranks of a process group are used for Ulysses; a ``ring`` dim of a mesh
    must have size 1, otherwise ValueError is raised.
    """,
)
