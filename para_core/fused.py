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


@lru_cache
def kernels(name: str) -> ModuleType | None:
    """``para_core.kernels.<name>``, imported at its first use; None where Triton cannot be, or lacks a C compiler to launch with."""
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
