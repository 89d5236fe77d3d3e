"""The inputs of attention that the table has a row for, and what one device computes for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


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
    mask: str | None = None  # a key of MASKS
    is_causal: bool = False
    text: int = 0  # of the S tokens, in front; a segment of its own
    text_whole: bool = False  # every rank holds all of the text
    dtype: torch.dtype = torch.float32
    backward: bool = False
    compiled: bool = False

    def qkv(self) -> list[Tensor]:
        """Query, key and value, the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        keys, heads = self.S_k or self.S, self.H_kv or self.H
        shapes = [(self.H, self.S, self.D), (heads, keys, self.D), (heads, keys, self.D_v or self.D)]
        return [torch.randn(self.B, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def whole_mask(self) -> Tensor | None:
        """For all queries and keys."""
        return None if self.mask is None else MASKS[self.mask](self)

    def weight(self) -> Tensor:
        """Of each element of out in the loss whose gradients are compared."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.B, self.H, self.S, self.D_v or self.D, generator=generator).to(self.dtype)

    def on_one_device(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Out, then the gradients of query, key and value if they are compared."""
        q, k, v = (x.to(dtype or self.dtype).requires_grad_(self.backward) for x in self.qkv())
        mask = self.whole_mask()
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal, enable_gqa=self.H_kv is not None)
        if not self.backward:
            return [out]
        (out * self.weight().to(out.dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in (q, k, v))]


def _padding(row: Row) -> Tensor:
    """``[B, 1, 1, S]``: the second sequence of the batch is shorter."""
    lengths = torch.tensor([row.S, 5 * row.S // 8])
    return torch.arange(row.S) < lengths.view(row.B, 1, 1, 1)


def _full(row: Row) -> Tensor:
    """``[S, S]``; every query sees something."""
    seen = torch.rand(row.S, row.S, generator=torch.Generator().manual_seed(2)) < 0.7
    return seen | torch.eye(row.S, dtype=torch.bool)


def _hidden(row: Row) -> Tensor:
    """``[S, S]``; some queries see nothing: SDPA gives zeros."""
    mask = _full(row)
    mask[3::7] = False
    return mask


def _additive(row: Row) -> Tensor:
    """``[B, H, S, S]``, a different one for each head."""
    return torch.randn(row.B, row.H, row.S, row.S, generator=torch.Generator().manual_seed(3)).to(row.dtype)


MASKS = {"padding": _padding, "full": _full, "hidden": _hidden, "additive": _additive}

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
