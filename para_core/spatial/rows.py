"""Sharded rows: the tag of a tensor that holds some, their arithmetic, and the error for mixing them.

The arithmetic says which input rows an operator needs on each rank, and the layout of its output rows.

A *layout* is the number of rows of each rank, in rank order. A *range* is ``(start, stop)`` in rows of the
full image; it may reach beyond the image's edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

Layout = tuple[int, ...]
Range = tuple[int, int]


@lru_cache(maxsize=4096)
def ranges_of(layout: Layout) -> tuple[Range, ...]:
    """Return the range of rows that each rank holds in ``layout``.

    >>> ranges_of((3, 2))
    ((0, 3), (3, 5))
    """
    stops = list(accumulate(layout))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def even(total: int, ranks: int, unit: int = 1) -> Layout:
    """Return the most even layout of ``total`` rows in multiples of ``unit``.

    If ``total`` is not a multiple of ``unit``, the last rank gets the remaining rows.

    >>> even(7, 2), even(50, 2, unit=8)
    ((4, 3), (24, 26))
    """
    units, rest = divmod(total, unit)
    layout = [(units + ranks - 1 - rank) // ranks * unit for rank in range(ranks)]
    layout[-1] += rest
    return tuple(layout)


def multiples(layout: Layout, unit: int) -> Layout:
    """Return ``layout`` with every boundary between ranks rounded down to a multiple of ``unit``.

    >>> multiples((5, 3, 4), 2)
    (4, 4, 4)
    """
    stops = [stop // unit * unit for _, stop in ranges_of(layout)[:-1]] + [sum(layout)]
    return tuple([stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)])


class Windows(NamedTuple):
    """The layout of an operator's output, and for each rank the range of input rows that its output rows need."""

    layout: Layout
    wanted: tuple[Range, ...]


def _output_layout(layout: Layout, total: int, first: Callable[[int], int]) -> Layout:
    """Return the layout of an operator's ``total`` output rows.

    A rank whose input begins at row ``start`` gets the output rows from ``first(start)`` on. If a rank would
    then get no rows, the layout is even instead. This happens after many causal convolutions, which shift
    rows to later ranks.
    """
    starts = [0] + [min(max(first(start), 0), total) for start, _ in ranges_of(layout)[1:]]
    output = tuple([stop - start for start, stop in zip(starts, [*starts[1:], total], strict=True)])
    if min(output) < 1:
        return even(total, len(layout))
    return output


