"""Attention to the keys that a few observed queries attend to most, and to no others.

The criterion is SnapKV's (Li et al. 2024, arXiv:2404.14469, §4): an observation window of queries votes for keys with its
attention weights, summed over the window, and each head keeps the keys with most votes. SnapKV observes the end of a
prompt; here, where every query sees every key, the window is spread evenly over the sequence. Votes are not pooled over neighbours.

Per plan, the ring ranks exchange the observed queries, one lse for each and one vote per key: B · H · (w · (D + 1) + S_k)
elements for w observed queries. After that only kept keys and values travel and are computed.

The host waits for the device once per plan, to read how many keys each block keeps; where a mask hides keys instead, not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

from para_core.attention.approximate.kept_keys import KeptKeys
from para_core.attention.blocks import LocalAttention, add_autograd_dependency, columns, expand
from para_core.attention.local import local_attention_with_lse, lse_dtype
from para_core.attention.merge import Merged
from para_core.attention.ring import Packing, ring_attention, ring_pass
from para_core.attention.ring_plan import RingPlan
from para_core.attention.tiles import sharded_runs
from para_core.distributed.collectives import all_gather
from para_core.distributed.layout import Run


@torch.no_grad()
def select_keys(
    kept: KeptKeys, query: Tensor, key: Tensor, mask: Tensor | None, plan: RingPlan, *, heads: Tensor | None
) -> Tensor:
    """Which keys each head keeps, ``[B, H, S_k]`` bool by position in the whole sequence; the same on all ring ranks.

    Arguments are those of :func:`~para_core.attention.ring.ring_attention`; what the mask and ``is_causal`` hide from an
    observed query gets no vote of it.
    """
    observed = kept.observed(plan.spec.query_layout.total)
    queries = _of_all_ranks(query, observed, plan)
    rows = mask
    if mask is not None and mask.shape[2] > 1:
        rows = _of_all_ranks(mask, observed, plan)
    runs = _counted_runs(plan, plan.dim.index)
    counted = _rows_of(_positions(runs, key.device), _positions(plan.key_runs(0), key.device))
    logits = _logits(queries, _of_query_heads(key.index_select(2, counted), query, heads), plan.spec.scale)
    if rows is not None:
        rows = columns(rows, runs)
        logits = logits.masked_fill(~rows, float("-inf")) if rows.dtype == torch.bool else logits + rows
    if plan.spec.is_causal:
        hidden = _positions(runs, query.device) > _on_device([observed], query.device).mT
        logits = logits.masked_fill(hidden, float("-inf"))
    dim = plan.dim
    lse = all_gather(logits.logsumexp(-1)[None], [1] * dim.size, 0, dim).logsumexp(0)
    votes = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).sum(2)
    runs_of_ranks = [_counted_runs(plan, index) for index in range(dim.size)]
    votes = all_gather(votes, [sum([length for _, length in of_rank]) for of_rank in runs_of_ranks], 2, dim)
    order = _positions([run for of_rank in runs_of_ranks for run in of_rank], query.device)
    votes = torch.empty_like(votes).index_copy_(2, order, votes)
    return _most(votes, ceil(kept.share * votes.shape[2]))


def _of_query_heads(key: Tensor, query: Tensor, heads: Tensor | None) -> Tensor:
    """``key`` with a head for each query head."""
    if heads is not None or key.shape[1] == query.shape[1]:
        return expand(key, heads)
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _most(votes: Tensor, number: int) -> Tensor:
    """True at the ``number`` largest along the last dim; of equal ones, at the earlier."""
    chosen = votes.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    return torch.zeros_like(votes, dtype=torch.bool).scatter_(-1, chosen, True)


def _logits(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    dtype = lse_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (query.to(dtype) * scale) @ key.to(dtype).mT


def _positions(runs: Sequence[Run], device: torch.device) -> Tensor:
    parts = [torch.arange(start, start + length, device=device) for start, length in runs]
    return torch.cat([torch.arange(0, device=device), *parts])


def _on_device(rows: Sequence[Sequence[int | None]], device: torch.device) -> Tensor:
    """Return equally long rows of integers as a tensor, without waiting for the device: ``torch.tensor(device=)`` would."""
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True)


def _offsets(positions: Sequence[int], runs: Sequence[Run]) -> list[int | None]:
    """Return where each position is in ``runs`` laid one after the other; None where no run has it.

    >>> _offsets([4, 0, 7], [(6, 2), (4, 1)])
    [2, None, 1]
    """
    begins = accumulate([length for _, length in runs], initial=0)
    ascending = sorted((start, length, begin) for (start, length), begin in zip(runs, begins, strict=False) if length)
    starts = [start for start, _, _ in ascending]
    offsets: list[int | None] = []
    for position in positions:
        index = bisect_right(starts, position) - 1
        start, length, begin = ascending[index] if index >= 0 else (0, 0, 0)
        offsets.append(begin + position - start if start <= position < start + length else None)
    return offsets


def _rows_of(wanted: Tensor, held: Tensor) -> Tensor:
    """Where ``held`` has the positions ``wanted``, of which it has all."""
    ascending, order = held.sort()
    return order[torch.searchsorted(ascending, wanted)]


def _of_all_ranks(x: Tensor, positions: Sequence[int], plan: RingPlan) -> Tensor:
    """The rows of ``x`` ``[B, H, S_block, …]`` at these positions, from the ring ranks that hold them."""
    dim, layout = plan.dim, plan.spec.query_layout
    runs = sharded_runs(layout, plan.spec.mesh, dim.index)
    if dim.index == 0:  # all ranks hold the replicated ones; one gives them
        runs = [*runs, *layout.runs(0, replicated=True)]
    numbers = x.to(torch.uint8) if x.dtype == torch.bool else x
    rows = numbers.new_zeros(*x.shape[:2], len(positions), x.shape[3])
    own_indices = [index for index, offset in enumerate(_offsets(positions, runs)) if offset is not None]
    held = _offsets([positions[index] for index in own_indices], plan.query_runs)
    to, source = _on_device([own_indices, held], x.device)
    rows.index_copy_(2, to, numbers.index_select(2, source))
    # Zeros from the ranks that do not hold a row.
    all_rows = all_gather(rows[None], [1] * dim.size, 0, dim).sum(0, dtype=numbers.dtype)
    return all_rows.bool() if x.dtype == torch.bool else all_rows


def _counted_runs(plan: RingPlan, index: int) -> list[Run]:
    """Positions of the keys that a ring rank answers for: what it shares with nobody, and on the first what all have."""
    runs = sharded_runs(plan.spec.key_layout, plan.spec.mesh, index)
    return [*runs, *plan.spec.key_layout.runs(0, replicated=True)] if index == 0 else runs


# -- attention to what is kept


def sparse_attention(
    kept: KeptKeys,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: RingPlan,
    *,
    heads: Tensor | None,
    attn_func: LocalAttention | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`~para_core.attention.ring.ring_attention` over the kept keys.

    Only they travel and are computed; with ``save`` (for a gradient), where one key head serves several query heads, which keep keys of
    their own, and where a query's position or row of the mask matters, the others are hidden by a mask instead.
    """
    is_kept = select_keys(kept, query, key, mask, plan, heads=heads)
    hidden = hide(mask, is_kept)
    if save or plan.spec.is_causal or hidden.shape[2] > 1 or query.shape[1] != key.shape[1]:
        return ring_attention(query, key, value, hidden, plan, heads=heads, attn_func=attn_func)
    received: list[Tensor] = []
    if attn_func is None:
        attn_func = partial(local_attention_with_lse, backend=plan.spec.options.backend)
    merged = Merged()
    for block_key, block_value, block_mask in _kept_blocks(key, value, is_kept, hidden, plan, received):
        merged.add(*attn_func(query, block_key, block_value, mask=block_mask, is_causal=False, scale=plan.spec.scale))
    return add_autograd_dependency(merged.out.to(query.dtype), [query, key, value, *received]), merged.lse


