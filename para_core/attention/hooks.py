"""Interfaces by which approximate or sparse attention plugs into the exact path: which keys are seen, and how tensors
are sent.

Options hold values with these methods. :mod:`para_core.attention.approximate` defines them, and is imported when an
option first needs it: exact attention imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from para_core.attention.tiles import VisibleBlocks
from para_core.distributed.layout import SequenceLayout
from para_core.distributed.mesh import SequenceMesh

if TYPE_CHECKING:
    from para_core.attention.ring_plan import RingPlan

_APPROXIMATE = "para_core.attention.approximate"


# -- which keys are seen


class BlockVisibility(VisibleBlocks, Protocol):
    """A block mask: which blocks of queries see which blocks of keys, independent of the tensors of a call."""

    @property
    def fields(self) -> tuple[int | str, ...]:
        """The value as JSON values, from which :func:`read_block_visibility` makes it again."""

    def ring_sees(
        self, query_layout: SequenceLayout, key_layout: SequenceLayout, mesh: SequenceMesh, ring_index: int, source: int
    ) -> bool:
        """Whether a query of ring rank ``ring_index`` sees a sharded key of ring rank ``source``."""

    def check(self, num_queries: int, num_keys: int) -> None:
        """Raise ``ValueError`` unless the mask was made for sequences of these lengths."""


class KeySelection(Protocol):
    """A criterion by which each head keeps some of the keys, depending on the tensors of a call."""

    @property
    def fields(self) -> tuple[float, ...]:
        """The value as JSON values, from which :func:`read_key_selection` makes it again."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        plan: RingPlan,
        *,
        heads: Tensor | None,
        attn_func: Any,
        save: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute :func:`~para_core.attention.ring.ring_attention` over the keys that are kept."""

    def hide(self, query: Tensor, key: Tensor, mask: Tensor | None, plan: RingPlan, *, heads: Tensor | None) -> Tensor:
        """Return ``mask`` with all keys hidden that are not kept, for the backward."""


def read_block_visibility(fields: Sequence[int | str]) -> BlockVisibility:
    blocks: BlockVisibility = import_module(f"{_APPROXIMATE}.block_mask").BlockMask(*fields)
    return blocks


def read_key_selection(fields: Sequence[float]) -> KeySelection:
    selection: KeySelection = import_module(f"{_APPROXIMATE}.kept_keys").KeptKeys(*fields)
    return selection


# -- how tensors are sent


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
