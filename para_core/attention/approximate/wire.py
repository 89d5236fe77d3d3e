"""How tensors travel: as they are, or in 8 bits with a scale per sample and head.

In 8 bits a tensor ``[B, H, S, D]`` becomes bytes ``[B, H, S + r, D]``: each element divided by its head's scale and rounded, and the
scale itself in ``r`` more tokens, so that it takes the way that its head takes, in the same collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE_BYTES = 4  # a float32


@dataclass(frozen=True)
class Wire:
    """``dtype`` on the way; None leaves tensors as they are. ``width``: the smallest head dim of what travels together."""

    dtype: torch.dtype | None
    width: int

    @property
    def scale_rows(self) -> int:
        """Tokens that hold the scale of a head."""
        if self.dtype is None:
            return 0
        return -(-_SCALE_BYTES // max(1, self.width))

    def write(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, S, D]`` as it travels, ``[B, H, S + scale_rows, D]``."""
        return x if self.dtype is None else torch.cat([*self.write_apart(x)], dim=2)

    def write_apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and scales, for who cuts the tokens for several ranks."""
        if self.dtype is None:
            return x, x[:, :, :0]
        largest = x.abs().amax((2, 3)).float() if x.shape[2] * x.shape[3] else x.new_zeros(x.shape[:2]).float()
        scale = largest / torch.finfo(self.dtype).max
        scale = scale.masked_fill(scale == 0, 1.0)
        tokens = (x / scale[..., None, None]).to(self.dtype).view(torch.uint8)
        rows = tokens.new_zeros(*x.shape[:2], self.scale_rows * x.shape[3])
        rows[..., :_SCALE_BYTES] = scale[..., None].view(torch.uint8)
        return tokens, rows.unflatten(2, (self.scale_rows, x.shape[3]))

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What was written, in ``dtype``."""
        if self.dtype is None:
            return x
        tokens, rows = x.split([x.shape[2] - self.scale_rows, self.scale_rows], dim=2)
        scale = rows.flatten(2)[..., :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        numbers: Tensor = tokens.view(self.dtype).float() * scale[..., None]
        return numbers.to(dtype)

    def read_each(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What several ranks wrote, of so many tokens each, one after the other."""
        if self.dtype is None:
            return x
        parts = x.split([size + self.scale_rows for size in sizes], dim=2)
        return torch.cat([self.read(part, dtype) for part in parts], dim=2)
