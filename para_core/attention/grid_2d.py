"""Attention2D: attention over a ring whose ranks form a grid of rows and columns (arXiv:2503.15758).

Queries are sent along rows of the grid, keys and values along columns. Each rank computes attention of the
queries of its row to the keys of its column. Partial results return along the row to the ranks that own the
queries, which merge them by lse. Let the grid of the R ring ranks be r × c
(:func:`~para_core.attention.grid_shape.choose_grid`), let ring rank i hold S_i queries (including
replicated ones) and T_i sharded keys, let e be the bytes per element, and let Σ_row and Σ_column sum over the
other ranks j of rank i's row or column. Rank i then sends, in three all-to-alls over the ring's group,

    queries:          B · e · H · D · S_i · (c - 1)             bytes
    keys and values:  B · e · H_kv · (D + D_v) · T_i · (r - 1)  bytes
    results:          B · H · (D_v · e + 4) · Σ_row S_j         bytes (4 for lse; 8 if it is float64)

With a user's attn_func and gradients enabled, out is sent in the dtype of lse. With r = c = √R a rank sends
2 · (√R - 1) blocks of queries or results, and as many of keys or values; in a ring it sends R - 1 blocks of
keys and R - 1 of values. A rank holds the blocks of its row and of its column in memory. With one column (R is
prime, or there are few key heads) queries are not sent, and only the all-to-all of keys and values runs. In
each all-to-all the parts for ranks outside the row or column are empty, so no further process groups are needed.

Communication overlaps with computation: the rank's own queries attend to its own keys while queries are sent;
the other queries of the row attend to its own keys while keys are sent; its own queries attend to the other
keys of the column while results are sent.

A forward call launches 7 operators with one column; otherwise 17, and one merge for each column after the
second. float32 needs no casts, so there the numbers are 6 and 14. They do not depend on the number of ranks.

:class:`Grid2D` is the style of ``rotate_method="2d"``. The shape of the grid is chosen in :mod:`.grid_shape`,
and the gradient is in :mod:`para_core.attention.gradients.grid_2d`. Tests: tests/attention/test_exactness.py
and tests/attention/test_gradients.py for the numbers, tests/attention/test_grid_2d.py for the bytes, and
tests/attention/test_launches.py for the launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend
from para_core.attention.grid_shape import choose_grid
from para_core.attention.local import add_autograd_dependency, lse_dtype
from para_core.attention.ring import Ring
from para_core.attention.ring_plan import RingPlan, RingStyle
from para_core.attention.tiles import Tiling
from para_core.distributed.cached_property import cached_property
from para_core.distributed.collectives import Travelling, all_to_all, start_all_to_all, wait
from para_core.distributed.mesh import MeshDim
from para_core.layout.runs import take
from para_core.layout.sequence import Run


class Grid2D(RingStyle):
    """The plan of Attention2D for this rank, in a grid of ``shape`` ``(rows, columns)`` of ring ranks.

    Ring rank i is in row i // columns and column i % columns. This rank computes attention of the queries of
    its row to the sharded keys of its column, and of its own queries to replicated keys. Lists of the ranks
    of a row or column are ascending.
    """

    gradient = "gradients.grid_2d:grid_2d_backward"

    def __init__(self, plan: RingPlan) -> None:
        super().__init__(plan)
        spec = plan.spec
        self.shape = choose_grid(spec.mesh.ring.size, spec.num_heads, spec.num_kv_heads)

    @classmethod
    def of(cls, plan: RingPlan) -> RingStyle:
        """Return the grid for ``plan``; an ordinary ring if no keys have to be sent, or an option selects
        keys by position, which the grid's three exchanges do not follow.
        """
        if plan.spec.options.by_position or not plan.rotates:
            return Ring(plan)
        return cls(plan)

    @cached_property
    def row(self) -> list[int]:
        """The ring indices of the other ranks in this rank's row."""
        index, columns = self.plan.dim.index, self.shape[1]
        first = index - index % columns
        return [rank for rank in range(first, first + columns) if rank != index]

    @cached_property
    def column(self) -> list[int]:
        """The ring indices of the other ranks in this rank's column."""
        index, columns = self.plan.dim.index, self.shape[1]
        return [rank for rank in range(index % columns, self.plan.dim.size, columns) if rank != index]

    @cached_property
    def other_queries(self) -> Sequence[Run]:
        """The positions of the queries of the row's other ranks, rank by rank, as runs ``(start, length)``."""
        return self.plan.spec.queries.only(*self.row).runs()

    @cached_property
    def column_runs(self) -> list[Run]:
        """The positions of the sharded keys of the column's other ranks, rank by rank, as runs ``(start, length)``."""
        return self.plan.spec.keys.only(*self.column, replicated=False).runs()

    @cached_property
    def row_sizes(self) -> list[int]:
        return [self.plan.spec.queries.size(rank) for rank in self.row]

    @cached_property
    def column_sizes(self) -> list[int]:
        return [self.plan.spec.keys.size(rank, replicated=False) for rank in self.column]

    @cached_property
    def tiling(self) -> Tiling:
        """The keys that this rank's queries see: at step 0 its own, at step 1 those of its column's other ranks."""
        return self._tiling(self.plan.query_runs, self.plan.key_runs(0))

    @cached_property
    def row_tiling(self) -> Tiling:
        """The keys that the queries of the row's other ranks see: this rank's, then those of the rest of its column."""
        return self._tiling(
            self.other_queries, self.plan.spec.keys.runs(self.plan.dim.index, replicated=False)
        )

    def _tiling(self, queries: Sequence[Run], own_keys: Sequence[Run]) -> Tiling:
        return Tiling(queries, [own_keys, self.column_runs], self.plan.spec.positional_masks)

    def add_other_rows(self, mask: Tensor) -> Tensor:
        """Return ``mask``, followed along dim 2 by the masks of the others in this rank's row. Collective."""
        if not self.row:
            return mask
        rows = mask.movedim(2, 0)
        send, receive = [0] * self.plan.dim.size, [0] * self.plan.dim.size
        for peer, size in zip(self.row, self.row_sizes, strict=True):
            send[peer], receive[peer] = rows.shape[0], size
        arrived = all_to_all(torch.cat([rows] * len(self.row)), send, receive, self.plan.dim)
        return torch.cat([rows, arrived]).movedim(0, 2)

    def over_ring(self, attend: Attend) -> Attend:
        """Return attention to the keys of all ring ranks, in the grid. Collective.

        The rows of a mask belong to this rank's queries, followed by those of the other ranks in the same row
        (:meth:`add_other_rows`).
        """
        return partial(_attend_in_grid, attend, self)


