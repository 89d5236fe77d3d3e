"""Loading of Triton kernels, if this machine can run them. Otherwise callers use plain PyTorch.

The kernels are in ``kernels/``, each with a plain reference. Operators load theirs by :func:`load_kernel`:
:mod:`para_core.attention.merge`, ``pack_ops`` and ``swap`` there, :mod:`para_core.cache.residual_operators`,
:mod:`para_core.spatial.norm` and :mod:`para_core.products`. The backends of attention import theirs without
it, and refuse a call instead. Tests: tests/kernels/test_old_gpus.py, tests/test_products.py.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# All kernels support these dtypes, and some support others as well: pack copies tensors of any
# dtype of 1, 2, 4 or 8 bytes.
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
# Triton supports GPUs of this compute capability and newer ones, according to its README. On older GPUs the
# first launch fails to compile, for example for bfloat16.
LEAST_CAPABILITY = (8, 0)
# Look for Triton at import, because Dynamo cannot trace find_spec.
_HAS_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed. Its kernels may still not run here: see :func:`load_kernel`."""
    return _HAS_TRITON


def is_interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, so that they also run on a CPU. Triton must be installed."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@lru_cache
def load_kernel(name: str, device: torch.device | None = None) -> ModuleType | None:
    """Return the module ``para_core.kernels.<name>``, or None if its kernels cannot run here.

    They cannot run if Triton is not installed, if there is no C compiler (which Triton needs for its
    launchers), or if ``device`` is a GPU of CUDA with a compute capability below ``LEAST_CAPABILITY``. Other
    devices are not checked. Callers do not come here with tensors of a CPU, unless Triton's interpreter runs
    the kernels (:func:`is_interpreting`): they dispatch by device, or ask :func:`needs_plain` first. The
    result is cached.

    Args:
        name: Name of the module.
        device: The device on which the kernels will run; None if it is not known yet.

    Raises:
        ImportError: The module imports something that does not exist. Without this error a mistake in a
            kernel's imports would leave every caller with plain PyTorch in silence.
    """
    if not has_triton():
        return None
    if (
        device is not None
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY
    ):
        return None
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return None
    module = f"para_core.kernels.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # The kernel itself may be left out: each is an optional file (tests/lift_out.py).
        if error.name != module:
            raise
        return None


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager inside which Triton launches kernels on the device of ``x``."""
    if x.is_cuda:
        return torch.cuda.device(x.device)
    return nullcontext()


def are_floats(*tensors: Tensor) -> bool:
    """Whether the kernels support the dtype of each tensor."""
    return {x.dtype for x in tensors} <= FLOATS


def needs_plain(*tensors: Tensor) -> bool:
    """Whether to use plain PyTorch instead of a Triton kernel for ``tensors``.

    This is so on every device but CUDA and meta, while a graph is traced (because compilers fuse plain
    operators), and if a gradient is needed. Only the device of the first tensor is looked at.
    """
    if torch.compiler.is_compiling() or not (tensors[0].is_cuda or tensors[0].is_meta):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
