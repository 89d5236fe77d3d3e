"""Wrappers that keep merging by lse correct if a mask hides keys. :mod:`.finite_masks` describes the kinds of
rows.

They change the mask once per call, and need nothing from the attention that they wrap, on one rank or on
several. ``of_mask`` is the :attr:`~para_core.attention.ring_plan.RingStyle.mask_tiling` of the call.

:func:`~para_core.attention.usp.compose` puts one of them around everything else, so that a mask is changed
once and not once per block. The gradient is :func:`para_core.attention.gradients.blocks.low_rows_backward`.
Tests: tests/attention/test_exactness.py.
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend, Mask
from para_core.attention.backends.added import ADDED
from para_core.attention.finite_masks import (
    FiniteMaskedRows,
    can_be_finite,
    clear_rows_without_key,
    finite_bias,
    level_rows,
)
from para_core.attention.local_call import bias_dtype
from para_core.attention.tiles import Tiling
from para_core.option_values import Backend


def hide_by_position(mask: Tensor, of_mask: Tiling) -> Tensor:
    """Return ``mask`` with -inf at the keys that the positions hide, if it is a float mask.

    One row for all queries becomes a row per query. A mask with one column stays: all keys of a row have the
    same number, whichever of them a query sees.
    """
    if not of_mask.masks or mask.dtype == torch.bool or mask.shape[3] == 1:
        return mask
    num_rows = sum([length for _, length in of_mask.pieces])
    if num_rows == 0:
        return mask
    hidden = mask.new_ones(1, 1, num_rows, mask.shape[3], dtype=torch.bool)
    parts = of_mask.split(hidden)
    for piece, tile in of_mask.tiles(0):
        for run in tile.positions:
            part = parts[piece].narrow(3, *run)
            if tile.is_causal:
                part.triu_(1)
            else:
                part.fill_(False)
    return mask.masked_fill(hidden, -inf)


def level_low_rows(attend: Attend, backend: Backend | None, of_mask: Tiling) -> Attend:
    """Return ``attend`` with a mask whose partial results merge by lse. The result has no gradient of its
    own.

    Low rows are shifted. Unless the backend clears rows that have no key in one block, as those of PyTorch do
    not, -inf becomes a low number, too, and rows without any key are cleared at the end.
    """

    def forward(into: Accumulator, key: Tensor, value: Tensor, block: int, is_last: bool) -> None:
        if into.mask is None:
            attend(into, key, value, block, is_last)
            return
        query, mask = into.query, hide_by_position(into.mask.tensor, of_mask)
        clears_rows = backend is not None and backend in ADDED and ADDED[backend].clears_rows
        dtype, is_finite = bias_dtype(mask, query), not clears_rows and can_be_finite(mask, query)
        if mask.dtype != torch.bool:
            level_dtype = mask.dtype
            if is_finite:
                level_dtype = dtype
            query, mask = level_rows(query, mask, level_dtype)
        if not is_finite:
            attend(into.with_inputs(query, Mask(mask)), key, value, block, is_last)
            return
        # Convert a mask of keys at once. One with a row per query would need too much memory.
        if mask.shape[2] > 1:
            finite = Mask(mask, convert=finite_bias, hides_rows=False)
        else:
            finite = Mask(finite_bias(mask, query), hides_rows=False)
        attend(into.with_inputs(query, finite), key, value, block, is_last)
        into.last_steps.append(partial(clear_rows_without_key, dtype=dtype))

    return forward


def correct_low_rows(attend: Attend, of_mask: Tiling) -> Attend:
    """Return ``attend`` with a float mask that tells in which rows the lse of each tile has to be corrected."""

    def forward(into: Accumulator, key: Tensor, value: Tensor, block: int, is_last: bool) -> None:
        low_rows = None
        if into.mask is not None:
            low_rows = FiniteMaskedRows.of(hide_by_position(into.mask.tensor, of_mask))
        if low_rows is not None:
            into = into.with_inputs(into.query, Mask(low_rows.mask, low_rows=low_rows))
        attend(into, key, value, block, is_last)

    return forward
