"""Tensor plans: how the linear layers of a model are sharded over tensor ranks, in diffusers' form (``_tp_plan``) or
ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Linear:
    """One linear layer.

    Args:
        along: ``"colwise"``: each rank computes some of its outputs. ``"rowwise"``: each takes some of its inputs, and
            the results are summed over the ranks.
        parts: relative sizes of what lies side by side along that dim (query, key and value; the two halves of a gate),
            each of which is sharded. Empty: one part.
        parts_from: name of an attribute of the module that says them.
    """

    along: Literal["colwise", "rowwise"]
    parts: tuple[int, ...] = ()
    parts_from: str = ""


COLUMNS, ROWS = Linear("colwise"), Linear("rowwise")


@dataclass(frozen=True)
class TensorPlan:
    """The tensor-parallel plan of one model: each rank computes some heads, and some of the hidden units behind
    attention.

    In names of modules, ``*`` stands for any one part. A name that a model does not have, or not in each block, is
    passed over.

    Args:
        linears: name of a linear layer to how it is sharded.
        heads: modules whose attribute ``heads`` counts the heads that this rank computes.
        counts: modules with such an attribute, which counts the hidden units that this rank computes.
        norms: RMS norms over the channels of all heads: the sum of squares, a number for each token, is reduced over
            the ranks.
        positions: modules each of whose outputs has along this dim all heads, or the channels of all, of which a rank
            takes its own.
    """

    linears: Mapping[str, Linear]
    heads: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)


def published_tensor_plan(published: Mapping[str, Any]) -> TensorPlan:
    """Diffusers' ``_tp_plan``: ``"colwise"``, ``"rowwise"``, ``PackedColwiseParallel`` or ``PackedRowwiseParallel`` by
    name.

    Raises:
        ValueError: it holds another style.
    """
    return TensorPlan({name: _published(name, style) for name, style in published.items()})


def _published(name: str, style: Any) -> Linear:
    if style in ("colwise", "rowwise"):
        return Linear(style)
    packed = {"PackedColwiseParallel": "colwise", "PackedRowwiseParallel": "rowwise"}.get(type(style).__name__)
    if packed is None:
        raise ValueError(
            f"a _tp_plan says {style!r} of {name!r}; expected 'colwise', 'rowwise', PackedColwiseParallel or "
            "PackedRowwiseParallel."
        )
    attribute = "_tp_packed_col_blocks" if packed == "colwise" else "_tp_packed_row_blocks"
    return Linear(packed, tuple(style.blocks or ()), attribute)  # type: ignore[arg-type]
