"""Load code of :mod:`para_core.attention.approximate`, which exact attention imports only if an option needs it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

_APPROXIMATE = "para_core.attention.approximate"


def load_snapkv() -> ModuleType:
    """Return the module :mod:`para_core.attention.approximate.snapkv`, which the option ``kept_keys`` needs."""
    return import_module(f"{_APPROXIMATE}.snapkv")


class WireFormat(Protocol):
    """An encoding of tensors ``[B, H, S, D]`` in the buffer that is sent to other ranks."""

    def row_size(self, head_dim: int) -> int:
        """Return the number of buffer elements that encode one head of one token, a vector of ``head_dim`` elements."""

    def pack(self, tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
        """Return a buffer of ``numel`` elements that contains the encoded ``regions`` of ``tensors``.

        ``regions`` are :class:`CopyRegion` values (what is copied where), flattened to one list of integers.
        """

    def unpack(self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
        """Return tensors of ``dtype`` with the decoded ``regions`` of ``buffer``; the inverse of :meth:`pack`.

        ``sizes`` are B, H, S and D of each tensor, flattened to one list.
        """


def wire_format(comm_dtype: torch.dtype | None) -> WireFormat | None:
    """Return the format that rounds tensors to ``comm_dtype``, or None if ``comm_dtype`` is None."""
    if comm_dtype is None:
        return None
    wire: WireFormat = import_module(f"{_APPROXIMATE}.wire").RoundedWire(comm_dtype)
    return wire
