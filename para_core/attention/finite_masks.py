"""Rows of a float mask that hide every key with a large number instead of -inf: ``finfo.min``, -1e9, -10000.

SDPA gives such a row a mean of the values: softmax does not see what is added to all scores alike. But the row's lse is that
number, and float32 has no room beside it for the logarithm of how many keys a block has. By such an lse blocks of a ring would
weigh alike, however long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What is added to all keys of a row and lower than this is taken out of its scores.
_LOW = -1e3
# Lower than this it leaves no bit for the scores: all keys that have it weigh alike, to SDPA too.
_ABSORBS = -(2.0**24)


@dataclass(frozen=True)
class FiniteMaskedRows:
    """
    Args:
        mask: ``[B or 1, H or 1, S_q or 1, total]`` float, with low rows moved up to 0 where scores still count.
        highest: of each row of ``mask``, ``[B or 1, H or 1, S_q or 1, 1]``.
        absorbed: the rows in which scores do not count, likewise.
    """

    mask: Tensor
    highest: Tensor
    absorbed: Tensor

    @staticmethod
    def of(mask: Tensor | None) -> FiniteMaskedRows | None:
        """Of the mask of all keys of the sequence, where rows' lse is asked for; None if there can be none."""
        if mask is None or mask.dtype == torch.bool or mask.shape[-1] == 1:
            return None
        highest = mask.amax(-1, keepdim=True) if mask.shape[-1] else mask.new_zeros(*mask.shape[:-1], 1)
        level = highest.to(torch.promote_types(highest.dtype, torch.float32))  # float16 has no _ABSORBS
        absorbed = (level < _ABSORBS) & (level > float("-inf"))
        low = (level < _LOW) & (level >= _ABSORBS)
        return FiniteMaskedRows(torch.where(low, mask - highest, mask), torch.where(low, 0.0, highest), absorbed)

    def split(self, cut: Callable[[Tensor], list[Tensor]]) -> list[FiniteMaskedRows]:
        """Of each piece of the queries, into which ``cut`` splits what has rows."""
        return [
            FiniteMaskedRows(*parts)
            for parts in zip(cut(self.mask), cut(self.highest), cut(self.absorbed), strict=True)
        ]

    def lse_of_tile(self, lse: Tensor, mask: Tensor, *, diagonal: bool) -> Tensor:
        """lse ``[B, H, S_q]`` of a tile of keys, measured from the bias of the row where that absorbs it.

        Args:
            mask: of the tile's keys, ``[B or 1, H or 1, S_q or 1, S_k]``.
            diagonal: query i sees keys 0 … i of the tile.
        """
        equal = mask == self.highest
        if diagonal:
            equal = equal & equal.new_ones(lse.shape[-1], mask.shape[-1]).tril()
        return torch.where(self.absorbed[..., 0], equal.sum(-1).to(lse.dtype).log(), lse)

    def for_gradient(self, grad_out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """``grad_out`` and lse with which exp(scores - lse) · grad_out is right in these rows, too.

        There the scores are the bias, so exp(scores - bias) is 1 where the weight is one in N keys: the rest is put into grad_out.
        """
        scaled = torch.where(self.absorbed, grad_out / lse.exp()[..., None], grad_out).to(grad_out.dtype)
        return scaled, torch.where(self.absorbed[..., 0], self.highest[..., 0].to(lse.dtype), lse)
