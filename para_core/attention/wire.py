"""The format in which tensors are sent, by :mod:`.swap` and :mod:`.ring`. An option of attention may bring
another one (:mod:`.rounding`). Tests: tests/attention/approximate/test_wire.py and tests/kernels/test_pack.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# It defines the operators that pack and unpack.
import para_core.attention.pack_ops  # noqa: F401


class Wire:
    """The usual format: tensors are sent as they are. Others derive from it.

    Attributes:
        row_padding: Number of elements that are sent in addition for each vector of one token and head.
        needs_regions: Whether tensors must be packed by :meth:`pack` and :meth:`unpack`. Otherwise a
            concatenation or a view of them is as good, which takes fewer launches without a kernel.
    """

    row_padding = 0
    needs_regions = False

    def pack(self, tensors: Sequence[Tensor], regions: list[int], numel: int) -> Tensor:
        """Copy ``regions`` of ``tensors`` to a new buffer of ``numel`` elements."""
        packed: Tensor = torch.ops.para_core.pack.default(list(tensors), regions, numel, None)
        return packed

    def unpack(
        self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """Copy ``regions`` of a flat buffer to new tensors of ``dtype``.

        ``sizes`` are B, H, S and D of each tensor, in one list.
        """
        tensors: Sequence[Tensor] = torch.ops.para_core.unpack.default(buffer, regions, sizes, None, dtype)
        return tensors


AS_IT_IS = Wire()
