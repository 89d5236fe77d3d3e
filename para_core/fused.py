"""Triton's kernels, where there are any: every caller has a form of its own for where there are none."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

# What the kernels read and write.
FLOATS = {torch.float32, torch.bfloat16, torch.float16}


@lru_cache
def kernels(name: str) -> ModuleType | None:
    """``para_core.kernels.<name>``; None where Triton cannot be imported. Imported at its first use."""
    try:
        return import_module(f"para_core.kernels.{name}")
    except ImportError:
        return None


def are_floats(*tensors: Tensor) -> bool:
    """Whether kernels take them."""
    return {x.dtype for x in tensors} <= FLOATS
