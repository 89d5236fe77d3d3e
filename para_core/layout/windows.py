"""The rows that operators with windows need on each rank, and the numbers of rows that they return.

The *sizes* of an image are the numbers of rows of the ranks, in rank order: those of
:meth:`Layout.consecutive <para_core.layout.pieces.Layout.consecutive>`. A *run* is ``(start, length)`` in
rows of the full image; it may reach beyond the image's edge.

The rules of :mod:`para_core.spatial` and of :mod:`para_core.same_bits` call it; the rows are then fetched in
:mod:`para_core.spatial.fetch`. ``adapters/vae`` divides the rows of images and of latents by it. Everything
here is integer arithmetic, equal on all ranks. Tests: tests/spatial/test_functions.py, and the examples below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from para_core.layout.sequence import Run

Sizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def bounds_of(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Return the first row of each rank, and the one after its last.

    >>> bounds_of((3, 2))
    ((0, 3), (3, 5))
    """
    stops = list(accumulate(sizes))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def divide_evenly(total: int, ranks: int, unit: int = 1) -> Sizes:
    """Return the most even sizes of ``total`` rows in multiples of ``unit``.

    If ``total`` is not a multiple of ``unit``, the last rank gets the remaining rows.

    >>> divide_evenly(7, 2), divide_evenly(50, 2, unit=8)
    ((4, 3), (24, 26))
    """
    units, rest = divmod(total, unit)
    sizes = [(units + ranks - 1 - rank) // ranks * unit for rank in range(ranks)]
    sizes[-1] += rest
    return tuple(sizes)


def round_to_multiples(sizes: Sizes, unit: int) -> Sizes:
    """Return ``sizes`` with every boundary between ranks rounded down to a multiple of ``unit``.

    >>> round_to_multiples((5, 3, 4), 2)
    (4, 4, 4)
    """
    stops = [stop // unit * unit for _, stop in bounds_of(sizes)[:-1]] + [sum(sizes)]
    return tuple([stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)])


class Windows(NamedTuple):
    """The sizes of an operator's output, and for each rank the run of input rows that its output rows need."""

    sizes: Sizes
    wanted: tuple[Run, ...]


def _output_sizes(sizes: Sizes, total: int, first: Callable[[int], int]) -> Sizes:
    """Return the sizes of an operator's ``total`` output rows.

    A rank whose input begins at row ``start`` gets the output rows from ``first(start)`` on, which must not
    decrease with ``start``. If a rank would then get no rows, the sizes are even instead. This happens after
    many causal convolutions, which shift rows to later ranks.
    """
    starts = [0] + [min(max(first(start), 0), total) for start, _ in bounds_of(sizes)[1:]]
    output = tuple([stop - start for start, stop in zip(starts, [*starts[1:], total], strict=True)])
    if min(output) < 1:
        return divide_evenly(total, len(sizes))
    return output


@lru_cache(maxsize=4096)
def plan_convolution(sizes: Sizes, extent: int, stride: int, padding: int) -> Windows:
    """Return the output sizes and the input runs of a convolution whose kernel spans ``extent`` rows,
    including dilation.

    Output row j is computed by the rank that holds the middle of its window, which is input row
    ``j · stride − padding + (extent − 1) // 2``, unless a rank would get no rows (:func:`_output_sizes`).
    With fewer output rows than ranks the last ranks get none, and their runs have no meaning: callers refuse
    such sizes (:func:`para_core.spatial.rules.require_rows`).

    >>> plan_convolution((4, 3), extent=3, stride=1, padding=1)
    Windows(sizes=(4, 3), wanted=((-1, 6), (3, 5)))
    >>> plan_convolution((4, 4), extent=3, stride=2, padding=0)
    Windows(sizes=(2, 1), wanted=((0, 5), (4, 3)))
    """
    total = (sum(sizes) + 2 * padding - extent) // stride + 1
    middle = (extent - 1) // 2 - padding
    output = _output_sizes(sizes, total, lambda start: -((middle - start) // stride))
    wanted = [
        (start * stride - padding, (stop - 1 - start) * stride + extent) for start, stop in bounds_of(output)
    ]
    return Windows(output, tuple(wanted))


@lru_cache(maxsize=4096)
def plan_transposed(sizes: Sizes, extent: int, stride: int, padding: int, output_padding: int) -> Windows:
    """Return the output sizes and the input runs of a transposed convolution.

    Input row i adds to ``extent`` output rows, from row ``i · stride − padding`` on. ``output_padding`` is
    the number of rows added at the end of the output.

    >>> plan_transposed((2, 2), extent=4, stride=2, padding=1, output_padding=0)
    Windows(sizes=(4, 4), wanted=((-1, 4), (1, 4)))
    """
    total = (sum(sizes) - 1) * stride - 2 * padding + extent + output_padding
    output = _output_sizes(sizes, total, lambda start: start * stride - padding + (extent - 1) // 2)
    wanted = []
    for start, stop in bounds_of(output):
        first = -((extent - 1 - start - padding) // stride)
        # With a stride longer than the kernel, output rows lie between those of input rows: begin before them.
        first = min(first, (start + padding) // stride)
        end = (stop - 1 + padding) // stride + 1
        wanted.append((first, end - first))
    return Windows(output, tuple(wanted))


class Overlapped(NamedTuple):
    """A convolution in two steps: the first runs on a rank's own rows while the halo is in flight, and the
    second replaces the output rows at the rank's upper and lower edge, which need the halo.

    Args:
        middle: For each rank, the run of its own rows, counted from its first row, on which the first step
            runs. Each output row has the middle of its window in this run.
        padding: Number of rows of padding around ``middle`` in the first step.
        edge: Number of output rows at each edge that the second step replaces.
        top, bottom: For each rank, the run of input rows of the full image that the output rows at its
            upper (lower) edge need. None at the edge of the image.
    """

    middle: tuple[Run, ...]
    padding: int
    edge: int
    top: tuple[Run | None, ...]
    bottom: tuple[Run | None, ...]


@lru_cache(maxsize=4096)
def plan_overlap(sizes: Sizes, extent: int, stride: int, padding: int) -> Overlapped | None:
    """Return the two steps of the convolution of :func:`plan_convolution`; None if two steps are not
    possible.

    Two steps are not possible if ``extent`` is even or 1, if some rank has only output rows that need a halo,
    or if a rank does not hold the middles of the windows of its output rows.

    >>> plan = plan_overlap((4, 4), extent=3, stride=1, padding=1)
    >>> plan.middle, plan.top, plan.bottom
    (((0, 4), (0, 4)), (None, (3, 3)), ((2, 3), None))
    """
    half = extent // 2
    # The window of the j-th output row of a rank begins j · stride − half rows after the first of ``middle``,
    # so the halo is needed by the first half / stride output rows, rounded up, and by as many at the end.
    count = -(-half // stride)
    output = plan_convolution(sizes, extent, stride, padding).sizes
    if extent % 2 == 0 or extent == 1 or min(output) < 2 * count:
        return None
    edge_extent = (count - 1) * stride + extent
    middle: list[Run] = []
    top: list[Run | None] = []
    bottom: list[Run | None] = []
    for (start, stop), (first, end_of_rank) in zip(bounds_of(output), bounds_of(sizes), strict=True):
        begin, end = start * stride - padding + half, (stop - 1) * stride - padding + half + 1
        # The padding is wider than half a window, or the output is divided evenly (_output_sizes).
        if begin < first or end > end_of_rank:
            return None
        middle.append((begin - first, end - begin))
        top.append((begin - half, edge_extent))
        bottom.append((end + half - edge_extent, edge_extent))
        # At the edge of the image the operator pads as on one device, so the rank needs no halo there. The
        # first step pads ``half`` rows, and so does the operator: with less padding no window has its middle in
        # the first or last row of the image, and with more this function has returned None for the first rank.
        if begin == 0:
            top[-1] = None
        if end == sum(sizes):
            bottom[-1] = None
    return Overlapped(tuple(middle), half, count, tuple(top), tuple(bottom))


def scale_sizes(sizes: Sizes, total: int) -> Sizes:
    """Return the sizes of an image resized to ``total`` rows: each rank keeps its part of it up to rounding.

    >>> scale_sizes((4, 3), 14), scale_sizes((4, 4), 4)
    ((8, 6), (2, 2))
    """
    before = sum(sizes)
    return _output_sizes(sizes, total, lambda start: -(-start * total // before))