# All tensors are sent with the token dim first, so that the parts of several ranks form one contiguous
# tensor.


def join_by_token(*tensors: Tensor) -> Tensor:
    """Concatenate tensors ``[B, H, S, D_i]`` to ``[S, B, H, sum of D_i]``."""
    rows = [x.permute(2, 0, 1, 3) for x in tensors]
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows, dim=-1)


def split_by_head(rows: Tensor, *widths: int) -> list[Tensor]:
    """Undo :func:`join_by_token`: split ``rows`` into tensors ``[B, H, S, D_i]``, where ``widths`` are the
    D_i. Tensors of different widths are copied, because kernels require that each row begins at a multiple of
    its width.
    """
    parts: Sequence[Tensor] = [rows]
    if len(widths) != 1:
        parts = rows.split_with_sizes(list(widths), dim=-1)
    if any(width != widths[0] for width in widths):
        parts = [part.contiguous() for part in parts]
    return [part.permute(1, 2, 0, 3) for part in parts]


class Arriving(NamedTuple):
    """A started all-to-all. Its result, ``[S, B, H, D]``, holds the tokens of all peers in order."""

    started: Travelling
    shape: tuple[int, ...]

    def wait(self) -> Tensor:
        """Wait for the all-to-all, and return its result."""
        return wait(self.started).view(self.shape)


def start_copies(
    rows: Tensor, peers: Sequence[int], sizes: Sequence[int], dim: MeshDim, earlier: Sequence[Arriving] = ()
) -> Arriving:
    """Start an all-to-all that sends ``rows`` to each of ``peers`` and receives ``sizes[i]`` rows from
    ``peers[i]``. Collective; the other arguments are those of :func:`start_parts`.
    """
    copies = rows
    if len(peers) != 1:
        copies = rows.expand(len(peers), *rows.shape)
    return start_parts(copies, peers, [rows.shape[0]] * len(peers), sizes, dim, earlier)


def start_parts(
    rows: Tensor,
    peers: Sequence[int],
    send: Sequence[int],
    receive: Sequence[int],
    dim: MeshDim,
    earlier: Sequence[Arriving] = (),
) -> Arriving:
    """Start an all-to-all that sends the next ``send[i]`` rows of ``rows``, ``[S, B, H, D]``, to
    ``peers[i]``. Collective over the whole ring ``dim``; ranks that are no peers get nothing.

    ``receive[i]`` rows are received from ``peers[i]``. ``peers`` are ascending, as an all-to-all reads and
    writes its buffers in the order of ranks. In autograd this all-to-all depends on the ``earlier`` ones.
    """
    shape = rows.shape[-3:]
    send_sizes, receive_sizes = [0] * dim.size, [0] * dim.size
    for peer, sent, received in zip(peers, send, receive, strict=True):
        send_sizes[peer], receive_sizes[peer] = sent * shape.numel(), received * shape.numel()
    # The dependency makes autograd run the collectives of the backward in reverse order, the same on every
    # rank.
    buffer = add_autograd_dependency(
        rows.contiguous().view(-1), [arrival.started.buffer for arrival in earlier]
    )
    return Arriving(start_all_to_all(buffer, send_sizes, receive_sizes, dim), (sum(receive), *shape))


