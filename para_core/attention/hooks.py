"""The two places where attention that is not exact, or not to all keys, enters the exact path: which keys are seen, and how tensors travel.

Values with these methods are passed in as options. The modules of :mod:`para_core.attention.approximate`, which define them, are imported
when an option first asks for one: exact attention runs without them.
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
    """Blocks of queries that see blocks of keys: known before any tensor is."""

    @property
    def fields(self) -> tuple[int | str, ...]:
        """All of it as JSON values, which :func:`read_block_visibility` takes."""

    def ring_sees(
        self, query_layout: SequenceLayout, key_layout: SequenceLayout, mesh: SequenceMesh, ring_index: int, source: int
    ) -> bool:
        """Whether a ring rank sees a key that travels in the block of the ring rank ``source``."""

    def check(self, num_queries: int, num_keys: int) -> None:
        """Raise ``ValueError`` unless it is for as many tokens."""


class KeySelection(Protocol):
    """A criterion by which each head keeps some of the keys: it depends on the tensors of a call."""

    @property
    def fields(self) -> tuple[float, ...]:
        """All of it as JSON values, which :func:`read_key_selection` takes."""

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
        """Return ``mask`` with all keys hidden that are not kept, for a gradient."""


def read_block_visibility(fields: Sequence[int | str]) -> BlockVisibility:
    blocks: BlockVisibility = import_module(f"{_APPROXIMATE}.block_mask").BlockMask(*fields)
    return blocks


def read_key_selection(fields: Sequence[float]) -> KeySelection:
    selection: KeySelection = import_module(f"{_APPROXIMATE}.kept_keys").KeptKeys(*fields)
    return selection


# -- how tensors travel


class WireFormat(Protocol):
    """A form in which tensors travel instead of their own, in a buffer of bytes."""

    def row_size(self, head_dim: int) -> int:
        """Elements of the buffer for a token and head."""

    def pack(self, tensors: list[Tensor], regions: list[int], numel: int) -> Tensor:
        """Return a buffer of ``numel`` elements, filled with the regions (numbers of :class:`CopyRegion`) of the tensors."""

    def unpack(self, buffer: Tensor, regions: list[int], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
        """Return tensors of ``sizes`` (B, H, S, D of each) and ``dtype``, filled with the regions of a buffer."""


def wire_format(comm_dtype: torch.dtype | None) -> WireFormat | None:
    """Return the format that rounds to ``comm_dtype``; None: tensors travel as they are."""
    if comm_dtype is None:
        return None
    wire: WireFormat = import_module(f"{_APPROXIMATE}.wire").RoundedWire(comm_dtype)
    return wire
