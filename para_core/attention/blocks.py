"""Attention of one rank's queries to a block of keys that it holds: the innermost function, by a backend or
by a user's function, and :func:`expand_key_heads` around it.

:func:`~para_core.attention.usp.compose` nests them; their gradients are in :mod:`.gradients.blocks`, which
also calls :func:`expand_heads`. :mod:`.mesh_attention` checks a user's function (:func:`check_attn_func`) and
passes it on as :func:`run_attn_func` of it. Tests: tests/attention/test_exactness.py,
tests/attention/test_inputs.py for a user's function, and test_backend_selection.py there for a backend that
continues from an earlier result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from para_core.attention.attend import Accumulator, Attend
from para_core.attention.attention_options import AttnOptions
from para_core.attention.local import (
    AttnFunc,
    add_autograd_dependency,
    continue_attention,
    local_attention_with_lse,
)
from para_core.attention.local_call import LocalAttentionCall, fully_masked_rows
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.mesh import SequenceMesh
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
            call = call.expand_key_heads()
            out, lse = attn_func(call)
            if into.low_rows is not None:
                lse = into.low_rows[piece].lse_of_tile(lse, call)
            into.merged[piece].add(out, lse)

    return forward


def run_attn_func(attn_func: AttnFunc, call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    """Run ``attn_func`` like :func:`~para_core.attention.local.local_attention_with_lse`, and return out and
    lse. The call has as many key heads as query heads, because a user's function pairs none.

    If ``attn_func`` returns no lse, the lse is zeros: :func:`check_attn_func` has ensured that the call needs
    none.

    Raises:
        ValueError: ``attn_func`` returned neither a tensor nor two.
    """
    query, key, value, *_ = call
    if 0 in query.shape or 0 in key.shape:  # A user's kernel may not support empty tensors.
        out, lse = local_attention_with_lse(call)
        return add_autograd_dependency(out, [query, key, value]), lse
    _, _, _, mask, is_causal, scale = call.fold()
    if mask is not None:
        # Many kernels return NaN for a query whose keys are all masked. Unmask all of them, and overwrite the
        # result of this query below.
        empty_row = fully_masked_rows(mask)
        if mask.dtype == torch.bool:
            mask = mask | empty_row[..., None]
        else:
            mask = mask.masked_fill(empty_row[..., None], 0.0)
    result = attn_func(query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=is_causal, scale=scale)
    _check_result(result)
    if isinstance(result, Tensor):
        result = result, result.new_zeros(result.shape[:-1], dtype=torch.float32)
    out, lse = result
    if mask is not None:
        out, lse = out.masked_fill(empty_row[..., None], 0.0), lse.masked_fill(empty_row, float("-inf"))
    return out, lse


def _check_result(result: Any) -> None:
    """Raise ``ValueError`` unless ``result`` is a tensor, or two."""
    if isinstance(result, Tensor):
        return
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not is_pair or not all(isinstance(x, Tensor) for x in result):
        returned = type(result).__name__
        if isinstance(result, (tuple, list)):
            returned = f"({', '.join([type(x).__name__ for x in result])})"
        raise ValueError(
            f"attn_func returned {returned}; expected the tensor out, or two tensors (out, lse)."
        )


def check_attn_func(attn_func: AttnFunc, call: SdpaCall, mesh: SequenceMesh, options: AttnOptions) -> None:
    """Raise if ``attn_func`` cannot compute this call over ``mesh``. If the call needs an lse, try it with
    two tokens.

    Raises:
        ValueError: ``attn_func`` returns no lse, but a ring or a causal call needs it, or results of other
            shapes or types.
        RuntimeError: Inside a compiled function, the call is causal or an option selects keys by position.
    """
    if torch.compiler.is_compiling() and (call.is_causal or options.by_position):
        raise RuntimeError(
            "inside a compiled function attn_func takes no is_causal and no sparse mode: positions are symbolic there. "
            "Leave attn_func out, or compile around this call."
        )
    if mesh.ring.size == 1 and not call.is_causal:
        return
    heads = max(1, call.query.shape[-3])
    probe = [x.new_zeros(1, heads, 2, x.shape[-1]) for x in call[:3]]
    result = attn_func(*probe, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)
    _check_result(result)
    if isinstance(result, Tensor):
        reason = "is_causal over several ranks"
        if mesh.ring.size > 1:
            reason = f"a ring of {mesh.ring.size} ranks"
        raise ValueError(
            f"attn_func returned out alone, and {reason} merges partial results by their lse. Return (out, lse), lse "
            "[B, H, S_q] the natural log-sum-exp of the scaled scores in float32; or use a mesh whose ranks are all in "
            "its 'ulysses' dim, without is_causal."
        )
    # An lse of another shape, such as [B, S_q, H], could broadcast in the merge.
    query_shape, value_shape = list(probe[0].shape), list(probe[2].shape)
    shapes = [list(x.shape) for x in result]
    if shapes != [value_shape, query_shape[:-1]]:
        raise ValueError(
            f"attn_func returned {' and '.join([str(shape) for shape in shapes])} for a query {query_shape} and a "
            f"value {value_shape}; expected out, [B, H, S_q, D_v], and lse, [B, H, S_q]."
        )


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
