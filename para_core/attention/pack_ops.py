"""Operators that pack tensors into the buffer of an all-to-all, and unpack it, each dispatched as one launch.

They can also round to 8 bits, which is not exact and forward only: a vector ``[D]`` of one token and head is
sent as D + 4 bytes, and the last 4 bytes are its scale.

The formats of :mod:`.wire` and :mod:`.rounding` call the operators; :mod:`.swap` and :mod:`.ring` make the
regions. The kernels are in ``kernels/pack.py``. Tests: tests/kernels/test_pack.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import pack_reference
from para_core.kernels.pack_reference import CopyRegion
from para_core.triton_support import load_kernel, on_device_of

define_operator("pack(Tensor[] tensors, SymInt[] regions, SymInt numel, ScalarType? to=None) -> Tensor")
define_operator(
    "unpack(Tensor buffer, SymInt[] regions, SymInt[] shapes, ScalarType? of=None, ScalarType? dtype=None) -> Tensor[]"
)


def as_numbers(regions: Sequence[CopyRegion]) -> list[int]:
    """Flatten ``regions`` to a list of integers, which operators accept as an argument."""
    return list(chain.from_iterable(regions))


@lru_cache(maxsize=256)
def read_regions(numbers: tuple[int, ...]) -> tuple[CopyRegion, ...]:
    """Undo :func:`as_numbers`: return the regions that ``numbers`` describe."""
    each = len(CopyRegion._fields)
    return tuple([CopyRegion(*numbers[start : start + each]) for start in range(0, len(numbers), each)])


def run_pack(
    tensors: list[Tensor],
    regions: list[int],
    numel: int,
    to: torch.dtype | None = None,
    *,
    kernels: ModuleType = pack_reference,
) -> Tensor:
    """Copy ``regions`` of ``tensors`` into a new buffer, whose ``numel`` elements they must cover.

    See :func:`para_core.kernels.pack_reference.pack`. ``regions`` are integers from :func:`as_numbers`. With
    ``to``, an 8-bit dtype, tensors are rounded (not exact) and the buffer holds bytes. ``kernels`` is the
    module whose ``pack`` is called: the Triton kernels, or their references in PyTorch.
    """
    buffer = _new_buffer(tensors, regions, numel, to)
    packed: Tensor = kernels.pack(tensors, read_regions(tuple(regions)), buffer, to)
    return packed


def pack_on_gpu(tensors: list[Tensor], *arguments: Any) -> Tensor:
    """Run :func:`run_pack` by the Triton kernel, if it can run on the device of ``tensors``."""
    with on_device_of(tensors[0]):
        return run_pack(tensors, *arguments, kernels=_kernels(tensors[0].device))


def run_unpack(
    buffer: Tensor,
    regions: list[int],
    shapes: list[int],
    of: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    *,
    kernels: ModuleType = pack_reference,
) -> list[Tensor]:
    """Copy ``regions`` of ``buffer`` into new tensors. Elements that no region covers stay uninitialised.

    ``shapes`` are B, H, S and D of each tensor, in one list. Tensors get the memory layout of SDPA's result,
    ``[B, S, H, D]``. For a rounded buffer, ``of`` is its 8-bit dtype and ``dtype`` that of the new tensors.
    The other arguments are those of :func:`run_pack`.
    """
    tensors = _new_tensors(buffer, regions, shapes, of, dtype)
    return list(kernels.unpack(buffer, read_regions(tuple(regions)), tensors, of))


def unpack_on_gpu(buffer: Tensor, *arguments: Any) -> list[Tensor]:
    """Run :func:`run_unpack` by the Triton kernel, if it can run on the device of ``buffer``."""
    with on_device_of(buffer):
        return run_unpack(buffer, *arguments, kernels=_kernels(buffer.device))


def _kernels(device: torch.device) -> ModuleType:
    return load_kernel("pack", device) or pack_reference


# The next two functions are also the operators' kernels for fake tensors, so they have the operators'
# arguments.


def _new_buffer(tensors: list[Tensor], _: list[int], numel: int, to: torch.dtype | None = None) -> Tensor:
    if to is None:
        return tensors[0].new_empty(numel)
    return tensors[0].new_empty(numel, dtype=torch.uint8)


def _new_tensors(
    buffer: Tensor,
    _: list[int],
    shapes: list[int],
    __: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    each = zip(*[iter(shapes)] * 4, strict=True)
    return [
        buffer.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)
        for batch, heads, tokens, width in each
    ]


for name, function, on_gpu, fake in (
    ("pack", run_pack, pack_on_gpu, _new_buffer),
    ("unpack", run_unpack, unpack_on_gpu, _new_tensors),
):
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    LIBRARY.impl(name, on_gpu, "CUDA")
    torch.library.register_fake(f"para_core::{name}", fake, lib=LIBRARY)