def hide(mask: Tensor | None, is_kept: Tensor) -> Tensor:
    """``mask`` ``[B or 1, H or 1, S_q or 1, S_k or 1]`` with the keys hidden that ``seen`` ``[B, H, S_k]`` leaves out."""
    is_kept = is_kept[:, :, None]
    if mask is None:
        return is_kept
    return mask & is_kept if mask.dtype == torch.bool else mask.masked_fill(~is_kept, float("-inf"))


def _kept_blocks(
    key: Tensor,
    value: Tensor,
    is_kept: Tensor,
    mask: Tensor,
    plan: RingPlan,
    received: list[Tensor],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What is kept of each ring block, this rank's first, and the mask of it: heads keep different numbers of keys.

    The next block is in flight while the caller computes.
    """
    held, dim = _positions(plan.key_runs(0), key.device), plan.dim
    travels: list[Tensor] = []
    if plan.hops:
        travels = [
            _positions(sharded_runs(plan.spec.key_layout, plan.spec.mesh, index), key.device)
            for index in range(dim.size)
        ]
    chosen, *of_blocks = _chosen(is_kept, [held, *travels])
    own = _take(key, chosen), _take(value, chosen)
    if not plan.hops:
        yield *own, _mask_of(mask, held, chosen)
        return
    lengths = [block.shape[2] for block in of_blocks]
    packing = Packing(key, value, lengths, wire=plan.wire)
    rows = _rows_of(travels[dim.index], held)
    kept = [_take(x.index_select(2, rows), of_blocks[dim.index]) for x in (key, value)]
    for hop, block in ring_pass(own, packing.pack(*kept), packing, plan, received):
        at, those = (held, chosen) if hop.step == 0 else (travels[hop.source], of_blocks[hop.source])
        if block is not None:
            yield *block, _mask_of(mask, at, those)


def _chosen(is_kept: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
    """Of blocks of keys at these positions, the offsets of those that each head keeps, ``[B, H, most of any head]`` each.

    Heads that keep fewer get others, too, which the mask hides. Waits for the device, once: how many are kept is in the data.
    """
    flags = [is_kept.index_select(2, positions) for positions in blocks]
    filled = [block for block in flags if block.numel()]
    counts = torch.stack([block.sum(-1).max() for block in filled]).tolist() if filled else []
    remaining = iter(counts)
    most = [next(remaining) if block.numel() else 0 for block in flags]
    return [
        block.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :number]
        for block, number in zip(flags, most, strict=True)
    ]


def _take(x: Tensor, chosen: Tensor) -> Tensor:
    """``x`` ``[B, H, S, D]`` at the offsets ``[B, H, n]``."""
    return x.gather(2, chosen[..., None].expand(*chosen.shape, x.shape[3]))


def _mask_of(mask: Tensor, positions: Tensor, chosen: Tensor) -> Tensor:
    """The columns of ``mask`` ``[B, H, 1, S_k]`` for what was chosen of a block."""
    return mask.index_select(3, positions).gather(3, chosen[:, :, None])
