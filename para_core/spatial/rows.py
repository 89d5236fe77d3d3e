"""Arithmetic of rows: the input rows that an operator needs on each rank, and the layout of its output rows.

A *layout* is the number of rows of each rank, in rank order. A *range* is ``(start, stop)`` in rows of the full image;
it may reach beyond the image's edge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

Layout = tuple[int, ...]
Range = tuple[int, int]


@lru_cache(maxsize=4096)
def held(layout: Layout) -> tuple[Range, ...]:
    """Return the range of rows that each rank holds in ``layout``.

    >>> held((3, 2))
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
    stops = [stop // unit * unit for _, stop in held(layout)[:-1]] + [sum(layout)]
    return tuple([stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)])


class Windows(NamedTuple):
    """The layout of an operator's output, and for each rank the range of input rows that its output rows need."""

    layout: Layout
    wanted: tuple[Range, ...]


def _output_layout(layout: Layout, total: int, first: Callable[[int], int]) -> Layout:
    """Return the layout of an operator's ``total`` output rows.

    A rank whose input begins at row ``start`` gets the output rows from ``first(start)`` on. If a rank would then get
    no rows, the layout is even instead. This happens after many causal convolutions, which shift rows to later ranks.
    """
    starts = [0] + [min(max(first(start), 0), total) for start, _ in held(layout)[1:]]
    output = tuple([stop - start for start, stop in zip(starts, [*starts[1:], total], strict=True)])
    return output if min(output) > 0 else even(total, len(layout))


@lru_cache(maxsize=4096)
def convolution(layout: Layout, extent: int, stride: int, padding: int) -> Windows:
    """Return the output layout and the input ranges of a convolution whose kernel spans ``extent`` rows, including
    dilation.

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
    wanted = [(start * stride - padding, (stop - 1) * stride - padding + extent) for start, stop in held(output)]
    return Windows(output, tuple(wanted))


@lru_cache(maxsize=4096)
def transposed(layout: Layout, extent: int, stride: int, padding: int, extra: int) -> Windows:
    """Return the output layout and the input ranges of a transposed convolution.

    Input row i adds to ``extent`` output rows, from row ``i · stride − padding`` on.

    Args:
        extra: The argument ``output_padding``: number of rows added at the end of the output.

    >>> transposed((2, 2), extent=4, stride=2, padding=1, extra=0)
    Windows(layout=(4, 4), wanted=((-1, 3), (1, 5)))
    """
    total = (sum(layout) - 1) * stride - 2 * padding + extent + extra
    output = _output_layout(layout, total, lambda start: start * stride - padding + (extent - 1) // 2)
    wanted = [
        (-((extent - 1 - start - padding) // stride), (stop - 1 + padding) // stride + 1)
        for start, stop in held(output)
    ]
    return Windows(output, tuple(wanted))


class Overlapped(NamedTuple):
    """A convolution in two steps: the first runs on a rank's own rows while the halo is in flight, and the second
    replaces the output rows at the rank's upper and lower edge, which need the halo.

    Args:
        middle: For each rank, the range of its own rows, counted from its first row, on which the first step runs. Each
            output row has the middle of its window in this range.
        padding: Number of rows of padding around ``middle`` in the first step.
        edge: Number of output rows at each edge that the second step replaces.
        top, bottom: For each rank, the range of input rows of the full image that the output rows at its upper (lower)
            edge need. None at the edge of the image.
    """

    middle: tuple[Range, ...]
    padding: int
    edge: int
    top: tuple[Range | None, ...]
    bottom: tuple[Range | None, ...]


@lru_cache(maxsize=4096)
def overlapped(layout: Layout, extent: int, stride: int, padding: int) -> Overlapped | None:
    """Return the two steps of the :func:`convolution` with these arguments; None if two steps are not possible.

    Two steps are not possible if ``extent`` is even or 1, if some rank has only output rows that need a halo, or if the
    padding is wider than half a window.

    >>> plan = overlapped((4, 4), extent=3, stride=1, padding=1)
    >>> plan.middle, plan.top, plan.bottom
    (((0, 4), (0, 4)), (None, (3, 6)), ((2, 5), None))
    """
    half, count = extent // 2, -(-(extent // 2) // stride)
    output = convolution(layout, extent, stride, padding).layout
    if extent % 2 == 0 or extent == 1 or min(output) < 2 * count:
        return None
    middle, top, bottom = [], [], []
    for (start, stop), (first, last) in zip(held(output), held(layout), strict=True):
        begin, end = start * stride - padding + half, (stop - 1) * stride - padding + half + 1
        if begin < first or end > last:  # The padding is wider than half a window.
            return None
        middle.append((begin - first, end - first))
        # At the edge of the image the operator pads as on one device, so the rank needs no halo there.
        top.append(None if begin == 0 else (begin - half, begin - half + (count - 1) * stride + extent))
        bottom.append(None if end == sum(layout) else (end + half - (count - 1) * stride - extent, end + half))
    return Overlapped(tuple(middle), half, count, tuple(top), tuple(bottom))


def scaled(layout: Layout, total: int) -> Layout:
    """Return the layout of an image resized to ``total`` rows: each rank keeps its part of it up to rounding.

    >>> scaled((4, 3), 14), scaled((4, 4), 4)
    ((8, 6), (2, 2))
    """
    before = sum(layout)
    return _output_layout(layout, total, lambda start: -(-start * total // before))
