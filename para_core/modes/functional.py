"""Attention over a mesh as functions with the signature of ``scaled_dot_product_attention`` plus ``mesh=``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Unpack

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.attention_options import AttnKeywords
from para_core.attention.attn_func import AttnFunc
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.layout import SequenceLayout
from para_core.distributed.mesh import sequence_mesh
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
    # Construct the mode from a SequenceMesh: from a DeviceMesh on NCCL it would run an exchange to detect ranks that
    # share a GPU, which is too costly for each call.
    ranks = sequence_mesh(mesh, group_dim=kind.group_dim)
    mode = kind(ranks, layout=layout, key_layout=key_layout, assume_equal=assume_equal, attn_func=attn_func, **options)
    return mode.attend(SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _form(
    name: str,
    kind: type[UnifiedAttnMode],
    attention: Callable[Concatenate[type[UnifiedAttnMode], _P], Tensor],
    doc: str,
) -> Callable[_P, Tensor]:
    """Return a public function that calls ``attention`` with ``kind`` as its first argument.

    Args:
        name: The name of the function.
        kind: The mode class that computes the call.
        attention: The implementation. It is an argument so that type checkers infer the signature.
        doc: The docstring of the function.
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
    """SDPA over a sequence that is sharded over ``mesh``: each rank gives its part and gets its part of the result.

    Args:
        query, key, value: this rank's part, ``[B, H, S_local, D]``; everything up to ``enable_gqa`` as in SDPA.
        mesh: see :class:`UnifiedAttnMode`.
        layout: who holds which queries, and which keys unless ``key_layout`` says so. Equal parts if left out.
        assume_equal: skip the exchange that turns bad input on one rank into an error on all.
        attn_func, options: see :class:`UnifiedAttnMode`.

    Raises:
        ValueError: on every rank, in eager code, for input that does not fit on any of them.
    """,
)
ring_attention = _form(
    "ring_attention",
    RingAttnMode,
    _attention,
    """:func:`unified_attention` on a mesh (or group) whose ranks all form the ring.""",
)
ulysses_attention = _form(
    "ulysses_attention",
    UlyssesAttnMode,
    _attention,
    """:func:`unified_attention` on a mesh (or group) whose ranks all trade tokens for heads.""",
)
