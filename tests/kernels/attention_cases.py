"""Attention by its formula in float64, and tensors for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

B, H = 2, 2


def make(
    num_queries: int,
    num_keys: int,
    head_dim: int = 16,
    *,
    key_heads: int = H,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int = B,
    heads: int = H,
) -> list[Tensor]:
    """Return query, key and value, ``[B, S, H, D]`` in memory."""
    generator = torch.Generator().manual_seed(num_queries + num_keys + head_dim)
    sizes = [
        (num_queries, heads, head_dim),
        (num_keys, key_heads, head_dim),
        (num_keys, key_heads, head_dim if value_dim is None else value_dim),
    ]
    return [torch.randn(batch, *size, generator=generator).to(dtype).transpose(1, 2) for size in sizes]


def ranges(*of_samples: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(of_samples, dtype=torch.int32)


def by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    key_ranges: Tensor | None = None,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q·kᵀ·scale + mask)·v and the logsumexp, from all scores at once in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        bias = 0.0 if mask.dtype == torch.bool else mask.double().masked_fill(hidden, 0.0)
        # Rows without a key get gradients of 0, and none that are not numbers.
        scores = (scores + bias).masked_fill(hidden, -torch.inf)
    if is_causal:
        for i in range(query.shape[2]):
            scores[:, :, i, max(0, i + query_offset - key_offset + 1) :] = -torch.inf
    if key_ranges is not None:
        for sample in range(query.shape[0]):
            visible = torch.zeros(key.shape[2], dtype=torch.bool)
            for start, end in key_ranges[sample % key_ranges.shape[0]].tolist():
                visible[start:end] = True
            scores[sample, ..., ~visible] = -torch.inf
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ value.repeat_interleave(group, 1), torch.logsumexp(scores, -1)


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def check_lse(actual: Tensor, exact: Tensor, bound: float) -> None:
    """Raise if an element of these logarithms differs by more than ``bound``, or if -inf is in other rows."""
    assert actual.dtype == torch.float32
    finite = exact > -torch.inf
    assert torch.equal(actual > -torch.inf, finite)
    assert ((actual[finite].double() - exact[finite]).abs() <= bound).all()


_generator = torch.Generator().manual_seed(7)
_few = torch.rand(B, 1, 18, 21, generator=_generator) > 0.6
_few[0, :, 3] = False
_bias = torch.randn(1, H, 18, 21, generator=_generator)
_low = torch.zeros(B, 1, 18, 21)
_low[:, :, 2] = torch.finfo(torch.float32).min
_low[:, :, 4, 1:] = torch.finfo(torch.float32).min
_low[:, :, 5] = -torch.inf
# 18 queries and 21 keys are no multiples of a tile.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0, "is_causal": True},
    "causal": {"is_causal": True},
    "causal, later queries": {"is_causal": True, "query_offset": 8, "key_offset": 3},
    "causal, earlier queries": {"is_causal": True, "key_offset": 6},  # The first six queries see no key.
    "bool mask": {"mask": _few},
    "bool mask of keys": {"mask": _few[:, :, :1]},
    "bool mask, causal": {"mask": _few, "is_causal": True, "query_offset": 10},
    "bias": {"mask": _bias},
    "float64 bias": {"mask": _bias.double()},
    "finfo.min": {"mask": _low},
    "nothing but padding": {"key_ranges": ranges([(0, 0)], [(0, 16)])},
    "padded segments": {"key_ranges": ranges([(0, 3), (4, 21)], [(0, 4), (4, 20)])},
    "padded segments, mask": {"key_ranges": ranges([(0, 3), (9, 20)], [(0, 9), (9, 21)]), "mask": _few},
}
