"""The merge of two partial results as one operator: one launch, whatever computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.collectives import LIBRARY
from para_core.kernels import merge_reference

LIBRARY.define("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)")


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    # b weighs exp(lse_b) / (exp(lse_a) + exp(lse_b)); of two rows without a key, -inf - -inf, any weight will do.
    weight = (lse_b - lse_a).sigmoid_().nan_to_num_(0.5).unsqueeze(-1)
    if out_a.dtype != lse_a.dtype:  # even a cast to the same dtype takes as long as an addition of few numbers
        out_a = out_a.to(lse_a.dtype)
    if out_b.dtype != lse_a.dtype:
        out_b = out_b.to(lse_a.dtype)
    return torch.lerp(out_a, out_b, weight), torch.logaddexp(lse_a, lse_b)


LIBRARY.impl("merge", _merge, "CompositeExplicitAutograd")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`para_core.kernels.merge_reference.merge`, with ``out`` in the dtype of lse: what is merged is rounded once, at last."""
    if torch.is_grad_enabled():
        return merge_reference.merge(out_a.to(lse_a.dtype), lse_a, out_b, lse_b)
    merged: tuple[Tensor, Tensor] = torch.ops.para_core.merge.default(out_a, lse_a, out_b, lse_b)
    return merged
