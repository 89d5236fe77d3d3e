"""Attention with 8-bit queries and keys by :mod:`para_core.kernels.attention_int8`. **Not exact**."""

from __future__ import annotations

import torch

from para_core.attention.backends.triton_backend import KernelFunction, triton_backend


def import_int8_attention() -> KernelFunction:
    """Return the kernel's function. Triton must be installed."""
    from para_core.kernels.attention_int8 import attention

    return attention


BACKEND = triton_backend(
    import_int8_attention,
    {"float16": torch.float16, "bfloat16": torch.bfloat16},
    # The mean of the keys, their rounding, and the attention kernel.
    launches={"para_core::triton_attention_int8": 3},
)
