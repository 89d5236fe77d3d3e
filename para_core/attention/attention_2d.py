"""Attention2D: a ring's ranks as rows × columns (arXiv:2503.15758). Queries travel along a row, keys and values along a column.

A rank computes what the queries of its row see of the keys of its column; partial results go back along the row to whose queries they
are, and merge by lse. With r × c ring ranks (:func:`~para_core.attention.grid.choose_grid`), S_i queries (with the replicated ones) and T_i
sharded keys on ring rank i, and e bytes per element, rank i sends, in three all-to-alls of the ring's group,

    queries:          B · e · H · D · S_i · (c - 1)                             bytes
    keys and values:  B · e · H_kv · (D + D_v) · T_i · (r - 1)                  bytes
    results:          B · H · (D_v · e + 4) · Σ S_j over the others of its row  bytes (lse: 4, of float64 8)

so that with r = c = √R it is 2 · (√R - 1) blocks of each where a ring sends R - 1 of keys and of values. In memory are the blocks of a
row and of a column. With one column (a prime number of ranks; few key heads) no query leaves, and it is the second collective alone.
The parts of an all-to-all for ranks of neither row nor column are empty: so no other groups are needed, and it runs on every backend.

While queries travel a rank attends with its own to its own keys, and to the replicated ones; while keys travel, with the queries of
the others to its own keys; while results travel, with its own queries to the keys of the others.

Backward, queries travel with out, its gradient and lse, keys as before, and what was found for both goes back in float32 (float64's in
float64), with 4 for its bytes:

    queries:  B · H · (e · (D + 2 · D_v) + 4) · S_i · (c - 1),  back 4 · B · H · D · Σ S_j over the others of its row
    keys:     B · e · H_kv · (D + D_v) · T_i · (r - 1),  back 4 · B · H_kv · (D + D_v) · Σ T_j over the others of its column

Launches, whatever the number of ranks: with one column 7, else 17, and a merge for each column after the second. (Float32 needs no casts:
6, and 14.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.attention.blocks import BlockAttention, BlockGradients, LocalAttention, add_autograd_dependency
from para_core.attention.grid import GridPlan
from para_core.attention.local import lse_dtype
from para_core.attention.merge import Merged
from para_core.attention.tiles import put, take
from para_core.distributed.collectives import Travelling, start_all_to_all, wait
from para_core.distributed.layout import Run
from para_core.distributed.mesh import MeshDim

# -- what travels: tokens first, so that what comes from several ranks is one block as it lies


def _by_token(*tensors: Tensor) -> Tensor:
    """``[B, H, S, D]`` each as ``[S, B, H, all D]``."""
    rows = [x.permute(2, 0, 1, 3) for x in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


def _by_head(rows: Tensor, *widths: int) -> list[Tensor]:
    """The inverse of :func:`_by_token`: views, where rows then begin at multiples of their width, as kernels want them."""
    parts = [rows] if len(widths) == 1 else rows.split_with_sizes(list(widths), dim=-1)
    if any(width != widths[0] for width in widths):
        parts = [part.contiguous() for part in parts]
    return [part.permute(1, 2, 0, 3) for part in parts]


class _Arriving(NamedTuple):
    """An all-to-all under way, and the ``[S, B, H, D]`` that it brings, rank by rank."""

    started: Travelling
    shape: tuple[int, ...]

    def wait(self) -> Tensor:
        return wait(self.started).view(self.shape)


def _give(
    rows: Tensor, peers: Sequence[int], sizes: Sequence[int], dim: MeshDim, earlier: Sequence[_Arriving] = ()
) -> _Arriving:
    """Begin to send all of ``rows`` ``[S, B, H, D]`` to each of ``peers``, and to get ``sizes`` such rows from each."""
    copies = rows if len(peers) == 1 else rows.expand(len(peers), *rows.shape)
    return _start(copies, peers, [rows.shape[0]] * len(peers), sizes, dim, earlier)


def _give_back(
    rows: Tensor,
    peers: Sequence[int],
    sizes: Sequence[int],
    num_own: int,
    dim: MeshDim,
    earlier: Sequence[_Arriving] = (),
) -> _Arriving:
    """Begin to send each of ``peers`` its ``sizes`` of ``rows`` ``[S, B, H, D]``, and to get ``num_own`` such rows from each."""
    return _start(rows, peers, sizes, [num_own] * len(peers), dim, earlier)


def _start(
    rows: Tensor,
    peers: Sequence[int],
    send: Sequence[int],
    receive: Sequence[int],
    dim: MeshDim,
    earlier: Sequence[_Arriving],
) -> _Arriving:
    shape = rows.shape[-3:]
    send_sizes, receive_sizes = [0] * dim.size, [0] * dim.size
    for peer, sent, received in zip(peers, send, receive, strict=True):
        send_sizes[peer], receive_sizes[peer] = sent * shape.numel(), received * shape.numel()
    # Where autograd follows each collective, they go back in the order in which they came, on every rank.
    buffer = add_autograd_dependency(rows.contiguous().view(-1), [arrival.started.buffer for arrival in earlier])
    return _Arriving(start_all_to_all(buffer, send_sizes, receive_sizes, dim), (sum(receive), *shape))


def _rows_of(mask: Tensor | None, first: int, length: int) -> Tensor | None:
    """The rows of ``mask`` for ``length`` of the row's queries."""
    return mask if mask is None or mask.shape[2] == 1 else mask.narrow(2, first, length)


