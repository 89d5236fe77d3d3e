"""Sparse attention: each head attends only to the keys that a few observed queries attend to most. Not exact.

The criterion is SnapKV's (Li et al. 2024, arXiv:2404.14469, §4): the *vote* of a key is the sum of the
attention weights that the observed queries give it, and each head keeps the keys with the largest votes.
SnapKV observes the end of a prompt. The tokens of a diffusion model have no such end, so the observed queries
are spread evenly over the sequence. Votes are not pooled over neighbouring keys.

Per call each ring rank sends, for H heads and w observed queries, B · H · w · (D + 1) elements (the observed
queries, with zeros in place of those that other ranks hold, and their lse), their rows of the mask if it has
rows of queries (:func:`_has_rows_of_queries`), and B · H votes for each key that it holds. After that only
kept keys and values are sent and computed.

The host waits for the device once per call, to read how many keys of each ring block are kept. It does not
wait if all keys are sent and a mask hides those that are not kept (see :func:`attend_to_kept_keys`).

:class:`~para_core.attention.kept_keys.KeptKeys`, the option, imports this file and calls :func:`select_keys`,
:func:`hide` and :func:`attend_to_kept_keys`. Tests: tests/attention/approximate/test_kept_keys.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from para_core.attention.attend import take_columns
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.blocks import LocalAttention, expand_heads
from para_core.attention.finite_masks import level_rows
from para_core.attention.kept_keys import KeptKeys
from para_core.attention.local import add_autograd_dependency, local_attention_with_lse, lse_dtype
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.merge import Merged
from para_core.attention.ring import Packing, pass_on_blocks
from para_core.attention.ring_plan import RingPlan
from para_core.attention.usp import attend_all
from para_core.distributed.collectives import all_gather
from para_core.layout.runs import starts_of
from para_core.layout.sequence import Run


@torch.no_grad()
def select_keys(
    kept: KeptKeys, query: Tensor, key: Tensor, mask: Tensor | None, plan: RingPlan, *, heads: Tensor | None
) -> Tensor:
    """Return which keys each head keeps: a bool tensor ``[B, H, S_k]`` by position in the whole sequence.

    Collective; the result is equal on all ring ranks. A key that the mask or ``is_causal`` hides from an
    observed query gets no vote from this query. ``heads`` is the key head of each query head; None if heads
    are grouped evenly. The tensors are those of :func:`~para_core.attention.usp.attend_block`: they have the
    heads of this rank after the Ulysses exchange, and the columns of ``mask`` are positions in the whole
    sequence.
    """
    observed = kept.choose_observed(plan.spec.query_layout.total)
    queries = _of_all_ranks(query, observed, plan)
    rows = mask
    if mask is not None and _has_rows_of_queries(mask, plan):
        rows = _of_all_ranks(mask.expand(-1, -1, query.shape[2], -1), observed, plan)
    runs = _counted_runs(plan, plan.dim.index)
    counted = _indices_of(_positions_of(runs, key.device), _positions_of(plan.key_runs(0), key.device))
    keys = expand_heads(key.index_select(2, counted), heads)
    if keys.shape[1] != query.shape[1]:  # Equally many consecutive query heads share each key head.
        keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    dtype, scale = lse_dtype(queries), plan.spec.scale
    if scale is None:
        scale = query.shape[-1] ** -0.5
    logits = (queries.to(dtype) * scale) @ keys.to(dtype).mT
    if rows is not None:
        rows = take_columns(rows, runs)
        if rows.dtype == torch.bool:
            logits = logits.masked_fill(~rows, float("-inf"))
        else:
            logits = logits + rows
    if plan.spec.is_causal:
        hidden = _positions_of(runs, query.device) > _to_device([observed], query.device).mT
        logits = logits.masked_fill(hidden, float("-inf"))
    dim = plan.dim
    # Each ring rank has the lse over the keys that it counts. The outer logsumexp is over all keys.
    lse = all_gather(logits.logsumexp(-1)[None], [1] * dim.size, 0, dim).logsumexp(0)
    votes = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).sum(2)
    runs_of_ranks = [_counted_runs(plan, index) for index in range(dim.size)]
    votes = all_gather(votes, [sum([length for _, length in of_rank]) for of_rank in runs_of_ranks], 2, dim)
    order = _positions_of([run for of_rank in runs_of_ranks for run in of_rank], query.device)
    votes = torch.empty_like(votes).index_copy_(2, order, votes)
    # The sort is stable, so of equal votes the first wins.
    ranked = votes.sort(dim=-1, descending=True, stable=True).indices
    largest = ranked[..., : kept.count_kept(votes.shape[2])]
    return torch.zeros_like(votes, dtype=torch.bool).scatter_(-1, largest, True)


def _has_rows_of_queries(mask: Tensor, plan: RingPlan) -> bool:
    """Whether the rows of ``mask`` are treated as those of queries, and not as one row for all. All ring ranks
    get the same answer, because collectives depend on it.

    One row on a rank with one query may be either. If any of several ranks has fewer than two queries, it
    therefore counts as the row of each query, on all ranks.
    """
    return mask.shape[2] > 1 or (plan.dim.size > 1 and min(plan.spec.queries.sizes()) < 2)


def _positions_of(runs: Sequence[Run], device: torch.device) -> Tensor:
    """Return the positions of ``runs`` in their order, int64 ``[n]``; an empty tensor if there are no runs."""
    parts = [torch.arange(start, start + length, device=device) for start, length in runs]
    return torch.cat([torch.arange(0, device=device), *parts])


def _to_device(rows: Sequence[Sequence[int | None]], device: torch.device) -> Tensor:
    """Return ``rows``, equally long lists of integers, as int64 on ``device``. The host does not wait for it."""
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True)


def _offsets(positions: Sequence[int], runs: Sequence[Run]) -> list[int | None]:
    """Return the offset of each position in the concatenation of ``runs``; None if no run ``(start, length)``
    has it.

    >>> _offsets([4, 0, 7], [(6, 2), (4, 1)])
    [2, None, 1]
    """
    begins = starts_of([length for _, length in runs])
    ascending = sorted(
        (start, length, begin) for (start, length), begin in zip(runs, begins, strict=True) if length
    )
    starts = [start for start, _, _ in ascending]
    offsets: list[int | None] = []
    for position in positions:
        offset = None
        index = bisect_right(starts, position) - 1
        if index >= 0:
            start, length, begin = ascending[index]
            if position < start + length:
                offset = begin + position - start
        offsets.append(offset)
    return offsets


def _indices_of(wanted: Tensor, positions: Tensor) -> Tensor:
    """Return the index in ``positions`` of each position in ``wanted``, all of which must be there."""
    ascending, order = positions.sort()
    return order[torch.searchsorted(ascending, wanted)]


def _of_all_ranks(x: Tensor, positions: Sequence[int], plan: RingPlan) -> Tensor:
    """Return the rows of ``x``, ``[B, H, S_block, D]``, at n positions of the whole sequence, gathered from
    all ring ranks: ``[B, H, n, D]``. Collective.
    """
    dim, queries = plan.dim, plan.spec.queries
    runs = queries.runs(dim.index, replicated=False)
    # All ranks hold the replicated tokens, so only the first rank contributes them to the sum below.
    if dim.index == 0:
        runs = [*runs, *queries.runs(0, replicated=True)]
    numbers = x
    if x.dtype == torch.bool:
        numbers = x.to(torch.uint8)
    rows = numbers.new_zeros(*x.shape[:2], len(positions), x.shape[3])
    own_indices = [index for index, offset in enumerate(_offsets(positions, runs)) if offset is not None]
    offsets = _offsets([positions[index] for index in own_indices], plan.query_runs)
    to, source = _to_device([own_indices, offsets], x.device)
    rows.index_copy_(2, to, numbers.index_select(2, source))
    # Summing selects the rank that holds a row, because the others contribute zeros.
    all_rows = all_gather(rows[None], [1] * dim.size, 0, dim).sum(0, dtype=numbers.dtype)
    if x.dtype == torch.bool:
        return all_rows.bool()
    return all_rows


def _counted_runs(plan: RingPlan, index: int) -> list[Run]:
    """Return the positions of the keys whose votes ring rank ``index`` counts: its sharded keys; on the first
    rank also the replicated ones, which all ranks hold.
    """
    keys = plan.spec.keys
    runs = keys.runs(index, replicated=False)
    if index == 0:
        return [*runs, *keys.runs(0, replicated=True)]
    return runs


def attend_to_kept_keys(
    kept: KeptKeys,
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: Tensor | None,
    attn_func: LocalAttention | None,
    *,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` as :func:`~para_core.attention.usp.attend_all` does, but attend to the kept keys
    only. Collective.

    Usually only the kept keys and values are sent and computed. In five cases all keys are sent instead, and
    a mask hides those that are not kept: ``save`` is True (a gradient is needed), several query heads share a
    key head but keep different keys, the call is causal, the mask has rows of queries, or it is a float mask
    for a user's function, whose partial results only ``attend_all`` corrects.
    """
    is_kept = select_keys(kept, query, key, mask, plan.ring, heads=heads)
    hidden = hide(mask, is_kept)
    is_float = hidden.dtype != torch.bool
    sends_all = save or bool(plan.spec.positional_masks) or query.shape[1] != key.shape[1]
    if mask is not None and (_has_rows_of_queries(mask, plan.ring) or (is_float and attn_func is not None)):
        sends_all = True
    if sends_all:
        return attend_all(plan, query, key, value, hidden, heads, attn_func)
    received: list[Tensor] = []
    if attn_func is None:
        attn_func = partial(local_attention_with_lse, backend=plan.spec.options.backend)
    if is_float:
        query, hidden = level_rows(query, hidden, hidden.dtype)
    merged = Merged()
    for block_key, block_value, block_mask in _kept_blocks(key, value, is_kept, hidden, plan.ring, received):
        merged.add(
            *attn_func(LocalAttentionCall(query, block_key, block_value, block_mask, scale=plan.spec.scale))
        )
    return add_autograd_dependency(merged.out.to(query.dtype), [query, key, value, *received]), merged.lse


