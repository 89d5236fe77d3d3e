"""What is known of a tensor that holds a part of the rows: a tag, which rides on the tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from para_core.spatial.rows import Layout

_TAG = "_para_core_rows"


@dataclass(frozen=True)
class Rows:
    """Along ``dim`` a rank holds ``outer`` runs, one behind the other, each of its ``layout[rank]`` of ``sum(layout)`` units.

    A unit is a row, or a multiple of rows: tokens of a video, in the order (T, H, W), have ``outer`` = T and H · W tokens a run.
    """

    dim: int
    layout: Layout
    outer: int = 1

    @property
    def total(self) -> int:
        """Size of ``dim`` on one device."""
        return self.outer * sum(self.layout)

    def at(self, dim: int) -> Rows:
        return replace(self, dim=dim)


def rows_of(x: Any) -> Rows | None:
    """The tag of ``x``; None if it is no tensor, or every rank holds all of it."""
    return getattr(x, _TAG, None) if isinstance(x, Tensor) else None


def tagged(x: Tensor, rows: Rows) -> Tensor:
    """``x``, which now counts as this rank's part."""
    setattr(x, _TAG, rows)
    return x


def untagged(x: Tensor) -> Tensor:
    """``x``, of which every rank now counts as holding all."""
    if hasattr(x, _TAG):
        delattr(x, _TAG)
    return x