@lru_cache(maxsize=4096)
def convolution(layout: Layout, extent: int, stride: int, padding: int) -> Windows:
    """Return the output layout and the input ranges of a convolution whose kernel spans ``extent`` rows,
    including dilation.

    Output row j is computed by the rank that holds the middle of its window, which is input row
    ``j · stride − padding + (extent − 1) // 2``.

    >>> convolution((4, 3), extent=3, stride=1, padding=1)
    Windows(layout=(4, 3), wanted=((-1, 5), (3, 8)))
    >>> convolution((4, 4), extent=3, stride=2, padding=0)
    Windows(layout=(2, 1), wanted=((0, 5), (4, 7)))
    """
    total = (sum(layout) + 2 * padding - extent) // stride + 1
    middle = (extent - 1) // 2 - padding
    output = _output_layout(layout, total, lambda start: -((middle - start) // stride))
    wanted = [
        (start * stride - padding, (stop - 1) * stride - padding + extent)
        for start, stop in ranges_of(output)
    ]
    return Windows(output, tuple(wanted))


@lru_cache(maxsize=4096)
def transpose(layout: Layout, extent: int, stride: int, padding: int, extra: int) -> Windows:
    """Return the output layout and the input ranges of a transposed convolution.

    Input row i adds to ``extent`` output rows, from row ``i · stride − padding`` on.

    Args:
        extra: The argument ``output_padding``: number of rows added at the end of the output.

    >>> transpose((2, 2), extent=4, stride=2, padding=1, extra=0)
    Windows(layout=(4, 4), wanted=((-1, 3), (1, 5)))
    """
    total = (sum(layout) - 1) * stride - 2 * padding + extent + extra
    output = _output_layout(layout, total, lambda start: start * stride - padding + (extent - 1) // 2)
    wanted = [
        (-((extent - 1 - start - padding) // stride), (stop - 1 + padding) // stride + 1)
        for start, stop in ranges_of(output)
    ]
    return Windows(output, tuple(wanted))


class Overlapped(NamedTuple):
    """A convolution in two steps: the first runs on a rank's own rows while the halo is in flight, and the
    second replaces the output rows at the rank's upper and lower edge, which need the halo.

    Args:
        middle: For each rank, the range of its own rows, counted from its first row, on which the first step
            runs. Each output row has the middle of its window in this range.
        padding: Number of rows of padding around ``middle`` in the first step.
        edge: Number of output rows at each edge that the second step replaces.
        top, bottom: For each rank, the range of input rows of the full image that the output rows at its
            upper (lower) edge need. None at the edge of the image.
    """

    middle: tuple[Range, ...]
    padding: int
    edge: int
    top: tuple[Range | None, ...]
    bottom: tuple[Range | None, ...]


@lru_cache(maxsize=4096)
def overlap(layout: Layout, extent: int, stride: int, padding: int) -> Overlapped | None:
    """Return the two steps of the :func:`convolution` with these arguments; None if two steps are not
    possible.

    Two steps are not possible if ``extent`` is even or 1, if some rank has only output rows that need a halo,
    or if the padding is wider than half a window.

    >>> plan = overlap((4, 4), extent=3, stride=1, padding=1)
    >>> plan.middle, plan.top, plan.bottom
    (((0, 4), (0, 4)), (None, (3, 6)), ((2, 5), None))
    """
    half, count = extent // 2, -(-(extent // 2) // stride)
    output = convolution(layout, extent, stride, padding).layout
    if extent % 2 == 0 or extent == 1 or min(output) < 2 * count:
        return None
    middle: list[Range] = []
    top: list[Range | None] = []
    bottom: list[Range | None] = []
    for (start, stop), (first, last) in zip(ranges_of(output), ranges_of(layout), strict=True):
        begin, end = start * stride - padding + half, (stop - 1) * stride - padding + half + 1
        if begin < first or end > last:  # The padding is wider than half a window.
            return None
        middle.append((begin - first, end - first))
        edge_extent = (count - 1) * stride + extent
        top.append((begin - half, begin - half + edge_extent))
        bottom.append((end + half - edge_extent, end + half))
        # At the edge of the image the operator pads as on one device, so the rank needs no halo there.
        if begin == 0:
            top[-1] = None
        if end == sum(layout):
            bottom[-1] = None
    return Overlapped(tuple(middle), half, count, tuple(top), tuple(bottom))


def scale(layout: Layout, total: int) -> Layout:
    """Return the layout of an image resized to ``total`` rows: each rank keeps its part of it up to rounding.

    >>> scale((4, 3), 14), scale((4, 4), 4)
    ((8, 6), (2, 2))
    """
    before = sum(layout)
    return _output_layout(layout, total, lambda start: -(-start * total // before))


_TAG = "_para_core_rows"
# A torch function. Each rule is called as rule(ranks, function, args, kwargs).
Function = Callable[..., Any]


@dataclass(frozen=True)
class RowTag:
    """The sharding of one dim of a tensor over ranks.

    In the full tensor, ``dim`` consists of ``outer`` consecutive runs of ``sum(layout)`` units, and rank r
    holds ``layout[r]`` units of each run. A unit is a row, or a fixed number of elements that belong to rows.
    For example, video tokens in the order (T, H, W) have ``outer`` = T runs of H · W units.
    """

    dim: int
    layout: Layout
    outer: int = 1

    @property
    def total(self) -> int:
        """The size of ``dim`` in the full tensor."""
        return self.outer * sum(self.layout)

    def at(self, dim: int) -> RowTag:
        return replace(self, dim=dim)


def rows_of(x: Any) -> RowTag | None:
    """Return the tag of ``x``; None if ``x`` is not a tensor or not sharded."""
    if not isinstance(x, Tensor):
        return None
    rows: RowTag | None = getattr(x, _TAG, None)
    return rows


def set_rows(x: Tensor, rows: RowTag) -> Tensor:
    """Mark ``x`` as this rank's part of a tensor that is sharded as ``rows`` says, and return ``x`` itself."""
    setattr(x, _TAG, rows)
    return x


def clear_rows(x: Tensor) -> Tensor:
    """Remove the mark of :func:`set_rows` from ``x``, and return ``x`` itself."""
    if hasattr(x, _TAG):
        delattr(x, _TAG)
    return x


class ShardedSize(int):
    """The size of the full tensor along its sharded dim: an int in ``x.shape`` that also carries the layout.

    Model code that reads this size computes and branches as on one device, equally on every rank. If the size
    is an argument of a view, the mode replaces it by this rank's number of rows (:func:`local_sizes`). A
    multiple is a :class:`ShardedSize` again, and so is a quotient if the number of each rank is divisible;
    any other result is a plain number.

    >>> rows = ShardedSize((3, 4), rank=0)
    >>> rows, (rows * 2).layout, (rows * 2).local, rows // 2, rows % 2, rows * 0.5
    (7, (6, 8), 6, 3, 1, 3.5)
    """

    layout: Layout
    rank: int

    def __new__(cls, layout: Layout, rank: int) -> ShardedSize:
        size = super().__new__(cls, sum(layout))
        size.layout, size.rank = layout, rank
        return size

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
    """Return ``value``, a size or nested sizes, with each :class:`ShardedSize` replaced by this rank's rows."""
    if isinstance(value, ShardedSize):
        return value.local
    if isinstance(value, (tuple, list)):
        return type(value)([local_sizes(item) for item in value])
    return value


def sharded_dim(shape: Sequence[Any]) -> tuple[int, Layout] | None:
    """Return the index and the layout of the only :class:`ShardedSize` in ``shape``; None if there is none or
    several.

    A shape with several of them is that of an attention mask, whose rows and columns are tokens.
    """
    sharded = [(dim, size.layout) for dim, size in enumerate(shape) if isinstance(size, ShardedSize)]
    return sharded[0] if len(sharded) == 1 else None


def first_sharded(values: Iterable[Any]) -> RowTag | ShardedSize | None:
    """Return the tag of the first sharded tensor in ``values`` and in lists and tuples among them.

    Without a sharded tensor, return the first :class:`ShardedSize`, or None.
    """
    size: RowTag | ShardedSize | None = None
    for value in values:
        tag: RowTag | ShardedSize | None
        if isinstance(value, (list, tuple)):
            tag = first_sharded(value)
        else:
            tag = value if isinstance(value, ShardedSize) else rows_of(value)
        if isinstance(tag, RowTag):
            return tag
        size = size or tag
    return size


class MixesRows(RuntimeError):
    """An error for a function that has no rule for sharded rows, or combines rows in an unsupported way."""


def name_of(func: Function) -> str:
    """Return the name by which the rule of a torch function is found, for example ``add`` for ``Tensor.__iadd__``."""
    name: str = getattr(getattr(func, "func", func), "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    stripped = name.strip("_")
    if name.startswith("__i") and name.endswith("__") and stripped not in ("invert", "index", "int", "iter"):
        return stripped[1:]
    return stripped


def unknown(func: Function, rows: RowTag | ShardedSize | None, reason: str) -> MixesRows:
    """Return (not raise) the error that ``func`` cannot run on tensors sharded as ``rows``, for ``reason``."""
    sharding = ""
    if isinstance(rows, RowTag):
        sharding = f" on a tensor whose dim {rows.dim} is sharded over {len(rows.layout)} ranks as {list(rows.layout)}"
    return MixesRows(
        f"{name_of(func)}{sharding}: {reason}. Leave out what calls it, or run this model on one rank: "
        "unparallelize_vae(vae), or unparallelize_pipe(pipe) for a UNet. A VAE may run in distributed tiles instead "
        "(method='tiled')."
    )
