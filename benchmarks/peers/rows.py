"""The inputs of the table, and one rank's part of each. The callers of all peers share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

# -- The inputs.


@dataclass(frozen=True)
class Row:
    """One attention call over a whole sequence."""

    name: str
    S: int = 128
    H: int = 8
    D: int = 16
    B: int = 2
    S_k: int | None = None
    H_kv: int | None = None
    D_v: int | None = None
    mask: str | None = None  # The name is a key of MASKS.
    is_causal: bool = False
    text: int = 0  # These are the first of the S tokens, with their own segment.
    text_whole: bool = False  # Every rank has all of the text.
    dtype: torch.dtype = torch.float32
    backward: bool = False
    compiled: bool = False

    def qkv(self) -> list[Tensor]:
        """Return query, key and value, which are the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        keys, heads = self.S_k or self.S, self.H_kv or self.H
        shapes = [(self.H, self.S, self.D), (heads, keys, self.D), (heads, keys, self.D_v or self.D)]
        return [torch.randn(self.B, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def whole_mask(self) -> Tensor | None:
        """Return the mask of all queries and keys."""
        return None if self.mask is None else MASKS[self.mask](self)

    def weight(self) -> Tensor:
        """Return the weight of each element of ``out`` in the loss whose gradients are compared."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.B, self.H, self.S, self.D_v or self.D, generator=generator).to(self.dtype)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Run SDPA with the options of this row. A replacement of SDPA gets ``enable_gqa`` only if heads are shared."""
        options = {"enable_gqa": True} if self.H_kv is not None else {}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.is_causal, **options)

    def on_one_device(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return out, and the gradients of query, key and value if they are compared."""
        q, k, v = (x.to(dtype or self.dtype).requires_grad_(self.backward) for x in self.qkv())
        out = self.sdpa(q, k, v, self.whole_mask())
        if not self.backward:
            return [out]
        (out * self.weight().to(out.dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in (q, k, v))]


def _padding(row: Row) -> Tensor:
    """Return ``[B, 1, 1, S]``. The second sequence of the batch is shorter."""
    lengths = torch.tensor([row.S, 5 * row.S // 8])
    return torch.arange(row.S) < lengths.view(row.B, 1, 1, 1)


def _full(row: Row) -> Tensor:
    """Return ``[S, S]``. Every query sees a key."""
    mask = torch.rand(row.S, row.S, generator=torch.Generator().manual_seed(2)) < 0.7
    return mask | torch.eye(row.S, dtype=torch.bool)


def _hidden(row: Row) -> Tensor:
    """Return ``[S, S]``. Some queries see no key, for which SDPA gives zeros."""
    mask = _full(row)
    mask[3::7] = False
    return mask


def _additive(row: Row) -> Tensor:
    """Return ``[B, H, S, S]``, which differs between heads."""
    return torch.randn(row.B, row.H, row.S, row.S, generator=torch.Generator().manual_seed(3)).to(row.dtype)


def _text_padding(row: Row) -> Tensor:
    """Return ``[B, 1, 1, S]``. The second sequence of the batch has less text."""
    mask = torch.ones(row.B, 1, 1, row.S, dtype=torch.bool)
    mask[1:, ..., 5 * row.text // 8 : row.text] = False
    return mask


MASKS = {"text padding": _text_padding, "padding": _padding, "full": _full, "hidden": _hidden, "additive": _additive}

ROWS = [
    Row("self-attention"),
    Row("101 tokens: no number of ranks divides them", S=101),
    Row("3 heads", H=3),
    Row("1 head", H=1),
    Row("`is_causal`", is_causal=True),
    Row("`is_causal`, 101 tokens", S=101, is_causal=True),
    Row("bool mask of keys `[B, 1, 1, S]`", mask="padding"),
    Row("bool mask of keys, 101 tokens", S=101, mask="padding"),
    Row("bool mask `[S, S]`", mask="full"),
    Row("bool mask, some rows all False", mask="hidden"),
    Row("float mask `[B, H, S, S]`", mask="additive"),
    Row("cross-attention, 64 keys", S_k=64),
    Row("cross-attention, 77 keys", S_k=77),
    Row("text + image, both sharded", text=32),
    Row("text replicated + image sharded", text=32, text_whole=True),
    Row("`enable_gqa`, 6 / 2 heads", H=6, H_kv=2),
    Row("`enable_gqa`, 4 / 1 heads", H=4, H_kv=1),
    Row("value head dim 32, query 16", D_v=32),
    Row("bfloat16", dtype=torch.bfloat16),
    Row("gradients", backward=True),
    Row("gradients, bool mask of keys", mask="padding", backward=True),
    Row("gradients, `is_causal`", is_causal=True, backward=True),
    Row("`torch.compile(fullgraph=True)`", compiled=True),
]


# Only some libraries run this row, see ``Caller.own_rows``.
MASKED_TEXT = Row("text replicated, a mask of its keys", text=32, text_whole=True, mask="text padding")


# -- One rank's part of an input.


# A setting is one way to call a peer: the peer's own options, and the form in which it gets a mask.
Setting = dict[str, Any]
Cut = Callable[[Tensor], Tensor]


@dataclass
class RankOutput:
    """The output of one rank, and the positions of its tokens in the whole sequence."""

    out: Tensor
    positions: Tensor
    key_positions: Tensor
    # The gradients are those of this rank's query, key and value. The list is empty if they are not compared.
    gradients: list[Tensor]


@dataclass
class Call:
    """A row on one rank of a ``ring × ulysses`` world, in one setting."""

    row: Row
    ring: int
    ulysses: int
    setting: Setting

    def tokens(self, cut: Cut) -> list[Tensor]:
        """Return this rank's query, key and value. ``cut`` is the peer's own function for dim 2."""
        parts = [self.cut_segments(x, cut).detach().clone() for x in self.row.qkv()]
        return [x.requires_grad_(self.row.backward) for x in parts]

    def positions(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return the positions of this rank's queries and keys."""
        lengths = (self.row.S, self.row.S_k or self.row.S)
        numbered = [torch.arange(length).view(1, 1, length, 1) for length in lengths]
        q, k = (self.cut_segments(x, cut).flatten().clone() for x in numbered)
        return q, k

    def cut_segments(self, x: Tensor, cut: Cut) -> Tensor:
        """Return this rank's part of dim 2 of ``x``. Replicated text is not split."""
        if not self.row.text:
            return cut(x)
        text, image = x.split([self.row.text, x.shape[2] - self.row.text], dim=2)
        return torch.cat([text if self.row.text_whole else cut(text), cut(image)], dim=2)

    def mask(self, positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """Return the mask in the form of this setting."""
        mask, form = self.row.whole_mask(), self.setting.get("mask", "whole")
        if mask is None or form == "whole":
            return mask
        if form == "rows":  # The mask has four dims and a row for every query.
            mask = mask[(None,) * (4 - mask.ndim)]
            return mask.expand(*mask.shape[:-2], self.row.S, -1).index_select(-2, positions)
        if form == "columns":
            return mask.index_select(-1, key_positions)
        # These are the heads of this Ulysses rank.
        return mask.chunk(self.ulysses, dim=1)[dist.get_rank() % self.ulysses]

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, compiled if the row says so."""
        return torch.compile(function, fullgraph=True, backend="aot_eager") if self.row.compiled else function

    def run(self, cut: Cut, attend: Callable[..., Tensor]) -> RankOutput:
        """Run ``attend(query, key, value, mask)`` on this rank's parts."""
        leaves, positions = self.tokens(cut), self.positions(cut)
        return self.finish(self.compiled(attend)(*leaves, self.mask(*positions)), leaves, *positions)

    def finish(self, out: Tensor, leaves: list[Tensor], positions: Tensor, key_positions: Tensor) -> RankOutput:
        """Run the backward if the row has one, inside the peer's context if that is open for it."""
        gradients = []
        if self.row.backward:
            (out * self.row.weight().index_select(2, positions)).sum().backward()
            gradients = [leaf.grad for leaf in leaves]
        return RankOutput(out.detach(), positions, key_positions, gradients)


def mask_forms(row: Row, ulysses: int, first: str = "whole") -> list[Setting]:
    """Return every form in which a mask could be meant, the documented one first. The cell takes the best of them.

    Without documentation that is the whole mask, as on one device. A user who passes another one shards it ``by hand``.
    """
    if row.mask is None:
        return [{}]
    forms = ["whole", "columns", "rows"]
    if row.mask == "additive" and ulysses > 1:
        forms.append("heads")
    forms.sort(key=lambda form: form != first)
    return [{"mask": form, **({} if form in ("whole", first) else {"by hand": True})} for form in forms]
