"""A mode with a block-sparse mask. Its attention is :mod:`para_core.attention.block_sparse`, tests are
tests/attention/test_block_sparse.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.block_sparse import read_block_mask
from para_core.distributed.mesh import SequenceMesh
from para_core.modes.unified import UnifiedAttnMode


class BlockSparseAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` with a block-sparse mask.

    Query i sees key j only if ``block_mask[i // block_size, j // block_size]`` is True, with positions in the
    whole sequence. The result equals the result on one device with the mask expanded to all tokens.
    ``attn_mask`` and ``is_causal`` of a call apply in addition. A query that sees no key gives zeros. Masked
    blocks are not computed, and a ring rank does not receive blocks that none of its queries sees. Ulysses
    still exchanges all tokens.

    Args:
        mesh (`DeviceMesh` or `ProcessGroup`): See :class:`UnifiedAttnMode`.
        block_mask (`Tensor`): A bool tensor ``[blocks of queries, blocks of keys]``, used for all heads and
            samples. Its number of blocks must fit the lengths of every attention call under the mode, also on
            a single rank. Use :meth:`disable` for calls with other lengths.
        block_size (`int` or pair of `int`): Number of tokens per block, or a pair of numbers: queries per
            block, keys per block. The last block may be shorter.
        options (*optional*): The options of :class:`UnifiedAttnMode`.

    Raises:
        ValueError: If ``block_mask``, ``block_size`` or an option is invalid.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        block_mask: Tensor,
        *,
        block_size: int | tuple[int, int],
        **options: Any,
    ) -> None:
        super().__init__(mesh, block_mask=read_block_mask(block_mask, block_size), **options)