def _attend_in_grid(
    attend: Attend, grid: Grid2D, into: Accumulator, key: Tensor, value: Tensor, _: int, is_last: bool
) -> None:
    """Add attention to the keys of all ring ranks to ``into``. Collective.

    ``others`` in the body is the accumulator of the queries of the row's other ranks, whose results are sent
    back to these ranks. It is None in a grid of one column.
    """
    query, dim, sizes = into.query, grid.plan.dim, grid.row_sizes
    S = query.shape[2]
    sent_keys = take(key, 2, grid.plan.sent_runs), take(value, 2, grid.plan.sent_runs)
    # All exchanges in the order in which they were started: queries (if the row has other ranks), keys,
    # results.
    arriving: list[Arriving] = []
    if grid.row:
        arriving.append(start_copies(join_by_token(query), grid.row, sizes, dim))
    arriving_keys = start_copies(join_by_token(*sent_keys), grid.column, grid.column_sizes, dim, arriving)
    arriving.append(arriving_keys)
    attend(into, key, value, 0, False)
    others = None
    if grid.row:
        (queries,) = split_by_head(arriving[0].wait(), query.shape[3])
        mask = None
        if into.mask is not None:
            mask = into.mask.take_rows(S, sum(sizes))
        others = Accumulator(queries, mask, grid.row_tiling, into.key_heads)
        attend(others, *sent_keys, 0, False)
    keys, values = split_by_head(arriving_keys.wait(), key.shape[3], value.shape[3])
    if others is not None:
        attend(others, keys, values, 1, True)
        inputs = [query, key, value]
        if into.mask is not None:
            inputs.append(into.mask.tensor)
        packed = add_autograd_dependency(_pack(*others.finish(key, value), query), inputs)
        arriving.append(start_parts(packed, grid.row, sizes, [S] * len(grid.row), dim, arriving))
    attend(into, keys, values, 1, is_last and others is None)
    if others is not None:
        into.results_of_others.extend(
            _unpack(arriving[-1].wait(), len(grid.row), value.shape[3], lse_dtype(query))
        )
    into.received.extend([arrival.started.buffer for arrival in arriving])


def _pack(out: Tensor, lse: Tensor, query: Tensor) -> Tensor:
    """Pack ``out`` and ``lse`` into one ``[S, B, H, D_v + n]`` in the dtype of ``query``. The bytes of an lse fill
    n = 1 or 2 elements. While gradients are enabled, as they are here only for a user's attn_func, the dtype is that
    of lse, and n is 1. Whether the inputs require a gradient does not tell it: the function may have a parameter.
    All ranks must agree on this: ``call_signature`` compares it, or the caller promises it by ``assume_equal``.
    """
    lse = lse.to(lse_dtype(query))  # A user's attn_func may return lse in any dtype.
    if torch.is_grad_enabled():
        return join_by_token(out.to(lse.dtype), lse[..., None])
    return join_by_token(out.to(query.dtype), view_lse_as(lse, query.dtype))


def _unpack(rows: Tensor, num_ranks: int, width: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Undo :func:`_pack` for the concatenated ``rows`` of ``num_ranks`` ranks. Yield ``(out, lse)`` of each
    rank: out is ``[B, H, S, width]``, and lse is ``[B, H, S]`` in ``dtype``.
    """
    rows = rows.view(num_ranks, rows.shape[0] // num_ranks, *rows.shape[1:])
    lses = view_as_lse(rows[..., width:], dtype)
    for out, lse in zip(rows[..., :width].unbind(0), lses.unbind(0), strict=True):
        yield out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)


def view_lse_as(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes of ``lse``, ``[B, H, S]``, as numbers of ``dtype``: ``[B, H, S, 1 or 2]``."""
    if lse.dtype == dtype:
        return lse[..., None]
    return lse[..., None].view(dtype)


def view_as_lse(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo :func:`view_lse_as`: reinterpret ``bits``, ``[B, H, S, 1 or 2]``, as an lse ``[B, H, S]`` of ``dtype``."""
    # Use clone(): view(dtype) demands an aligned storage offset, but contiguous() returns a tensor of one row
    # as it is, at any offset.
    if bits.dtype == dtype:
        return bits[..., 0]
    return bits.clone(memory_format=torch.contiguous_format).view(dtype)[..., 0]
