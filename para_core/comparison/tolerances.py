"""The largest relative errors ‖out − ref‖ / ‖ref‖ that rounding explains."""

from __future__ import annotations

import torch
from torch import nn

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the tolerance for a model that computes in ``dtype``. Other dtypes count as float32."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


def compute_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which ``module`` computes now: that of autocast, or of most of its floating-point
    weights.

    Some models keep a few weights in float32, and one of these may be the first: Wan's ``scale_shift_table``.
    """
    weights = [x for x in module.parameters() if x.is_floating_point()]
    device_type = weights[0].device.type if weights else "cpu"
    # Offloaded weights may be on the meta device, which has no autocast: to ask whether it is enabled would
    # raise.
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    numbers: dict[torch.dtype, int] = {}
    for weight in weights:
        numbers[weight.dtype] = numbers.get(weight.dtype, 0) + weight.numel()
    return max(numbers, key=numbers.__getitem__, default=torch.get_default_dtype())
