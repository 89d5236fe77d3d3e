"""Masks changed so that partial results over some of their columns merge by lse, in few launches.

Two kinds of rows need care. A row that hides every key with a finite number has an lse in which the number of
keys is lost to rounding. A row that hides every key of one block with -inf gets NaN, or an lse of 0, from
most backends.

Without gradients, :func:`level_rows` shifts the first kind of rows to 0, and :func:`finite_bias` replaces
-inf by a number so low that merging gives the block no weight. Rows without any key are then found by their
lse, :func:`clear_rows_without_key`. :class:`FiniteMaskedRows` corrects the lse of each block instead. It
serves a user's attention function, which may be differentiated, and the backward.

:mod:`.low_rows` applies both in the forward, and :mod:`para_core.attention.gradients.blocks` the class in the
backward. Masks that a user passes reach this file as :func:`~para_core.attention.masks.mask_of_block` returns
them, with -inf at the keys that positions hide (:func:`~para_core.attention.low_rows.hide_by_position`): only
keys that a query sees count for the maximum of its row. Tests: tests/attention/test_exactness.py, whose masks
have such rows, and tests/attention/test_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.local_call import LocalAttentionCall, aligned_rows, bias_dtype

# A row whose largest number is lower than _LOW is low. Numbers near _LOW are 6e-5 apart in float32, so an lse
# down to it weighs blocks to four digits.
_LOW = -1e3
# float32 numbers below _ABSORBS are at least 2 apart, and those near -1e9, which models use, 64, so that a
# score that is added to one is lost to rounding, or to all but its multiples of that distance. All keys with
# the same such number therefore get equal weights. So they do in SDPA, unless scores are larger than the
# distance. ``_without_low_numbers`` of tests/attention/cases.py draws the same line for float64.
_ABSORBS = -(2.0**24)


def level_rows(query: Tensor, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``query`` and a float ``mask`` such that partial results over columns of ``mask`` merge by their
    lse.

    Low rows of the mask, as :class:`FiniteMaskedRows` defines them, are shifted so that their maximum is 0.
    Queries of absorbed rows become 0, so that only the mask weighs their keys. A row of -inf stays such a
    row. Not differentiable.

    Args:
        mask: Its rows may be followed by rows of other queries.
        dtype: The dtype of the returned mask. If it is smaller than that of ``mask``, low numbers may become
            -inf, but no row does that was not.
    """
    if mask.shape[-1] == 0:
        return query, mask
    highest = mask.amax(-1, keepdim=True)
    if torch.finfo(mask.dtype).min < _ABSORBS:
        # masked_fill would not keep the memory layout of the query, and the output has the same.
        query = query * (highest[:, :, : query.shape[2]] >= _ABSORBS)
    # The clamp avoids -inf minus -inf, which is NaN; hardshrink replaces a maximum from _LOW to 0 by 0.
    shift = F.hardshrink(highest.clamp(min=torch.finfo(mask.dtype).min, max=0.0), -_LOW)
    return query, torch.sub(mask, shift, out=mask.new_empty(mask.shape, dtype=dtype))


def can_be_finite(mask: Tensor, query: Tensor) -> bool:
    """Whether :func:`finite_bias` supports the call. float16 cannot represent numbers that are low enough: a
    score of some ten thousand would still outweigh them.
    """
    return bias_dtype(mask, query) != torch.float16


