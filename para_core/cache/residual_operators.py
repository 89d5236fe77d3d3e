"""Operators that compare and add residuals: Triton kernels on a GPU, plain PyTorch elsewhere and in graphs.

The references in :mod:`para_core.kernels.residual_reference` say what they compute. :mod:`.rules` compares by
:func:`change`, and :mod:`.residuals` adds by :func:`forecast`. Tests: tests/kernels/test_small_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import residual_reference
from para_core.triton_support import are_floats, load_kernel, needs_plain, on_device_of

define_operator("residual_change(Tensor now, Tensor before) -> Tensor")
define_operator("forecast(Tensor entry, Tensor[] residuals, float[] weights) -> Tensor")


def change_on_gpu(now: Tensor, before: Tensor) -> Tensor:
    """Return the result of :func:`change`, by the Triton kernel if it can run here and supports the dtypes."""
    fused = load_kernel("residual", now.device)
    if fused is None or not are_floats(now, before):
        return residual_reference.change(now, before)
    with on_device_of(now):
        sums: Tensor = fused.change(now, before)
    return sums


def forecast_on_gpu(entry: Tensor, residuals: list[Tensor], weights: list[float]) -> Tensor:
    """Return the result of :func:`forecast`, by the Triton kernel if it can run here and supports the dtypes."""
    fused = load_kernel("residual", entry.device)
    if fused is None or not are_floats(entry, *residuals) or len(residuals) > fused.MOST_RESIDUALS:
        return residual_reference.forecast(entry, residuals, weights)
    with on_device_of(entry):
        output: Tensor = fused.forecast(entry, residuals, weights)
    return output


LIBRARY.impl("residual_change", residual_reference.change, "CompositeExplicitAutograd")
LIBRARY.impl("residual_change", change_on_gpu, "CUDA")
LIBRARY.impl("forecast", residual_reference.forecast, "CompositeExplicitAutograd")
LIBRARY.impl("forecast", forecast_on_gpu, "CUDA")
torch.library.register_fake(
    "para_core::residual_change",
    lambda now, _: now.new_empty(now.shape[0], 2, dtype=torch.float32),
    lib=LIBRARY,
)
torch.library.register_fake("para_core::forecast", lambda entry, *_: torch.empty_like(entry), lib=LIBRARY)


def change(now: Tensor, before: Tensor) -> Tensor:
    """Return ``[B, 2]`` sums that compare ``now`` with ``before``, as :func:`residual_reference.change` does."""
    if needs_plain(now, before):
        return residual_reference.change(now, before)
    sums: Tensor = torch.ops.para_core.residual_change.default(now, before)
    return sums


def forecast(entry: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return ``entry`` plus the weighted sum of ``residuals``, as :func:`residual_reference.forecast` does."""
    if needs_plain(entry, *residuals):
        return residual_reference.forecast(entry, residuals, weights)
    output: Tensor = torch.ops.para_core.forecast.default(entry, list(residuals), list(weights))
    return output