def hide(mask: Tensor | None, is_kept: Tensor) -> Tensor:
    """Return a mask that hides what ``mask`` hides, and the keys for which ``is_kept``, ``[B, H, S_k]``, is False."""
    is_kept = is_kept[:, :, None]
    if mask is None:
        return is_kept
    if mask.dtype == torch.bool:
        return mask & is_kept
    return mask.masked_fill(~is_kept, float("-inf"))


def _kept_blocks(
    key: Tensor, value: Tensor, is_kept: Tensor, mask: Tensor, plan: RingPlan, received: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ``(keys, values, mask)`` of each ring block, this rank's first, with the kept keys and values
    only. Collective: the caller must take all blocks.

    For heads that keep fewer keys of a block than others, other keys fill up the tensors, and the mask hides
    these. The next block is in flight while the caller computes. Buffers with gradients are appended to
    ``received``.
    """
    local_positions, dim = _positions_of(plan.key_runs(0), key.device), plan.dim
    travels: list[Tensor] = []
    if plan.hops:
        travels = [
            _positions_of(plan.spec.keys.runs(index, replicated=False), key.device)
            for index in range(dim.size)
        ]
    chosen, *of_blocks = _choose_offsets(is_kept, [local_positions, *travels])
    local_block = _take(key, chosen), _take(value, chosen)
    if not plan.hops:
        yield *local_block, _mask_of(mask, local_positions, chosen)
        return
    lengths = [block.shape[2] for block in of_blocks]
    packing = Packing(key, value, lengths, wire=plan.spec.options.wire)
    rows = _indices_of(travels[dim.index], local_positions)
    kept = [_take(x.index_select(2, rows), of_blocks[dim.index]) for x in (key, value)]
    for hop, block in pass_on_blocks(local_block, packing.pack(*kept), packing, plan, received):
        if hop.step == 0:
            yield *block, _mask_of(mask, local_positions, chosen)
        else:
            yield *block, _mask_of(mask, travels[hop.source], of_blocks[hop.source])


def _choose_offsets(is_kept: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return for each block (positions of its keys) the offsets of the keys that each head keeps, ``[B, H,
    n]``.

    n is the largest number of keys of the block that any head keeps. A head that keeps fewer gets offsets of
    other keys at the end, which the mask must hide. The host waits for the device once, to read n for all
    blocks.
    """
    flags = [is_kept.index_select(2, positions) for positions in blocks]
    most = [0] * len(blocks)
    filled = [index for index, block in enumerate(flags) if block.numel()]
    if filled:
        counts = torch.stack([flags[index].sum(-1).max() for index in filled]).tolist()
        for index, count in zip(filled, counts, strict=True):
            most[index] = count
    return [
        block.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :number]
        for block, number in zip(flags, most, strict=True)
    ]


def _take(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows of ``x``, ``[B, H, S, D]``, at the offsets ``chosen``, ``[B, H, n]``, as ``[B, H, n, D]``."""
    return x.gather(2, chosen[..., None].expand(*chosen.shape, x.shape[3]))


def _mask_of(mask: Tensor, positions: Tensor, chosen: Tensor) -> Tensor:
    """Return the columns of ``mask``, ``[B, H, 1, S_k]``, at offsets ``chosen`` of a block's ``positions``."""
    return mask.index_select(3, positions).gather(3, chosen[:, :, None])
