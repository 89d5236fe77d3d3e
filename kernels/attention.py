"""Attention forward in Triton for sm_80 and later, which can continue a partial result.

The kernel is in :mod:`para_core.kernels.attention_kernel`.

The reference is :mod:`para_core.kernels.attention_reference`. The caller is the backend "triton"
(``para_core/attention/backends/triton_exact.py``), which also checks the device. Tests:
tests/kernels/test_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.kernels.attention_configs import KernelCall, config_for
from para_core.kernels.attention_launch import check_tensors, empty_outputs, launch_kernel, register


def attention(
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
    so_far: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`para_core.kernels.attention_reference.attention` in one launch, without a gradient.

    The dtypes are float16, bfloat16 and float32, head dims at most 256. Query, key and value are copied only
    if the stride of their last dim is not 1, or their tokens are 2²⁴ elements apart. ``out`` and ``lse`` can
    be passed to the backward of PyTorch's own kernels.

    Raises:
        TypeError: If the dtypes differ or are not supported.
        ValueError: If the shapes of query, key, value and mask do not fit, or a head dim is too large.
    """
    check_tensors(query, key, value, mask)
    out_so_far, lse_so_far = so_far or (None, None)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    outputs: tuple[Tensor, Tensor] = torch.ops.para_core.triton_attention.default(
        query,
        key,
        value,
        mask,
        key_ranges,
        out_so_far,
        lse_so_far,
        is_causal,
        query_offset - key_offset,
        scale,
        out_dtype or query.dtype,
    )
    return outputs


def _launch_exact(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator. Its arguments are the fields of :class:`KernelCall` in their order, then ``out_dtype``."""
    call, out_dtype = KernelCall(*arguments[:-1]), arguments[-1]
    out, lse = empty_outputs(call.query, call.value, out_dtype)
    launch_kernel(config_for(call), call, out=out, lse=lse)
    return out, lse


register("triton_attention", _launch_exact)
