"""Take, fetch and gather rows of tensors with a row tag, by :mod:`para_core.layout`.

The rules of :mod:`para_core.spatial.mode`, those of the same bits and the autoencoders call them with the tag
of a tensor (:func:`~para_core.spatial.row_tag.rows_of`); the results have no tag. Tests:
tests/spatial/test_functions.py, through the functions that the rules run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim
from para_core.layout.fetch import Wanted, plan_fetch, start_exchange
from para_core.layout.gather import gather
from para_core.layout.pieces import Layout
from para_core.layout.sequence import Run
from para_core.layout.windows import Sizes, bounds_of
from para_core.spatial.row_tag import RowTag


def start_fetch(
    x: Tensor, rows: RowTag, wanted: Wanted, ranks: MeshDim, *, fill: float = 0.0
) -> Callable[[], list[Tensor]]:
    """Start fetching runs of rows in one all-to-all, unless every rank holds all of its runs. Return a
    function that waits for the rows, and returns one tensor for each of this rank's runs.

    Collective, unless every rank holds all of its runs. ``x`` must not change before the returned function
    has been called: :func:`~para_core.layout.fetch.start_exchange` may send from its memory until then.
    Results may be views of ``x``, also those of :func:`fetch_rows` and :func:`relayout_rows`.

    Args:
        x: This rank's rows, sharded as ``rows`` says.
        wanted: For each rank, the runs (start, length) that it fetches, in units of ``rows``: positions in
            one of the ``rows.outer`` runs of ``sum(rows.sizes)`` units. They are fetched from each of these.
            If a unit is a row and ``outer`` is 1, positions are rows of the full image.
        fill: Value of rows beyond the edge of the image.

    Raises:
        RuntimeError: A gradient is needed.
    """
    _check_no_gradient(x)
    plan = plan_fetch(Layout.consecutive(rows.sizes), wanted, ranks.index)
    finish = start_exchange(_split_units(x, rows), _unit_dim(rows), plan, ranks, fill=fill)
    if rows.outer == 1:
        return finish
    return lambda: [_join_units(part, rows) for part in finish()]


def fetch_rows(
    x: Tensor, rows: RowTag, wanted: Sequence[Run], ranks: MeshDim, *, fill: float = 0.0
) -> Tensor:
    """Return the rows of this rank's run ``wanted[ranks.index]``. Collective, unless every rank holds its run.

    The arguments are as in :func:`start_fetch`, except that ``wanted`` has one run for each rank instead of several.

    Raises:
        RuntimeError: A gradient is needed.
    """
    (part,) = start_fetch(x, rows, tuple([(run,) for run in wanted]), ranks, fill=fill)()
    return part


def relayout_rows(x: Tensor, rows: RowTag, sizes: Sizes, ranks: MeshDim) -> Tensor:
    """Return this rank's rows of ``x`` after an exchange to ``sizes``; ``x`` itself if it has these.
    Collective.

    Raises:
        RuntimeError: A gradient is needed.
    """
    if sizes == rows.sizes:
        return x
    return fetch_rows(x, rows, [(start, stop - start) for start, stop in bounds_of(sizes)], ranks)


def gather_rows(x: Tensor, rows: RowTag, ranks: MeshDim) -> Tensor:
    """Return the rows of all ranks, contiguous in memory, on every rank. Collective.

    Raises:
        RuntimeError: A gradient is needed.
    """
    _check_no_gradient(x)
    units = gather(_split_units(x, rows), _unit_dim(rows), Layout.consecutive(rows.sizes), ranks)
    return _join_units(units, rows).contiguous()


def part_of(x: Tensor, rows: RowTag, ranks: MeshDim, *, rank: int | None = None) -> Tensor:
    """Return this rank's rows of ``x``, a tensor with all rows; those of another ``rank`` if it is given.
    The result is a view if ``rows.outer`` is 1.
    """
    if rank is None:
        rank = ranks.index
    return _join_units(_units_of(x, rows, rank), rows)


def put_part(x: Tensor, part: Tensor, rows: RowTag, ranks: MeshDim, *, rank: int | None = None) -> None:
    """Copy ``part`` to the place of this rank's rows in ``x``, a tensor with all rows; or to that of ``rank``."""
    if rank is None:
        rank = ranks.index
    _units_of(x, rows, rank).copy_(_split_units(part, rows))


def _units_of(x: Tensor, rows: RowTag, rank: int) -> Tensor:
    """Return a view of the units of ``rank`` in ``x``, a tensor with all rows, as :func:`_split_units` returns them."""
    start, stop = bounds_of(rows.sizes)[rank]
    return _split_units(x, rows).narrow(_unit_dim(rows), start, stop - start)


def stack_ranks(x: Tensor, ranks: MeshDim) -> Tensor:
    """Return the tensors ``x`` of all ranks, such as statistics, stacked as ``[ranks, ...]``. Collective.

    ``x`` holds no rows and needs no tag. It must have the same shape and dtype on all ranks.

    Raises:
        RuntimeError: A gradient is needed.
    """
    _check_no_gradient(x)
    return all_gather(x[None], [1] * ranks.size, 0, ranks)


def _check_no_gradient(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "sharded rows require a gradient, and none is computed through the exchange of rows. Run "
            "the model under torch.no_grad(), or on one rank."
        )


def _unit_dim(rows: RowTag) -> int:
    """Return the dim of the units (rows) in the result of :func:`_split_units`."""
    return rows.dim + (rows.outer > 1)


def _split_units(x: Tensor, rows: RowTag) -> Tensor:
    """Return ``x`` with the runs of its sharded dim, such as frames, as a dim of their own if there are several."""
    if rows.outer == 1:
        return x
    units: Tensor = x.unflatten(rows.dim, (rows.outer, -1))
    return units


def _join_units(x: Tensor, rows: RowTag) -> Tensor:
    """Undo :func:`_split_units`."""
    if rows.outer == 1:
        return x
    joined: Tensor = x.flatten(rows.dim, rows.dim + 1)
    return joined
