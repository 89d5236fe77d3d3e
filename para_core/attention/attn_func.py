"""Run a user's attention function (``attn_func=``) as the local attention of a call over a mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from para_core.attention.attention_options import AttnOptions
from para_core.attention.backends import LocalAttentionCall, fully_masked_rows
from para_core.attention.blocks import add_autograd_dependency
from para_core.attention.local import local_attention_with_lse
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.mesh import SequenceMesh

# A user's attention function is called like SDPA, and may also return the lse:
# (query, key, value, attn_mask=, dropout_p=, is_causal=, scale=) -> out or (out, lse).
AttnFunc = Callable[..., "Tensor | tuple[Tensor, Tensor]"]


def run_attn_func(attn_func: AttnFunc, call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    """Run ``attn_func`` like :func:`~para_core.attention.local.local_attention_with_lse`, and return out and lse.

    If ``attn_func`` returns no lse, the lse is zeros: :func:`check_attn_func` has ensured that the call needs none.
    """
    query, key, value, *_ = call
    if 0 in query.shape or 0 in key.shape:  # A user's kernel may not support empty tensors.
        out, lse = local_attention_with_lse(call)
        return add_autograd_dependency(out, [query, key, value]), lse
    _, _, _, mask, is_causal, scale = call.folded()
    if mask is not None:
        # Many kernels return NaN for a query whose keys are all masked. Unmask all of them, and overwrite the result
        # of this query below.
        empty_row = fully_masked_rows(mask)
        mask = mask | empty_row[..., None] if mask.dtype == torch.bool else mask.masked_fill(empty_row[..., None], 0.0)
    result = attn_func(query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=is_causal, scale=scale)
    if isinstance(result, Tensor):
        result = result, result.new_zeros(result.shape[:-1], dtype=torch.float32)
    out, lse = result
    if mask is not None:
        out, lse = out.masked_fill(empty_row[..., None], 0.0), lse.masked_fill(empty_row, float("-inf"))
    return out, lse


def check_attn_func(attn_func: AttnFunc, call: SdpaCall, mesh: SequenceMesh, options: AttnOptions) -> None:
    """Raise if ``attn_func`` cannot compute this call over ``mesh``. If the call needs an lse, try it with one token.

    Raises:
        ValueError: ``attn_func`` returns no lse, but a ring or a causal call needs it.
        RuntimeError: The call is in a compiled function and is causal, or an option selects keys by position.
    """
    if torch.compiler.is_compiling() and (call.is_causal or options.by_position):
        raise RuntimeError(
            "inside a compiled function attn_func takes no is_causal and no sparse mode: positions are symbolic there. "
            "Leave attn_func out, or compile around this call."
        )
    if mesh.ring.size == 1 and not call.is_causal:
        return
    heads = max(1, call.query.shape[-3])
    probe = [x.new_zeros(1, heads, 1, x.shape[-1]) for x in call[:3]]
    result = attn_func(*probe, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)
    if isinstance(result, Tensor):
        reason = f"a ring of {mesh.ring.size} ranks" if mesh.ring.size > 1 else "is_causal over several ranks"
        raise ValueError(
            f"attn_func returned out alone, and {reason} merges partial results by their lse. Return (out, lse), lse "
            "[B, H, S_q] the natural log-sum-exp of the scaled scores in float32; or use a mesh whose ranks are all in "
            "its 'ulysses' dim, without is_causal."
        )
