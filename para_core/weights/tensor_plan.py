"""Tensor plans: tables that say which linear layers of a model are sharded. They can be made from diffusers'
``_tp_plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Linear:
    """The sharding of one linear layer.

    Args:
        along (`"colwise"` or `"rowwise"`): ``"colwise"`` gives each rank some of the output channels. ``"rowwise"``
            gives each rank some of the input channels, and sums the results over the ranks.
        parts (`tuple[int, ...]`, *optional*, defaults to `()`): Relative sizes of the parts that are concatenated along
            the sharded dim, such as query, key and value, or the two halves of a gate. Each part is sharded separately.
            Empty means a single part.
        parts_from (`str`, *optional*, defaults to `""`): Name of the attribute of the layer that holds these relative
            sizes. Used if ``parts`` is empty.
    """

    along: Literal["colwise", "rowwise"]
    parts: tuple[int, ...] = ()
    parts_from: str = ""


COLUMNS, ROWS = Linear("colwise"), Linear("rowwise")


@dataclass(frozen=True)
class TensorPlan:
    """The tensor-parallel plan of one model: each rank computes some heads and some feed-forward hidden units.

    Module names are patterns: ``*`` matches one part between dots. Patterns that match no module are ignored.

    Args:
        linears (`Mapping[str, Linear]`): The sharding of each linear layer, by name.
        heads (`tuple[str, ...]`, *optional*, defaults to `()`): Names of modules whose attribute ``heads`` is divided
            by the number of ranks.
        counts (`Mapping[str, str]`, *optional*, defaults to `{}`): By module name, another attribute that is divided by
            the number of ranks, such as a number of hidden units.
        norms (`tuple[str, ...]`, *optional*, defaults to `()`): Names of RMS norms over the channels of all heads. The
            sum of squares of a token, which such a norm needs, is added up over the ranks.
        positions (`Mapping[str, int]`, *optional*, defaults to `{}`): For modules that return a tuple of tensors for
            all heads, such as rotary embeddings: the dim of heads or channels, by module name. Each rank takes its part
            of each tensor along this dim.
    """

    linears: Mapping[str, Linear]
    heads: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)


def published_tensor_plan(published: Mapping[str, Any]) -> TensorPlan:
    """Return the :class:`TensorPlan` that is equivalent to a diffusers ``_tp_plan``.

    Args:
        published: The style of each linear layer, by name: ``"colwise"``, ``"rowwise"``, ``PackedColwiseParallel`` or
            ``PackedRowwiseParallel``.

    Raises:
        ValueError: If the plan has another style.
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