def finite_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return ``mask`` as an additive mask without -inf, in a dtype that SDPA takes, with aligned rows.

    A hidden key gets half of the lowest number of the dtype, because kernels multiply scores by log2(e).

    Args:
        mask: Bool, or a float mask from :func:`level_rows`, ``[B or 1, H or 1, S_q or 1, S_k]``.
    """
    dtype = bias_dtype(mask, query)
    limit = torch.finfo(dtype).max
    if mask.dtype == torch.bool:
        return aligned_rows(query, mask.shape, dtype, fill=-limit / 2).masked_fill_(mask, 0.0)
    rows = aligned_rows(query, mask.shape, dtype)
    if mask.dtype == dtype:
        return torch.clamp(mask, min=-limit / 2, out=rows)
    return rows.copy_(mask).clamp_(min=-limit / 2)


def clear_rows_without_key(out: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
    """Write 0 to ``out`` and -inf to ``lse``, in place, in rows whose keys a finite bias of ``dtype`` hides."""
    is_empty = lse < -torch.finfo(dtype).max / 4
    out.masked_fill_(is_empty[..., None], 0.0)
    lse.masked_fill_(is_empty, -inf)


@dataclass(frozen=True)
class FiniteMaskedRows:
    """A float mask whose low rows, those that hide every key with a finite number, are corrected for merging
    by lse.

    Such numbers are ``finfo.min``, -1e9 or -10000. SDPA returns a weighted mean of the values for such a row,
    because softmax ignores a number that is added to all scores. The lse of the row, however, is about this
    number, so that the logarithm of the number of keys is lost to rounding. Merging by such an lse would give
    all ring blocks the same weight, whatever their lengths.

    A row is *low* if its maximum is finite and below -1000 (``_LOW``). A low row is *absorbed* if its maximum
    is below -2²⁴ (``_ABSORBS``): all keys with it get equal weights.

    Args:
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``. Low rows that are not absorbed are shifted so that
            their maximum is 0.
        highest: ``[B or 1, H or 1, S_q or 1, 1]``, the maximum of each row of ``mask`` after this shift.
        absorbed: Bool of the same shape as ``highest``, True for absorbed rows.
    """

    mask: Tensor
    highest: Tensor
    absorbed: Tensor

    @staticmethod
    def of(mask: Tensor | None) -> FiniteMaskedRows | None:
        """Return ``mask`` with its low rows corrected; None if ``mask`` is None or bool."""
        if mask is None or mask.dtype == torch.bool:
            return None
        if mask.shape[-1]:
            highest = mask.amax(-1, keepdim=True)
        else:
            highest = mask.new_zeros(*mask.shape[:-1], 1)
        # float16 cannot represent _ABSORBS.
        level = highest.to(torch.promote_types(highest.dtype, torch.float32))
        absorbed = (level < _ABSORBS) & (level > float("-inf"))
        low = (level < _LOW) & (level >= _ABSORBS)
        return FiniteMaskedRows(
            torch.where(low, mask - highest, mask), torch.where(low, 0.0, highest), absorbed
        )

    def split(self, cut: Callable[[Tensor], list[Tensor]]) -> list[FiniteMaskedRows]:
        """Split the rows with ``cut``, a function that splits one tensor, and return one instance for each part."""
        return [
            FiniteMaskedRows(*parts)
            for parts in zip(cut(self.mask), cut(self.highest), cut(self.absorbed), strict=True)
        ]

    def take_rows(self, first: int, length: int) -> FiniteMaskedRows:
        """Return the ``length`` rows from ``first`` on; all rows if there is one row for all queries."""
        if self.mask.shape[2] == 1 or (first == 0 and length == self.mask.shape[2]):
            return self
        return FiniteMaskedRows(
            *[x.narrow(2, first, length) for x in (self.mask, self.highest, self.absorbed)]
        )

    def lse_of_tile(self, lse: Tensor, call: LocalAttentionCall) -> Tensor:
        """Return the corrected lse ``[B, H, S_q]`` of ``call``, attention to some of the keys (a tile) with
        the part of :attr:`mask` for them, that has as many key heads as query heads. Differentiable.

        In absorbed rows this is the logarithm of the number of the tile's keys that have the row's maximum;
        other rows keep ``lse``.
        """
        if call.mask is None:
            return lse
        mask, num_keys = call.mask, call.key.shape[2]
        equal = (mask == self.highest).expand(*mask.shape[:-1], num_keys)
        if call.is_causal:
            equal = equal & equal.new_ones(lse.shape[-1], num_keys).tril()
        number = equal.sum(-1)
        of_absorbed = number.to(lse.dtype).log()
        if torch.is_grad_enabled():
            of_absorbed = of_absorbed + _mean_of_scores(call, mask, equal, number)
        return torch.where(self.absorbed[..., 0], of_absorbed, lse)

    def for_gradient(self, grad_out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``grad_out`` and ``lse`` changed such that exp(scores - lse) · grad_out is correct in
        absorbed rows.

        There a score plus the mask equals the mask after rounding, and N keys with the row's maximum have the
        weight 1 / N, where ``lse`` is log N. The returned lse is the maximum, so exp(scores - lse) is 1, and
        the gradient grad_out / N.
        """
        scaled = torch.where(self.absorbed, grad_out / lse.exp()[..., None], grad_out).to(grad_out.dtype)
        return scaled, torch.where(self.absorbed[..., 0], self.highest[..., 0].to(lse.dtype), lse)


def _mean_of_scores(call: LocalAttentionCall, mask: Tensor, chosen: Tensor, number: Tensor) -> Tensor:
    """Return zeros ``[B, H, S_q]`` with the gradient of the mean over the ``number`` chosen keys of the
    masked scores.

    The lse of n equal scores has this gradient: 1 / n for each of them.
    """
    weights = chosen.to(call.query.dtype) / number.clamp(min=1)[..., None]
    scores = (call.query * (weights @ call.key)).sum(-1) * call.factor
    # Subtract first: sums of finfo.min would be infinite.
    masked = torch.where(chosen, mask - mask.detach(), 0.0)
    return scores - scores.detach() + (weights * masked).sum(-1)