# -- forward


def attention_2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grid: GridPlan,
    *,
    heads: Tensor | None = None,
    attn_func: LocalAttention | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this ring block's queries over the keys of all ring blocks.

    Args:
        mask: ``[B or 1, H or 1, S_row or 1, total or 1]``: rows of this rank's own queries, then of the row's others.

    Others, and what is returned, are as in :func:`~para_core.attention.ring.ring_attention`.
    """
    dim, S, sizes, spec = grid.ring.dim, query.shape[2], grid.row_sizes, grid.spec
    attention = partial(
        BlockAttention, scale=spec.scale, backend=spec.options.backend, heads=heads, attn_func=attn_func
    )
    travels = take(key, 2, grid.ring.travels), take(value, 2, grid.ring.travels)
    arriving: list[_Arriving] = []
    if grid.row:
        arriving.append(_give(_by_token(query), grid.row, sizes, dim))
    arriving.append(_give(_by_token(*travels), grid.column, grid.column_sizes, dim, arriving))
    own = attention(query, _rows_of(mask, 0, S), grid.own_tiling)
    own.add((key, value), 0)
    others = None
    if grid.row:
        (queries,) = _by_head(arriving[0].wait(), query.shape[3])
        others = attention(queries, _rows_of(mask, S, sum(sizes)), grid.row_tiling)
        others.add(travels, 0)
    keys, values = _by_head(arriving[-1].wait(), key.shape[3], value.shape[3])
    if others is not None:
        others.add((keys, values), 1, is_last=True)
        inputs = [query, key, value, *([] if mask is None else [mask])]
        packed = add_autograd_dependency(_pack(*others.result(key, value), inputs), inputs)
        arriving.append(_give_back(packed, grid.row, sizes, S, dim, arriving))
    own.add((keys, values), 1, is_last=others is None)
    merged = Merged()
    merged.add(*own.result(key, value))
    if others is not None:
        for out, lse in _unpack(arriving[-1].wait(), len(grid.row), value.shape[3], lse_dtype(query)):
            merged.add(out, lse)
    out = merged.out if merged.out.dtype == query.dtype else merged.out.to(query.dtype)
    return add_autograd_dependency(
        out, [query, key, value, *[arrival.started.buffer for arrival in arriving]]
    ), merged.lse


def _pack(out: Tensor, lse: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """``[S, B, H, D_v]`` and the bytes of lse behind each row, in the dtype of the query, ``inputs``' first; in that of lse where autograd follows."""
    lse = lse.to(lse_dtype(inputs[0]))  # a user's own may be anything
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _by_token(out.to(lse.dtype), lse[..., None])
    dtype = inputs[0].dtype
    return _by_token(out.to(dtype), _as_dtype(lse, dtype))


