"""The option ``comm_dtype``: send tensors in 8 bits, with one scale per token and head. Not exact; forward only.

A vector ``[D]`` of one token and head is sent as D + 4 bytes (:mod:`para_core.kernels.exchange_reference`). With
Triton, one kernel launch rounds and packs the tensors for all ranks, and one unpacks them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.pack_ops import register
from para_core.distributed.collectives import define_operator
from para_core.kernels.exchange_reference import SCALE_BYTES

define_operator("pack_8_bits(Tensor[] tensors, SymInt[] regions, SymInt numel, ScalarType to) -> Tensor")
define_operator(
    "unpack_8_bits(Tensor buffer, SymInt[] regions, SymInt[] shapes, ScalarType of, ScalarType dtype) -> Tensor[]"
)
register("pack_8_bits", "unpack_8_bits")


@dataclass(frozen=True)
class RoundedWire:
    """A wire format for attention (:class:`~para_core.attention.hooks.WireFormat`) that sends values as 8-bit
    ``dtype``.

    Each vector of one token and head is scaled before it is rounded, and sent with its scale.
    """

    dtype: torch.dtype

    def row_size(self, head_dim: int) -> int:
        """Return the number of bytes sent per token and head: one per value, and 4 for the scale."""
        return head_dim + SCALE_BYTES

    def pack(self, tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
        packed: Tensor = torch.ops.para_core.pack_8_bits.default(tensors, regions, numel, self.dtype)
        return packed

    def unpack(self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
        tensors: list[Tensor] = torch.ops.para_core.unpack_8_bits.default(buffer, regions, sizes, self.dtype, dtype)
        return tensors
