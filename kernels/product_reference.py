"""Reference, in plain PyTorch: the product of rows with a matrix. Only tests/kernels/test_product.py calls it."""

from __future__ import annotations

import torch
from torch import Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, computed in float32 and rounded once, as by
    ``torch.nn.functional.linear``.

    The bits of the reference are those of a CPU's library, and may depend on the number of rows. Those of the
    kernel do not.

    Args:
        x: ``[..., K]``; dims and K may be 0.
        weight: ``[N, K]``, in the dtype of ``x``.
        bias: ``[N]``, in the dtype of ``x``; None for none.

    Returns:
        ``[..., N]``, contiguous, in the dtype of ``x``.

    >>> product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5])).tolist()
    [[11.5]]
    """
    wide = x.dtype if x.itemsize > 2 else torch.float32
    out = x.to(wide) @ weight.to(wide).mT
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).contiguous()