def _unpack(rows: Tensor, num_ranks: int, width: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """What each of ``num_ranks`` packed of this rank's queries: ``[B, H, S, D_v]``, and lse ``[B, H, S]`` in ``dtype``."""
    rows = rows.view(num_ranks, rows.shape[0] // num_ranks, *rows.shape[1:])
    lses = _as_lse(rows[..., width:], dtype)
    for out, lse in zip(rows[..., :width].unbind(0), lses.unbind(0), strict=True):
        yield out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)


# -- backward


def attention_2d_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grid: GridPlan,
    *,
    heads: Tensor | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if asked for, mask (all its rows); args as in :func:`attention_2d`."""
    dim, S, sizes, D, D_v = grid.ring.dim, query.shape[2], grid.row_sizes, query.shape[3], value.shape[3]
    spec = grid.spec
    gradients = partial(
        BlockGradients, scale=spec.scale, backend=spec.options.backend, heads=heads, mask_gradient=mask_gradient
    )
    travels = take(key, 2, grid.ring.travels), take(value, 2, grid.ring.travels)
    if grid.row:
        arriving_queries = _give(_by_token(query, grad_out, out, _as_dtype(lse, query.dtype)), grid.row, sizes, dim)
    arriving_keys = _give(_by_token(*travels), grid.column, grid.column_sizes, dim)
    own = gradients(grad_out, query, out, lse, _rows_of(mask, 0, S), grid.own_tiling)
    of_own_keys = own.add((key, value), 0)
    others = None
    if grid.row:
        rows = arriving_queries.wait()
        q, do, o, bits = _by_head(rows, D, D_v, D_v, rows.shape[3] - D - 2 * D_v)
        of_others = _rows_of(mask, S, sum(sizes))
        others = gradients(do, q, o, _as_lse(bits, lse.dtype), of_others, grid.row_tiling)
        _put(of_own_keys, grid.ring.travels, others.add(travels, 0))
    keys, values = _by_head(arriving_keys.wait(), D, D_v)
    of_column = None if others is None else others.add((keys, values), 1)
    of_row, mask_of_row = (None, None) if others is None else others.result()
    if of_row is not None:
        arriving_queries = _give_back(_by_token(of_row), grid.row, sizes, S, dim)
    grads = own.add((keys, values), 1)
    of_column = grads if of_column is None else [grad.add_(other) for grad, other in zip(grads, of_column, strict=True)]
    arriving_keys = _give_back(_by_token(*of_column), grid.column, grid.column_sizes, travels[0].shape[2], dim)
    grad_query, grad_mask = own.result()
    if of_row is not None:
        grad_query = grad_query + _by_head(_summed(arriving_queries.wait(), len(grid.row)), D)[0]
    _put(of_own_keys, grid.ring.travels, _by_head(_summed(arriving_keys.wait(), len(grid.column)), D, D_v))
    if mask is not None and grad_mask is not None and mask_of_row is not None:
        one_row = mask.shape[2] == 1
        grad_mask = grad_mask + mask_of_row if one_row else torch.cat([grad_mask, mask_of_row], dim=2)
    grad_key, grad_value = of_own_keys
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_mask


def _as_dtype(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of lse as numbers of ``dtype``, ``[B, H, S, 1 or 2]``."""
    return lse[..., None] if lse.dtype == dtype else lse[..., None].view(dtype)


def _as_lse(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`_as_dtype`."""
    # A copy also of a single row, which would pass for contiguous at any offset.
    return (
        bits[..., 0] if bits.dtype == dtype else bits.clone(memory_format=torch.contiguous_format).view(dtype)[..., 0]
    )


def _put(totals: Sequence[Tensor], runs: Sequence[Run], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        put(total, 2, runs, part)


def _summed(rows: Tensor, num_ranks: int) -> Tensor:
    """The sum of what each of ``num_ranks`` sent for the same ``[S, B, H, D]``."""
    return rows.view(num_ranks, rows.shape[0] // num_ranks, *rows.shape[1:]).sum(0)
