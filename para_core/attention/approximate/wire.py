"""What travels rounded to 8 bits, with a scale per sample and head. Approximate; forward only.

A tensor ``[B, H, S, D]`` becomes bytes ``[B, H, S + r, D]``: each element divided by its head's scale and rounded, and the
scale itself in ``r`` more tokens, so that it takes the way that its head takes, in the same collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.ulysses import Exchange, as_sdpa, join_kinds, num_replicated

_SCALE_BYTES = 4  # a float32


@dataclass(frozen=True)
class Wire:
    """``dtype`` on the way. ``width``: the smallest head dim of what travels together."""

    dtype: torch.dtype
    width: int

    @property
    def scale_rows(self) -> int:
        """Tokens that hold the scale of a head."""
        return -(-_SCALE_BYTES // max(1, self.width))

    def write(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, S, D]`` as it travels, ``[B, H, S + scale_rows, D]``."""
        largest = x.abs().amax((2, 3)).float() if x.shape[2] * x.shape[3] else x.new_zeros(x.shape[:2]).float()
        scale = largest / torch.finfo(self.dtype).max
        scale = scale.masked_fill(scale == 0, 1.0)
        tokens = (x / scale[..., None, None]).to(self.dtype).view(torch.uint8)
        rows = tokens.new_zeros(*x.shape[:2], self.scale_rows * x.shape[3])
        rows[..., :_SCALE_BYTES] = scale[..., None].view(torch.uint8)
        return torch.cat([tokens, rows.unflatten(2, (self.scale_rows, x.shape[3]))], dim=2)

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What was written, in ``dtype``."""
        tokens, rows = x.split([x.shape[2] - self.scale_rows, self.scale_rows], dim=2)
        scale = rows.flatten(2)[..., :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        numbers: Tensor = tokens.contiguous().view(self.dtype).float() * scale[..., None]
        return numbers.to(dtype)

    def read_each(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What several ranks wrote, of so many tokens each, one after the other."""
        parts = x.split([size + self.scale_rows for size in sizes], dim=2)
        return torch.cat([self.read(part, dtype) for part in parts], dim=2)


class RoundedExchange:
    """An :class:`Exchange` whose sharded tokens travel as a :class:`Wire` writes them; used in its place."""

    def __init__(self, exact: Exchange, dtype: torch.dtype) -> None:
        self._exact, self._dtype = exact, dtype

    def start_enter(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Sequence[Tensor]]:
        exact, dtype = self._exact, query.dtype
        wire = Wire(self._dtype, min(query.shape[3], value.shape[3]))
        kinds = exact.by_kind(query, key, value)
        carrier = Exchange(exact.query_layout, exact.key_layout, exact.mesh, exact.heads, extra_tokens=wire.scale_rows)
        finish = carrier.start_enter_sharded(*[wire.write(sharded) for sharded, _ in kinds])
        sizes = [exact.token_sizes(layout) for layout in (exact.query_layout, exact.key_layout, exact.key_layout)]

        def read() -> list[Tensor]:
            blocks = [wire.read_each(block, numbers, dtype) for block, numbers in zip(finish(), sizes, strict=True)]
            return exact.with_replicated(blocks, [text for _, text in kinds])

        return read

    def start_leave(self, out: Tensor) -> Callable[[], Tensor]:
        exact, layout = self._exact, self._exact.query_layout
        wire = Wire(self._dtype, out.shape[3])
        rounded, num_text = wire.write(out), num_replicated(layout)
        # Behind its own tokens every peer gets the replicated ones, and what all of them are scaled by.
        common = num_text + wire.scale_rows
        leaving = exact.transfer([layout], [exact.heads.of_query], common, to_heads=False)
        finish = leaving.start((rounded, rounded.narrow(2, rounded.shape[2] - common, common)))

        def read() -> Tensor:
            sharded, common = finish()
            found = wire.read(torch.cat([sharded, common], dim=2), out.dtype)
            sharded, text = found.split([found.shape[2] - num_text, num_text], dim=2)
            return join_kinds((sharded, text), layout, exact.mesh.rank) if num_text else as_sdpa(sharded)

        return read
