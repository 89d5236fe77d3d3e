"""Which rows an operator needs, and who holds what it makes. Pure arithmetic: no tensors, no torch.distributed.

A *layout* says how many rows each rank holds, in rank order. A *range* is ``(start, stop)`` in rows of the whole image; it may
reach over the image's edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Layout = tuple[int, ...]
Range = tuple[int, int]


@lru_cache(maxsize=4096)
def held(layout: Layout) -> tuple[Range, ...]:
    """What each rank holds.

    >>> held((3, 2))
    ((0, 3), (3, 5))
    """
    stops = list(accumulate(layout))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def even(total: int, ranks: int, unit: int = 1) -> Layout:
    """``total`` rows over ``ranks``, as evenly as whole units of ``unit`` rows allow. What is no whole unit goes to the last rank.

    >>> even(7, 2), even(50, 2, unit=8)
    ((4, 3), (24, 26))
    """
    units, rest = divmod(total, unit)
    layout = [(units + ranks - 1 - rank) // ranks * unit for rank in range(ranks)]
    layout[-1] += rest
    return tuple(layout)


def multiples(layout: Layout, unit: int) -> Layout:
    """``layout`` with every boundary moved up to a multiple of ``unit``.

    >>> multiples((5, 3, 4), 2)
    (4, 4, 4)
    """
    stops = [stop // unit * unit for _, stop in held(layout)[:-1]] + [sum(layout)]
    return tuple([stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)])


@dataclass(frozen=True)
class Windows:
    """What an operator makes of sharded rows: who holds the result, and the rows that each rank needs for its part."""

    layout: Layout
    wanted: tuple[Range, ...]


def _shared_out(layout: Layout, total: int, first: Callable[[int], int]) -> Layout:
    """``total`` rows of output, of which ``first(start)`` is the first one of the rank whose input begins at ``start``.

    Evenly, where that would leave a rank without any: causal convolutions along rows move them down, layer by layer.
    """
    starts = [0] + [min(max(first(start), 0), total) for start, _ in held(layout)[1:]]
    found = tuple([stop - start for start, stop in zip(starts, [*starts[1:], total], strict=True)])
    return found if min(found) > 0 else even(total, len(layout))


@lru_cache(maxsize=4096)
def convolution(layout: Layout, extent: int, stride: int, padding: int) -> Windows:
    """For a window of ``extent`` rows that begins ``padding`` rows over the edge and moves by ``stride``.

    Row j of the output goes to the rank that holds the middle of its window, row ``j · stride − padding + (extent − 1) // 2``.

    >>> convolution((4, 3), extent=3, stride=1, padding=1)
    Windows(layout=(4, 3), wanted=((-1, 5), (3, 8)))
    >>> convolution((4, 4), extent=3, stride=2, padding=0)
    Windows(layout=(2, 1), wanted=((0, 5), (4, 7)))
    """
    total = (sum(layout) + 2 * padding - extent) // stride + 1
    middle = (extent - 1) // 2 - padding
    made = _shared_out(layout, total, lambda start: -((middle - start) // stride))
    wanted = [(start * stride - padding, (stop - 1) * stride - padding + extent) for start, stop in held(made)]
    return Windows(made, tuple(wanted))


@lru_cache(maxsize=4096)
def transposed(layout: Layout, extent: int, stride: int, padding: int, extra: int) -> Windows:
    """For a transposed convolution: input row i reaches output rows ``i · stride − padding`` and ``extent − 1`` more.

    Args:
        extra: rows after the last one that is reached (``output_padding``).

    >>> transposed((2, 2), extent=4, stride=2, padding=1, extra=0)
    Windows(layout=(4, 4), wanted=((-1, 3), (1, 5)))
    """
    total = (sum(layout) - 1) * stride - 2 * padding + extent + extra
    made = _shared_out(layout, total, lambda start: start * stride - padding + (extent - 1) // 2)
    wanted = [
        (-((extent - 1 - start - padding) // stride), (stop - 1 + padding) // stride + 1) for start, stop in held(made)
    ]
    return Windows(made, tuple(wanted))


@dataclass(frozen=True)
class Overlapped:
    """A convolution of which most rows need nothing from other ranks: those first, the edges when their rows have arrived.

    ``middle`` is, for each rank, the local rows that are computed with ``padding`` rows around them, from the first to the last
    middle of a window. ``edges`` are the ranges whose windows reach over them, for ``count`` rows of output at either end.
    """

    layout: Layout
    middle: tuple[Range, ...]
    padding: int
    count: int
    top: tuple[Range | None, ...]
    bottom: tuple[Range | None, ...]


@lru_cache(maxsize=4096)
def overlapped(layout: Layout, extent: int, stride: int, padding: int) -> Overlapped | None:
    """:func:`convolution` in two steps; None where windows have no middle, or a rank has no row that needs nothing.

    >>> found = overlapped((4, 4), extent=3, stride=1, padding=1)
    >>> found.middle, found.top, found.bottom
    (((0, 4), (0, 4)), (None, (3, 6)), ((2, 5), None))
    """
    half, count = extent // 2, -(-(extent // 2) // stride)
    made = convolution(layout, extent, stride, padding).layout
    if extent % 2 == 0 or extent == 1 or min(made) < 2 * count:
        return None
    middle, top, bottom = [], [], []
    for (start, stop), (first, last) in zip(held(made), held(layout), strict=True):
        begin, end = start * stride - padding + half, (stop - 1) * stride - padding + half + 1
        if begin < first or end > last:  # the padding is wider than half of a window
            return None
        middle.append((begin - first, end - first))
        # What is padded locally is zeros there on one device, too.
        top.append(None if begin == 0 else (begin - half, begin - half + (count - 1) * stride + extent))
        bottom.append(None if end == sum(layout) else (end + half - (count - 1) * stride - extent, end + half))
    return Overlapped(made, tuple(middle), half, count, tuple(top), tuple(bottom))


def scaled(layout: Layout, total: int) -> Layout:
    """``total`` rows distributed where the same part of the image is, as near as whole rows allow.

    >>> scaled((4, 3), 14), scaled((4, 4), 4)
    ((8, 6), (2, 2))
    """
    before = sum(layout)
    return _shared_out(layout, total, lambda start: -(-start * total // before))
