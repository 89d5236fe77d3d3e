"""What is known of a tensor that holds a part of the rows: a tag, which rides on the tensor."""

from __future__ import annotations

from collections.abc import Sequence
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


class ShardedSize(int):
    """A number of rows, which knows how many of them each rank holds: what ``x.shape`` holds where ``x`` is sharded.

    It is that of all rows, whatever is computed of it or decided by it: as on one device, and on every rank alike. As a size of a
    sharded tensor, in a view, say, it is this rank's (:func:`local_sizes`); so is a multiple, and a part without a rest on any rank.

    >>> rows = ShardedSize((3, 4), rank=0)
    >>> rows, (rows * 2).layout, (rows * 2).local, rows // 2, rows % 2, rows * 0.5
    (7, (6, 8), 6, 3, 1, 3.5)
    """

    layout: Layout
    rank: int

    def __new__(cls, layout: Layout, rank: int) -> ShardedSize:
        made = super().__new__(cls, sum(layout))
        made.layout, made.rank = layout, rank
        return made

    @property
    def local(self) -> int:
        return self.layout[self.rank]

    def __mul__(self, other: Any) -> Any:
        if type(other) is not int:
            return int(self) * other
        return ShardedSize(tuple([count * other for count in self.layout]), self.rank)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is not int or any(count % other for count in self.layout):
            return int(self) // other
        return ShardedSize(tuple([count // other for count in self.layout]), self.rank)


def local_sizes(value: Any) -> Any:
    """``value`` (a size, sizes, arguments) in which each :class:`ShardedSize` is this rank's number of rows."""
    if isinstance(value, ShardedSize):
        return value.local
    if isinstance(value, (tuple, list)):
        return type(value)([local_sizes(one) for one in value])
    return value


def counted(shape: Sequence[Any]) -> tuple[int, Layout] | None:
    """Which size of ``shape`` is a :class:`ShardedSize`, and its layout; None if none is, or more (a mask of tokens by tokens)."""
    found = [(dim, size.layout) for dim, size in enumerate(shape) if isinstance(size, ShardedSize)]
    return found[0] if len(found) == 1 else None
