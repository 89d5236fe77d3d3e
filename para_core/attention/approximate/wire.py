"""``comm_dtype``: tensors are sent in 8 bits, with a scale per token and head. Not exact; forward only.

Each token and head, ``[D]``, is D + 4 bytes (:mod:`para_core.kernels.exchange_reference`). With Triton, rounding and
packing is one launch, and unpacking is one launch, for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.pack_ops import new_tensors, read_regions
from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import exchange_reference
from para_core.kernels.exchange_reference import SCALE_BYTES
from para_core.triton_support import load_kernel, on_device_of

define_operator("pack_8_bits(Tensor[] tensors, SymInt[] regions, SymInt numel, ScalarType to) -> Tensor")
define_operator(
    "unpack_8_bits(Tensor buffer, SymInt[] regions, SymInt[] shapes, ScalarType of, ScalarType dtype) -> Tensor[]"
)


def pack(tensors: list[Tensor], regions: list[int], numel: int, to: torch.dtype) -> Tensor:
    """Run :func:`para_core.kernels.exchange_reference.pack_rounded` into a new buffer of ``numel`` bytes, which the
    regions must cover.
    """
    buffer = _new_buffer(tensors, regions, numel, to)
    return exchange_reference.pack_rounded(tensors, read_regions(tuple(regions)), buffer, to)


def pack_on_gpu(tensors: list[Tensor], regions: list[int], numel: int, to: torch.dtype) -> Tensor:
    fused = load_kernel("exchange", tensors[0].device)
    if fused is None:
        return pack(tensors, regions, numel, to)
    buffer = _new_buffer(tensors, regions, numel, to)
    with on_device_of(buffer):
        packed: Tensor = fused.pack_rounded(tensors, read_regions(tuple(regions)), buffer, to)
    return packed


def unpack(buffer: Tensor, regions: list[int], shapes: list[int], of: torch.dtype, dtype: torch.dtype) -> list[Tensor]:
    """Run :func:`para_core.kernels.exchange_reference.unpack_rounded` into new tensors, which the regions must cover.

    Args:
        shapes: As in :func:`para_core.attention.pack_ops.unpack`.
        dtype: Dtype of the new tensors.
    """
    into = _new_tensors(buffer, regions, shapes, of, dtype)
    return list(exchange_reference.unpack_rounded(buffer, read_regions(tuple(regions)), into, of))


def unpack_on_gpu(
    buffer: Tensor, regions: list[int], shapes: list[int], of: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    fused = load_kernel("exchange", buffer.device)
    if fused is None:
        return unpack(buffer, regions, shapes, of, dtype)
    into = _new_tensors(buffer, regions, shapes, of, dtype)
    with on_device_of(buffer):
        return list(fused.unpack_rounded(buffer, read_regions(tuple(regions)), into, of))


def _new_buffer(tensors: list[Tensor], _: list[int], numel: int, __: torch.dtype) -> Tensor:
    return tensors[0].new_empty(numel, dtype=torch.uint8)


def _new_tensors(buffer: Tensor, _: list[int], shapes: list[int], __: torch.dtype, dtype: torch.dtype) -> list[Tensor]:
    return new_tensors(buffer, shapes, dtype)


LIBRARY.impl("pack_8_bits", pack, "CompositeExplicitAutograd")
LIBRARY.impl("pack_8_bits", pack_on_gpu, "CUDA")
LIBRARY.impl("unpack_8_bits", unpack, "CompositeExplicitAutograd")
LIBRARY.impl("unpack_8_bits", unpack_on_gpu, "CUDA")
torch.library.register_fake("para_core::pack_8_bits", _new_buffer, lib=LIBRARY)
torch.library.register_fake("para_core::unpack_8_bits", _new_tensors, lib=LIBRARY)


@dataclass(frozen=True)
class RoundedWire:
    """A :class:`~para_core.attention.hooks.WireFormat` that rounds to ``dtype``, with a scale per token and head."""

    dtype: torch.dtype

    def row_size(self, head_dim: int) -> int:
        """Return the number of bytes per token and head."""
        return head_dim + SCALE_BYTES

    def pack(self, tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
        packed: Tensor = torch.ops.para_core.pack_8_bits.default(tensors, regions, numel, self.dtype)
        return packed

    def unpack(self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
        tensors: list[Tensor] = torch.ops.para_core.unpack_8_bits.default(buffer, regions, sizes, self.dtype, dtype)
        return tensors
