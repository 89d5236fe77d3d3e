"""The largest relative errors ‖out − ref‖ / ‖ref‖ that rounding explains."""

from __future__ import annotations

import torch

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the tolerance for a model that computes in ``dtype``. Other dtypes count as float32."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])
