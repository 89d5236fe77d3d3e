"""Attention of one rank's queries to a block of keys that it holds: the innermost function, by a backend or
by a user's function, and :func:`expand_key_heads` around it.

:func:`~para_core.attention.usp.compose` nests them; their gradients are in :mod:`.gradients.blocks`, which
also calls :func:`expand_heads`. Tests: tests/attention/test_exactness.py, tests/attention/test_inputs.py for
a user's function, and test_backend_selection.py there for a backend that continues from an earlier result.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from para_core.attention.attend import Accumulator, Attend
from para_core.attention.local import continue_attention
from para_core.attention.local_call import LocalAttentionCall
from para_core.layout.runs import take
from para_core.option_values import Backend

# A function that replaces the backends of local attention; it returns (out, lse).
LocalAttention = Callable[[LocalAttentionCall], tuple[Tensor, Tensor]]


def attend_by_backend(backend: Backend | None, scale: float | None) -> Attend:
    """Return attention to one block by ``backend`` (PyTorch's choice if None), tile by tile. Autograd does
    not record it; its gradient is :func:`para_core.attention.gradients.blocks.local_backward`.
    """

    def forward(into: Accumulator, key: Tensor, value: Tensor, block: int, is_last: bool) -> None:
        if into.mask is None and not into.tiling.masks:
            # All queries see all keys of the block: they are one piece, the block is one tile, and one call
            # computes it.
            call = LocalAttentionCall(into.query, key, value, scale=scale)
            continue_attention(into.merged[0], call, backend, is_last=is_last)
            return
        hides_rows = into.mask is not None and into.mask.hides_rows
        # A piece may see a block as several tiles (in a causal call: the earlier keys, and those at its own
        # positions), and rounding must wait for the last of them. So no tile counts as the last.
        is_last = is_last and not into.tiling.masks
        for piece, tile in into.tiling.tiles(block):
            call = LocalAttentionCall(
                into.queries[piece],
                take(key, 2, tile.runs),
                take(value, 2, tile.runs),
                into.mask_of_tile(piece, tile),
                tile.is_causal,
                scale,
            )
            continue_attention(into.merged[piece], call, backend, is_last=is_last, hides_rows=hides_rows)

    return forward


def attend_by_function(attn_func: LocalAttention, scale: float | None) -> Attend:
    """Return attention to one block by a user's function, tile by tile. Autograd records it.

    It does not read ``is_last``, which only counts for a kernel that continues from an earlier result.
    """

    def forward(into: Accumulator, key: Tensor, value: Tensor, block: int, is_last: bool) -> None:
        for piece, tile in into.tiling.tiles(block):
            keys, values = take(key, 2, tile.runs), take(value, 2, tile.runs)
            mask = into.mask_of_tile(piece, tile)
            call = LocalAttentionCall(into.queries[piece], keys, values, mask, tile.is_causal, scale)
            out, lse = attn_func(call)
            if into.low_rows is not None:
                lse = into.low_rows[piece].lse_of_tile(lse, call)
            into.merged[piece].add(out, lse)

    return forward


def expand_key_heads(attend: Attend) -> Attend:
    """Return ``attend`` for blocks with fewer key heads: query head i uses key head ``key_heads[i]`` of the
    inputs.

    It is inside the functions that send blocks, so that these travel with few heads.
    """

    def forward(into: Accumulator, key: Tensor, value: Tensor, block: int, is_last: bool) -> None:
        attend(into, expand_heads(key, into.key_heads), expand_heads(value, into.key_heads), block, is_last)

    return forward


def expand_heads(x: Tensor, heads: Tensor | None) -> Tensor:
    """Return ``x``, ``[B, H_kv, S, D]``, with key head ``heads[i]`` for query head i, or ``x`` itself without heads."""
    if heads is None:
        return x
    return x.index_select(1, heads)
