"""Modes under which a query sees a part of the keys: blocks that a user names, or keys that a criterion keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.distributed.mesh import SequenceMesh
from para_core.modes.unified import UnifiedAttnMode


class BlockSparseAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` in which query i sees key j only where ``block_mask[i // block_size, j // block_size]``
    is True.

    Positions are those in the whole sequence, whatever rank holds them: the result is that of one device with the mask
    written out for every token. ``attn_mask`` and ``is_causal`` of a call hold in addition; a query that sees nothing
    gives zeros. Blocks that are not seen are not computed, and what no token of a ring rank sees is not sent to it.
    Ulysses trades heads of all tokens as ever.

    Args:
        mesh: see :class:`UnifiedAttnMode`.
        block_mask: bool ``[blocks of queries, blocks of keys]``, alike for all heads and samples. On one rank, too, it
            needs as many blocks as every attention call inside has; use :meth:`disable` around calls that it is not
            meant for.
        block_size: tokens per block, or ``(of queries, of keys)``; the last block may be shorter.
        options: as of :class:`UnifiedAttnMode`.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        block_mask: Tensor,
        *,
        block_size: int | tuple[int, int],
        **options: Any,
    ) -> None:
        from para_core.attention.approximate.block_mask import read_block_mask  # Only for users of this mode.

        super().__init__(mesh, block_mask=read_block_mask(block_mask, block_size), **options)


class SparseKVAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` in which each head attends to a share of the keys, those that observed queries attend to
    most.

    The criterion is SnapKV's (Li et al. 2024, arXiv:2404.14469). For each sample and query head:

    1. ``window`` queries are observed, evenly spread: the middles of ``window`` equal parts of the sequence (all, if it
    is not longer).
    2. The vote of a key is the sum of its attention weights (softmax over all keys that mask and ``is_causal`` show)
    over these.
    3. The ``ceil(share * S_k)`` keys with most votes are kept, of equal ones the earlier.

    The result is that of one device with all other keys masked out, on any mesh. In a ring only kept keys and values
    travel.

    Args:
        mesh: see :class:`UnifiedAttnMode`.
        share: of the keys, 0 < share <= 1.
        window: observed queries.
        options: as of :class:`UnifiedAttnMode`.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        *,
        share: float,
        window: int = 64,
        **options: Any,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share!r}; expected the share of the keys to keep, 0 < share <= 1.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window is {window!r}; expected a positive number of observed queries.")
        from para_core.attention.approximate.kept_keys import KeptKeys  # Only for users of this mode.

        super().__init__(mesh, kept_keys=KeptKeys(float(share), window), **options)
