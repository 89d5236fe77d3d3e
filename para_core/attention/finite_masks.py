"""Rows of a float mask that hide every key with a finite number: ``finfo.min``, -1e9, -10000.

SDPA returns a mean of the values for such a row, because softmax ignores a number that is added to all scores. But the
lse of the row is about that number, and float32 has no digits left for the logarithm of the number of keys. Merging by
such an lse would give all ring blocks the same weight, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What is added to all keys of a row and lower than this is taken out of its scores.
_LOW = -1e3
# A lower number leaves no digits for the scores: in SDPA, too, all keys with it have equal weights.
_ABSORBS = -(2.0**24)


@dataclass(frozen=True)
class FiniteMaskedRows:
    """A float mask whose low rows, those that hide every key with a finite number, are corrected for merging by lse.

    A row is *low* if its maximum is below -1000. A low row is *absorbed* if that number is so large that float32 cannot
    hold a score next to it; all keys then have equal weights.

    Args:
        mask: ``[B or 1, H or 1, S_q or 1, total]``. Low rows that are not absorbed are shifted so that their maximum is
            0.
        highest: ``[B or 1, H or 1, S_q or 1, 1]``, the maximum of each row of ``mask``.
        absorbed: Same shape, True for absorbed rows.
    """

    mask: Tensor
    highest: Tensor
    absorbed: Tensor

    @staticmethod
    def of(mask: Tensor | None) -> FiniteMaskedRows | None:
        """Return the corrected form of a mask that covers all keys of the sequence; None if it cannot have low rows."""
        if mask is None or mask.dtype == torch.bool or mask.shape[-1] == 1:
            return None
        highest = mask.amax(-1, keepdim=True) if mask.shape[-1] else mask.new_zeros(*mask.shape[:-1], 1)
        level = highest.to(torch.promote_types(highest.dtype, torch.float32))  # float16 cannot represent _ABSORBS.
        absorbed = (level < _ABSORBS) & (level > float("-inf"))
        low = (level < _LOW) & (level >= _ABSORBS)
        return FiniteMaskedRows(torch.where(low, mask - highest, mask), torch.where(low, 0.0, highest), absorbed)

    def split(self, cut: Callable[[Tensor], list[Tensor]]) -> list[FiniteMaskedRows]:
        """Return one instance per piece of the queries. ``cut`` splits a tensor along its rows."""
        return [
            FiniteMaskedRows(*parts)
            for parts in zip(cut(self.mask), cut(self.highest), cut(self.absorbed), strict=True)
        ]

    def lse_of_tile(self, lse: Tensor, mask: Tensor, *, diagonal: bool) -> Tensor:
        """Return the lse ``[B, H, S_q]`` of a tile of keys; for absorbed rows, the logarithm of the number of keys with
        the row's maximum.

        Args:
            mask: ``[B or 1, H or 1, S_q or 1, S_k]``, the mask of the tile's keys.
            diagonal: Whether query i sees only keys 0 … i of the tile.
        """
        equal = mask == self.highest
        if diagonal:
            equal = equal & equal.new_ones(lse.shape[-1], mask.shape[-1]).tril()
        return torch.where(self.absorbed[..., 0], equal.sum(-1).to(lse.dtype).log(), lse)

    def for_gradient(self, grad_out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``grad_out`` and lse for which exp(scores - lse) · grad_out is also correct in absorbed rows.

        In these rows the scores equal the mask, so exp(scores - mask) is 1 although the weight is 1 / N for N keys. The
        factor goes into ``grad_out``.
        """
        scaled = torch.where(self.absorbed, grad_out / lse.exp()[..., None], grad_out).to(grad_out.dtype)
        return scaled, torch.where(self.absorbed[..., 0], self.highest[..., 0].to(lse.dtype), lse)
