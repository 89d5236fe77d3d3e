"""Reference of merging partial attention results, in plain PyTorch. Tests: tests/kernels/test_small_kernels.py."""

import torch
from torch import Tensor


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    Online softmax (arXiv:1805.02867): with ``lse = logaddexp(lse_a, lse_b)``, each side is weighted by
    ``exp(lse_side - lse)``, computed relative to the larger lse so that nothing overflows. The weighted sum
    is taken in float32 or float64 and rounded once, to the dtype of ``out_a``. Differentiable in all four
    arguments; a row without a key has gradient zero.

    Args:
        out_a, out_b: ``[B, H, S_q, D]``, any float dtype; finite also in rows that saw no key.
        lse_a, lse_b: ``[B, H, S_q]``, natural log, float32 (or float64); -inf for a row that saw no key.
        into: ``(out, lse)`` to which the result is written, in the dtypes of these tensors, without gradient;
            may be ``(out_a, lse_a)``. None allocates the result.

    Returns:
        ``out`` like ``out_a`` and ``lse`` like ``lse_a``; or ``into``. A row without a key on either side
        gives 0 and -inf.

    >>> one, two = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 2.0)
    >>> out, lse = merge(one, torch.zeros(1, 1, 1), two, torch.full((1, 1, 1), 3.0).log())  # one key against three
    >>> round(out.item(), 4), round(lse.exp().item(), 4)
    (1.75, 4.0)
    """
    # The maximum is detached: out and lse do not depend on this reference point, so its gradient is zero.
    peak = torch.maximum(lse_a, lse_b).detach()
    # -inf minus -inf, and the gradient of log(0), are NaN, so give rows without a key finite numbers; their
    # result is set below.
    empty = peak == float("-inf")
    peak = peak.masked_fill(empty, 0.0)
    weight_a = torch.exp(lse_a - peak)
    weight_b = torch.exp(lse_b - peak)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    # The weights are float32, so a bfloat16 operand is promoted and the sum is float32 too.
    out = (weight_a / total)[..., None] * out_a + (weight_b / total)[..., None] * out_b
    lse = (peak + torch.log(total)).masked_fill(empty, float("-inf"))
    if into is not None:
        return into[0].copy_(out), into[1].copy_(lse)
    return out.to(out_a.dtype), lse
