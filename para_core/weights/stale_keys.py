"""Attention of a patch to all tokens: its own keys are of now, those behind it of the step before. Approximate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Begin and length, along the tokens of a joint sequence.
Rows = tuple[int, int]


@dataclass
class StaleKeys:
    """Keys and values of all tokens, of each attention call of this rank's blocks, in one branch of guidance.

    :meth:`begin` says what the calls that follow are of; then this stands in for ``scaled_dot_product_attention``. A patch writes its
    rows, and attends to all: what stands before them is of now, what behind of the step before.

    Args:
        total: tokens of a joint sequence.
    """

    total: int
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # Of the patch under way; None: all tokens.
    rows: tuple[Rows, ...] | None = None
    _calls: int = 0

    @property
    def nbytes(self) -> int:
        return sum(key.nbytes + value.nbytes for key, value in self.held)

    def begin(self, rows: Sequence[Rows] | None) -> None:
        """A call of the model with these tokens; None: with all, whose keys are held from then on."""
        self.rows, self._calls = None if rows is None else tuple(rows), 0
        if rows is None:
            self.held.clear()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """In place of ``scaled_dot_product_attention``: query ``[B, H, S_own, D]``, of the rows of now.

        Raises:
            RuntimeError: it is attention to something else than the tokens of a joint sequence, or has a mask.
        """
        own = self.total if self.rows is None else sum(length for _, length in self.rows)
        if attn_mask is not None or query.shape[-2] != own or key.shape[-2] != own:
            masked = "no mask" if attn_mask is None else f"a mask {list(attn_mask.shape)}"
            raise RuntimeError(
                f"an attention call has {query.shape[-2]} queries, {key.shape[-2]} keys and {masked}; PipeFusion knows attention of the "
                f"{own} tokens of a patch, text and image, to each other, without a mask. Leave pipefusion= out: stages are exact then."
            )
        if self.rows is None:
            copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in (key, value)]
            self.held.append((copies[0], copies[1]))
        else:
            held, start = self.held[self._calls], 0
            for begin, length in self.rows:
                for whole, part in zip(held, (key, value), strict=True):
                    whole.narrow(-2, begin, length).copy_(part.narrow(-2, start, length))
                start += length
            key, value = held
        self._calls += 1
        out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(query, key, value, None, *rest, **options)
        return out
