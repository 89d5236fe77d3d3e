"""Exact attention by the Triton kernel of :mod:`para_core.kernels.attention`."""

from __future__ import annotations

import torch

from para_core.attention.backends.triton_backend import KernelFunction, triton_backend


def import_exact_attention() -> KernelFunction:
    """Return the kernel's function. Triton must be installed."""
    from para_core.kernels.attention import attention

    return attention


BACKEND = triton_backend(
    import_exact_attention,
    {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32},
    launches={"para_core::triton_attention": 1},
)
