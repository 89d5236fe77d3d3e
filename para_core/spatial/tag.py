"""What is known of a tensor that holds a part of the rows: a tag, which rides on the tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
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


class Count(int):
    """A number of local rows, which knows those of all ranks: what ``x.shape`` holds where ``x`` is sharded.

    As a size it is this rank's. Where a model decides by it (compares, divides, takes a remainder), it is that of all rows, so that
    every rank decides as one device would.

    >>> rows = Count(3, (3, 4))
    >>> (rows * 2).layout, rows > 5, rows == 7, rows % 2, rows // 2, int(rows)
    ((6, 8), True, True, 1, 3, 3)
    """

    layout: Layout

    def __new__(cls, value: int, layout: Layout) -> Count:
        made = super().__new__(cls, value)
        made.layout = layout
        return made

    @property
    def total(self) -> int:
        return sum(self.layout)

    def _with(self, other: Any, change: Callable[[int, int], int]) -> Any:
        # Of two counts nobody knows what they mean together.
        if type(other) is not int:
            return change(int(self), int(other)) if isinstance(other, int) else NotImplemented
        return Count(change(int(self), other), tuple([change(count, other) for count in self.layout]))

    def __mul__(self, other: Any) -> Any:
        return self._with(other, operator.mul)

    def __add__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, operator.sub)

    def __floordiv__(self, other: Any) -> Any:
        # What parts rows is no number of rows that ranks hold.
        whole = type(other) is int and all(count % other == 0 for count in self.layout)
        return self._with(other, operator.floordiv) if whole else self.total // _total(other)

    __rmul__ = __mul__
    __radd__ = __add__

    def __truediv__(self, other: Any) -> Any:
        return self.total / _total(other)

    def __mod__(self, other: Any) -> Any:
        return self.total % _total(other)

    def __eq__(self, other: object) -> bool:
        return bool(self.total == _total(other))

    def __hash__(self) -> int:
        return hash(self.total)

    def __lt__(self, other: Any) -> Any:
        return self.total < _total(other)

    def __le__(self, other: Any) -> Any:
        return self.total <= _total(other)

    def __gt__(self, other: Any) -> Any:
        return self.total > _total(other)

    def __ge__(self, other: Any) -> Any:
        return self.total >= _total(other)


def _total(value: Any) -> Any:
    return value.total if isinstance(value, Count) else value


def counted(shape: Sequence[Any]) -> tuple[int, Layout] | None:
    """Which size of ``shape`` is a :class:`Count`, and its layout; None if none is, or more (a mask of tokens by tokens)."""
    found = [(dim, size.layout) for dim, size in enumerate(shape) if isinstance(size, Count)]
    return found[0] if len(found) == 1 else None
