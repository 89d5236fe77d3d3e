"""What the callers of all peers share: how one rank's part of a row is made, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.rows import Row

# One thing that a peer can be asked: its own options, and in which form it gets a mask.
Setting = dict[str, Any]
Cut = Callable[[Tensor], Tensor]


@dataclass
class Part:
    """What one rank computed, and of which tokens of the whole sequence."""

    out: Tensor
    positions: Tensor
    key_positions: Tensor
    gradients: list[Tensor]  # of this rank's query, key, value; empty where they are not compared


@dataclass
class Call:
    """A row on one rank of a ``ring × ulysses`` world, in one setting."""

    row: Row
    ring: int
    ulysses: int
    setting: Setting

    def tokens(self, cut: Cut) -> list[Tensor]:
        """This rank's query, key and value; ``cut`` is the peer's own function for dim 2."""
        parts = [self._cut_segments(x, cut).detach().clone() for x in self.row.qkv()]
        return [x.requires_grad_(self.row.backward) for x in parts]

    def positions(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """Of this rank's queries and keys."""
        lengths = (self.row.S, self.row.S_k or self.row.S)
        numbered = [torch.arange(length).view(1, 1, length, 1) for length in lengths]
        q, k = (self._cut_segments(x, cut).flatten().clone() for x in numbered)
        return q, k

    def _cut_segments(self, x: Tensor, cut: Cut) -> Tensor:
        if not self.row.text:
            return cut(x)
        text, image = x.split([self.row.text, x.shape[2] - self.row.text], dim=2)
        return torch.cat([text if self.row.text_whole else cut(text), cut(image)], dim=2)

    def mask(self, positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """The mask in the form of this setting."""
        mask, form = self.row.whole_mask(), self.setting.get("mask", "whole")
        if mask is None or form == "whole":
            return mask
        if form == "rows":  # of a mask with four dims and a row for every query
            mask = mask[(None,) * (4 - mask.ndim)]
            return mask.expand(*mask.shape[:-2], self.row.S, -1).index_select(-2, positions)
        if form == "columns":
            return mask.index_select(-1, key_positions)
        return mask.chunk(self.ulysses, dim=1)[dist.get_rank() % self.ulysses]  # this Ulysses rank's heads

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, compiled if the row says so."""
        return torch.compile(function, fullgraph=True, backend="aot_eager") if self.row.compiled else function

    def finish(self, out: Tensor, leaves: list[Tensor], positions: Tensor, key_positions: Tensor) -> Part:
        """Run the backward if the row has one; inside the peer's context, if that is open for it."""
        gradients = []
        if self.row.backward:
            (out * self.row.weight().index_select(2, positions)).sum().backward()
            gradients = [leaf.grad for leaf in leaves]
        return Part(out.detach(), positions, key_positions, gradients)


def mask_forms(row: Row, ulysses: int, first: str = "whole") -> list[Setting]:
    """Every form in which a mask could be meant, the documented one first: the cell takes the best of them.

    Without documentation that is the whole mask, as on one device; a user who passes another shards it ``by hand``.
    """
    if row.mask is None:
        return [{}]
    forms = ["whole", "columns", "rows"]
    if row.mask == "additive" and ulysses > 1:
        forms.append("heads")
    forms.sort(key=lambda form: form != first)
    return [{"mask": form, **({} if form in ("whole", first) else {"by hand": True})} for form in forms]
