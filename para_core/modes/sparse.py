"""Torch function modes in which a query sees some of the keys: those of visible blocks, or those that are kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.block_sparse import read_block_mask
from para_core.attention.schedule import KeptKeys
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


class SparseKVAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` in which each head attends only to the keys with the highest attention
    weights.

    The criterion is that of SnapKV (Li et al. 2024, arXiv:2404.14469). For each sample and query head:

    1. Observe ``window`` queries: those in the middle of ``window`` equal parts of the sequence. Observe all
       queries if there are at most ``window``.
    2. Score each key by the sum of its attention weights over the observed queries. The softmax covers all
       keys that the mask and ``is_causal`` allow.
    3. Keep the ``ceil(share * S_k)`` keys with the highest scores. Among equal scores, earlier keys come
       first.

    The result equals the result on one device with all other keys masked out, on any mesh. A ring sends only
    the kept keys and values, unless the call requires a gradient, is causal, has a mask with a row per query,
    or has fewer key heads than query heads.

    Args:
        mesh (`DeviceMesh` or `ProcessGroup`): See :class:`UnifiedAttnMode`.
        share (`float`): The share of the keys to keep, ``0 < share <= 1``.
        window (`int`, *optional*, defaults to `64`): Number of observed queries.
        options (*optional*): The options of :class:`UnifiedAttnMode`.

    Raises:
        ValueError: If ``share``, ``window`` or an option is invalid.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        *,
        share: float,
        window: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(mesh, kept_keys=KeptKeys(float(share), window), **options)
