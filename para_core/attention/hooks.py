"""Code of :mod:`para_core.attention.approximate` that exact attention loads only when an option needs it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

_APPROXIMATE = "para_core.attention.approximate"


def load_snapkv() -> ModuleType:
    """Return the module that computes attention to the keys that :class:`KeptKeys` keeps."""
    return import_module(f"{_APPROXIMATE}.snapkv")


class WireFormat(Protocol):
    """An encoding of tensors in the buffer that is sent."""

    def row_size(self, head_dim: int) -> int:
        """Return the number of buffer elements per token and head."""

    def pack(self, tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
        """Return a buffer of ``numel`` elements with the encoded ``regions`` of the tensors (see
        :class:`CopyRegion`).
        """

    def unpack(self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
        """Return tensors of ``dtype`` and ``sizes`` (B, H, S, D of each) with the decoded ``regions`` of a buffer."""


def wire_format(comm_dtype: torch.dtype | None) -> WireFormat | None:
    """Return the format that rounds to ``comm_dtype``; None for None, if tensors are sent unchanged."""
    if comm_dtype is None:
        return None
    wire: WireFormat = import_module(f"{_APPROXIMATE}.wire").RoundedWire(comm_dtype)
    return wire
