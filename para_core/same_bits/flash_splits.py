"""In how many parts FlashAttention adds up the keys of a call on a GPU.

A call with few heads and queries does not fill a GPU, so FlashAttention-2 computes parts of its keys side by
side and merges them, which changes the order of the sums. A rank has fewer heads than one process, so it may
split where one process does not.

Only arithmetic: :mod:`.row_check` compares the number of this rank with that of one process. Tests:
tests/same_bits/test_attention.py.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

# Rows of queries that one block of threads computes in a split call.
_QUERIES_PER_BLOCK = 64
# A call that fills this part of a GPU is not split.
_FULL = 0.8
# Of the numbers of parts, the smallest that is as good as this part of the best one is taken.
_GOOD = 0.85
_MOST_SPLITS = 128


class AttentionSizes(NamedTuple):
    """The sizes of one call of attention."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int


def flash_splits(sizes: AttentionSizes, multiprocessors: int) -> int:
    """Return the number of parts into which FlashAttention-2 of PyTorch splits the keys of a call without
    dropout.

    Source: ``set_params_splitkv`` and ``num_splits_heuristic`` of PyTorch's flash_attn/flash_api.cpp, as of
    its commit 03b7c19d.

    Grouped heads, fewer of keys than of queries, are out of scope: ``sizes.heads`` are those of the queries.
    FlashAttention counts the same ones, except for a single query, where it takes the query heads of a group
    as queries of one head (``seqlenq_ngroups_swapped``).

    Args:
        multiprocessors: The number of them on the GPU. Two blocks of threads run on each.
    """
    blocks = sizes.batch * sizes.heads * ceil(sizes.queries / _QUERIES_PER_BLOCK)
    slots = 2 * multiprocessors
    # A rank without tokens has no queries, so no blocks.
    if blocks == 0 or blocks >= _FULL * slots:
        return 1
    key_blocks = ceil(sizes.keys / _keys_per_block(sizes.width))
    used = {}
    for splits in range(1, min(_MOST_SPLITS, slots, key_blocks) + 1):
        # Some numbers give the parts of a smaller number.
        if splits == 1 or ceil(key_blocks / splits) != ceil(key_blocks / (splits - 1)):
            waves = blocks * splits / slots
            used[splits] = waves / ceil(waves)
    best = max(used.values(), default=0.0)
    return next((splits for splits, part in used.items() if part >= _GOOD * best), 1)


def _keys_per_block(width: int) -> int:
    """Return how many keys one block of threads reads at once, for heads of ``width`` channels."""
    if width <= 64:
        return 256
    if width <= 128:
        return 128
    return 64
