"""Triton's kernels, where there are any: every caller has a form of its own for where there are none."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# What the kernels read and write.
FLOATS = {torch.float32, torch.bfloat16, torch.float16}


# Of the GPUs that Triton compiles for (its README). On older ones bfloat16, among other things, fails to compile at the first launch.
LEAST_CAPABILITY = (8, 0)


@lru_cache
def load_kernel(name: str, device: torch.device | None = None) -> ModuleType | None:
    """Return ``para_core.kernels.<name>``, imported at its first use.

    Args:
        name: of the module.
        device: that the kernels are to run on, or None if they are not launched yet. It is asked once for what it is.

    Returns:
        The module. None if Triton cannot be imported or lacks a C compiler to launch with, or if the device is older than
        ``LEAST_CAPABILITY``: the caller then takes its plain PyTorch form.
    """
    if device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return None
    try:
        return import_module(f"para_core.kernels.{name}")
    except ImportError:
        return None


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, Triton launches where ``x`` is: else on the current device, whose memory it may not be."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def are_floats(*tensors: Tensor) -> bool:
    """Whether kernels take them."""
    return {x.dtype for x in tensors} <= FLOATS
