"""Masks that hide every key of a row with finite numbers, corrected so that partial results merge by their lse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# If the largest number in a row of the mask is lower than _LOW, but not lower than _ABSORBS, it is subtracted from the
# row.
_LOW = -1e3
# A score that is added to a number lower than _ABSORBS is lost to rounding in float32. All keys with the same such
# number therefore have equal weights, in SDPA as well.
_ABSORBS = -(2.0**24)


@dataclass(frozen=True)
class FiniteMaskedRows:
    """A float mask whose low rows, those that hide every key with a finite number, are corrected for merging by lse.

    Such numbers are ``finfo.min``, -1e9 or -10000. SDPA returns a weighted mean of the values for such a row, because
    softmax ignores a number that is added to all scores. The lse of the row, however, is about this number, so that the
    logarithm of the number of keys is lost to rounding. Merging by such an lse would give all ring blocks the same
    weight, whatever their lengths.

    A row is *low* if its maximum is finite and below -1000. A low row is *absorbed* if its maximum is below -2²⁴:
    a score that is added to such a number is lost to rounding in float32, so all keys with it have equal weights.

    Args:
        mask: ``[B or 1, H or 1, S_q or 1, total or 1]``. Low rows that are not absorbed are shifted so that their
            maximum is 0.
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
        highest = mask.amax(-1, keepdim=True) if mask.shape[-1] else mask.new_zeros(*mask.shape[:-1], 1)
        level = highest.to(torch.promote_types(highest.dtype, torch.float32))  # float16 cannot represent _ABSORBS.
        absorbed = (level < _ABSORBS) & (level > float("-inf"))
        low = (level < _LOW) & (level >= _ABSORBS)
        return FiniteMaskedRows(torch.where(low, mask - highest, mask), torch.where(low, 0.0, highest), absorbed)

    def split(self, cut: Callable[[Tensor], list[Tensor]]) -> list[FiniteMaskedRows]:
        """Split the rows with ``cut``, a function that splits one tensor, and return one instance for each part."""
        return [
            FiniteMaskedRows(*parts)
            for parts in zip(cut(self.mask), cut(self.highest), cut(self.absorbed), strict=True)
        ]

    def lse_of_tile(self, lse: Tensor, mask: Tensor, num_keys: int, *, diagonal: bool) -> Tensor:
        """Return the corrected lse ``[B, H, S_q]`` of attention to some of the keys (a tile), which have this ``mask``.

        In absorbed rows this is the logarithm of the number of the tile's ``num_keys`` keys that have the row's
        maximum; other rows keep ``lse``. With ``diagonal``, query i sees only keys 0 … i of the tile.
        """
        equal = (mask == self.highest).expand(*mask.shape[:-1], num_keys)
        if diagonal:
            equal = equal & equal.new_ones(lse.shape[-1], num_keys).tril()
        return torch.where(self.absorbed[..., 0], equal.sum(-1).to(lse.dtype).log(), lse)

    def for_gradient(self, grad_out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``grad_out`` and ``lse`` changed such that exp(scores - lse) · grad_out is correct in absorbed rows.

        There a score plus the mask equals the mask after rounding, and N keys with the row's maximum have the weight 1
        / N, where ``lse`` is log N. The returned lse is the maximum, so exp(scores - lse) is 1, and the gradient
        grad_out / N.
        """
        scaled = torch.where(self.absorbed, grad_out / lse.exp()[..., None], grad_out).to(grad_out.dtype)
        return scaled, torch.where(self.absorbed[..., 0], self.highest[..., 0].to(lse.dtype), lse)
