"""The exchange in 8 bits: tensors are rounded for sending.
Not exact, and only in calls that require no gradient.

It is the option ``comm_dtype``. The rounding itself is in the operators of :mod:`.pack_ops`, the format that
rounds nothing in :mod:`.wire`. Tests: tests/attention/approximate/test_wire.py, and
tests/kernels/test_pack.py for its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from para_core.attention.option import AttentionOption
from para_core.attention.wire import Wire
from para_core.kernels.pack_reference import SCALE_BYTES
from para_core.option_values import RING_STYLES

# The 8-bit dtypes, by their names in the JSON form of the options.
_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class RoundedWire(Wire):
    """The format of 8 bits: a vector ``[D]`` of one token and head is sent as D + 4 bytes, the last 4 its scale."""

    row_padding = SCALE_BYTES
    needs_regions = True

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self._wire_dtype = wire_dtype

    def pack(self, tensors: Sequence[Tensor], regions: list[int], numel: int) -> Tensor:
        """Round ``regions`` of ``tensors`` into a new buffer of ``numel`` bytes."""
        packed: Tensor = torch.ops.para_core.pack.default(list(tensors), regions, numel, self._wire_dtype)
        return packed

    def unpack(
        self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """Restore ``regions`` of a flat buffer to new tensors of ``dtype``; see :meth:`Wire.unpack`."""
        tensors: Sequence[Tensor] = torch.ops.para_core.unpack.default(
            buffer, regions, sizes, self._wire_dtype, dtype
        )
        return tensors


_WIRES = {name: RoundedWire(dtype) for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Rounding(AttentionOption):
    """The value of the option ``comm_dtype``, by the name of the dtype."""

    name: str

    option = "comm_dtype"
    has_gradient = False

    @classmethod
    def read(cls, value: Any) -> Self:
        """Return the option for an 8-bit dtype.

        Raises:
            ValueError: It is another value.
        """
        for name, dtype in _DTYPES.items():
            if value == dtype:
                return cls(name)
        expected = " or ".join(map(str, _DTYPES.values()))
        raise ValueError(f"comm_dtype is {value}; expected {expected}, or None for exact attention.")

    @property
    def fields(self) -> tuple[Any, ...]:
        """The arguments of the constructor, for the JSON form of the options."""
        return (self.name,)

    @property
    def record(self) -> object:
        """The dtype, which ranks compare."""
        return str(_DTYPES[self.name])

    @property
    def wire(self) -> Wire:  # type: ignore[override]
        """The format of the exchange."""
        return _WIRES[self.name]

    def check_method(self, rotate_method: str) -> None:
        """Raise ``ValueError`` if ``rotate_method`` sends tensors as they are only."""
        if not RING_STYLES[rotate_method].takes_wire:
            raise ValueError(
                f"rotate_method={rotate_method!r} sends tensors as they are, and comm_dtype is {self.record}. Leave "
                "comm_dtype out, or take rotate_method='alltoall'."
            )
