"""Packing and unpacking of exchanged tensors as operators, so that each counts as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import exchange_reference
from para_core.kernels.exchange_reference import CopyRegion
from para_core.triton_support import load_kernel, on_device_of

define_operator("pack(Tensor[] tensors, SymInt[] regions, SymInt numel) -> Tensor")
define_operator("unpack(Tensor buffer, SymInt[] regions, SymInt[] shapes) -> Tensor[]")


def as_numbers(regions: Sequence[CopyRegion]) -> list[int]:
    """Return ``regions`` as integers, the form that operators accept."""
    return list(chain.from_iterable(regions))


@lru_cache(maxsize=256)
def read_regions(numbers: tuple[int, ...]) -> tuple[CopyRegion, ...]:
    """Return the regions from which :func:`as_numbers` made ``numbers``."""
    each = len(CopyRegion._fields)
    return tuple([CopyRegion(*numbers[start : start + each]) for start in range(0, len(numbers), each)])


def pack(tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
    """Run :func:`para_core.kernels.exchange_reference.pack` into a new buffer of ``numel`` elements, which the regions
    must cover.
    """
    return exchange_reference.pack(tensors, read_regions(tuple(regions)), _new_buffer(tensors, regions, numel))


def pack_on_gpu(tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
    fused = load_kernel("exchange", tensors[0].device)
    if fused is None:
        return pack(tensors, regions, numel)
    with on_device_of(tensors[0]):
        packed: Tensor = fused.pack(tensors, read_regions(tuple(regions)), _new_buffer(tensors, regions, numel))
    return packed


def unpack(buffer: Tensor, regions: list[int], shapes: list[int]) -> list[Tensor]:
    """Run :func:`para_core.kernels.exchange_reference.unpack` into new tensors. Elements that no region covers stay
    uninitialised.

    Args:
        shapes: B, H, S, D of each tensor, one after the other. Tensors have the memory layout of SDPA's result,
            ``[B, S, H, D]``.
    """
    return list(exchange_reference.unpack(buffer, read_regions(tuple(regions)), _new_tensors(buffer, regions, shapes)))


def unpack_on_gpu(buffer: Tensor, regions: list[int], shapes: list[int]) -> list[Tensor]:
    fused = load_kernel("exchange", buffer.device)
    if fused is None:
        return unpack(buffer, regions, shapes)
    with on_device_of(buffer):
        return list(fused.unpack(buffer, read_regions(tuple(regions)), _new_tensors(buffer, regions, shapes)))


def _new_buffer(tensors: list[Tensor], _: list[int], numel: int) -> Tensor:
    return tensors[0].new_empty(numel)


def _new_tensors(buffer: Tensor, _: list[int], shapes: list[int]) -> list[Tensor]:
    return new_tensors(buffer, shapes, buffer.dtype)


def new_tensors(buffer: Tensor, shapes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised tensors of these ``shapes`` (see :func:`unpack`) on the device of ``buffer``."""
    each = zip(*[iter(shapes)] * 4, strict=True)
    return [
        buffer.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)
        for batch, heads, tokens, width in each
    ]


LIBRARY.impl("pack", pack, "CompositeExplicitAutograd")
LIBRARY.impl("pack", pack_on_gpu, "CUDA")
LIBRARY.impl("unpack", unpack, "CompositeExplicitAutograd")
LIBRARY.impl("unpack", unpack_on_gpu, "CUDA")
torch.library.register_fake("para_core::pack", _new_buffer, lib=LIBRARY)
torch.library.register_fake("para_core::unpack", _new_tensors, lib=LIBRARY)
