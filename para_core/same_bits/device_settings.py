"""Settings of torch without which the sums of a matrix product depend on its sizes, on a GPU.

:mod:`.call` and :mod:`.image_rows` run calls under them. Tests: tests/same_bits/test_attention.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from para_core.user_warnings import ParallelWarning, warn_user

# With these, cuBLAS has no workspace to add up parts of a sum in, which it else does for some sizes.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
# Each of these settings is a pair: whether to round while adding up, and whether to split sums (allow_splitk).
_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def deterministic_products() -> Iterator[None]:
    """Turn off split sums and timed choices of kernels inside the ``with`` block, on a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    reductions = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in _REDUCTIONS}
    benchmark = cudnn.benchmark
    for name in _REDUCTIONS:
        setattr(matmul, name, (False, False))
    cudnn.benchmark = False
    try:
        yield
    finally:
        for name, setting in reductions.items():
            setattr(matmul, name, setting)
        cudnn.benchmark = benchmark


def check_workspaces() -> None:
    """Warn if cuBLAS may split sums, because the variables of :data:`WORKSPACES` have other values, on a GPU."""
    if not torch.cuda.is_available():
        return
    missing = {name: value for name, value in WORKSPACES.items() if os.environ.get(name) != value}
    if missing:
        settings = " ".join(f"{name}={value}" for name, value in missing.items())
        warn_user(
            f"same_bits=True: cuBLAS may add up a matrix product in parts, whose number depends on its rows. Start the "
            f"process with {settings}; it is read before the first product.",
            ParallelWarning,
        )
