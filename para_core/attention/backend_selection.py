"""Check the backend of local attention that a user named, and ask PyTorch for its choice if none was named.

:mod:`.mesh_attention` calls :func:`check_some_backend` when it plans a call, and :func:`computes_in_float32` in
each call that requires a gradient; :mod:`.local` calls :func:`check_backend` when it computes one. Tests:
tests/attention/test_backend_selection.py, and test_gradients.py for :func:`computes_in_float32`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from para_core.attention.backends.added import ADDED
from para_core.attention.backends.library import check_mask_and_lengths
from para_core.attention.backends.pytorch import MATH, SWITCHES, choose_backend, no_backend
from para_core.attention.local_call import LocalAttentionCall
from para_core.option_values import Backend
from para_core.torch_internals import math_sdp_enabled

_OF_CUDA = ("efficient", "cudnn")  # PyTorch does not have these backends on a CPU.


def check_backend(
    backend: Backend, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool = False
) -> None:
    """Raise unless the named ``backend`` computes a call.

    Args:
        query, value: Tensors of the call. Only dtype, head dims, device and, if it is causal, lengths matter.
        masked: Whether the call has a mask.
        is_causal: Whether the call is causal.

    Raises:
        RuntimeError: The backend is disabled, not installed or does not support the call.
    """
    if backend in ADDED:
        ADDED[backend].check(backend, query, value, masked=masked, is_causal=is_causal)
    elif not SWITCHES[backend]():
        raise RuntimeError(
            f"backend={backend!r} is switched off by sdpa_kernel(...) or torch.backends.cuda.enable_*_sdp(...). Switch "
            "it on, or name another one."
        )
    elif query.is_cpu and backend in _OF_CUDA:
        raise RuntimeError(
            f'backend="{backend}" needs a CUDA device, and query is on the CPU. Name another backend, or none.'
        )
    elif backend == "flash" and query.shape[-1] != value.shape[-1]:
        raise RuntimeError(
            f"backend='flash' takes a query and a value of the same head dim; these have {query.shape[-1]} and "
            f"{value.shape[-1]}. Name another backend, or none."
        )
    elif backend == "flash" and not query.is_cpu:
        # PyTorch's FlashAttention operator on CUDA would silently compute these calls wrongly: it has no
        # argument for a mask (see transformers/cuda/sdp_utils.cpp, check_flash_causal_non_square_seqlens).
        check_mask_and_lengths(backend, query, value, masked=masked, is_causal=is_causal)


def check_some_backend(
    query: Tensor, value: Tensor, *, mask: Tensor | None = None, backend: Backend | None = None
) -> None:
    """Raise ``RuntimeError`` unless the named backend, if any, and an enabled backend of SDPA can compute a
    call.

    The decision does not depend on the numbers of tokens and heads, so it is the same on a rank that has
    nothing to compute. SDPA is asked only if the math backend is disabled.
    """
    if backend is not None:
        check_backend(backend, query, value, masked=mask is not None)
    if not math_sdp_enabled() and _choice_of_pytorch(query, value, mask) is None:
        raise no_backend(query, value, mask)


def computes_in_float32(query: Tensor, value: Tensor, mask: Tensor | None, backend: Backend | None) -> bool:
    """Whether a float16 or bfloat16 call uses the math backend, which computes it and its gradient in
    float32.

    The decision does not depend on lengths, so it is the same on every rank. Source:
    transformers/attention.cpp, ``_scaled_dot_product_attention_math``.
    """
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if backend is not None:
        return backend == "math"
    return (mask is not None and mask.requires_grad) or _choice_of_pytorch(query, value, mask) == MATH


def _choice_of_pytorch(query: Tensor, value: Tensor, mask: Tensor | None) -> int | None:
    """Return the ``SDPBackend`` value that SDPA would choose for a small call of this kind; None if no backend can."""
    enabled = tuple([is_enabled() for is_enabled in SWITCHES.values()])
    mask_dtype = None
    if mask is not None:
        mask_dtype = mask.dtype
    choice: int | None = _constant_choice(
        query.dtype, query.device, query.shape[-1], value.shape[-1], mask_dtype, enabled
    )
    return choice


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_choice(*question: Any) -> int | None:
    # Dynamo cannot trace SDPA's choice, so it treats the result as a constant. This function only forwards
    # its arguments: Dynamo would ignore assume_constant_result on a function that lru_cache wraps.
    return _cached_choice(*question)


@lru_cache(maxsize=256)
def _cached_choice(
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    value_dim: int,
    mask_dtype: torch.dtype | None,
    enabled: tuple[bool, ...],
) -> int | None:
    """Compute the result of :func:`_choice_of_pytorch`.

    ``enabled`` only distinguishes cache entries: SDPA reads the switches itself. It also reads the order of
    ``sdpa_kernel(..., set_priority=True)``; a later change of that order is not noticed here.
    """
    query, value = (torch.empty(1, 1, 2, size, dtype=dtype, device=device) for size in (head_dim, value_dim))
    mask = None
    if mask_dtype is not None:
        mask = torch.zeros(1, 1, 2, 2, dtype=mask_dtype, device=device)
    try:
        return choose_backend(LocalAttentionCall(query, query, value, mask).fold())
    except RuntimeError:
        return None
