"""Compute attention and its gradient on one device, for the tokens that a rank holds.

:mod:`.usp` and :mod:`.blocks` call the forward, :mod:`.gradients.blocks` the backward. Nothing here
communicates. Which backends can compute a call is checked in :mod:`.backend_selection`, before ranks wait for
each other. Tests: tests/attention/test_local.py, and tests/attention/test_inputs.py for a user's function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.backend_selection import check_backend
from para_core.attention.backends.added import ADDED
from para_core.attention.backends.pytorch import (
    FORWARD,
    MATH,
    OF_PYTORCH,
    choose_backend,
    with_supported_heads,
)
from para_core.attention.backends.pytorch_backward import BACKWARD, backward_of
from para_core.attention.local_call import LocalAttentionCall, empty_output, fully_masked_rows
from para_core.attention.merge import Merged
from para_core.option_values import Backend
from para_core.torch_internals import DisableTorchFunction

# A function that computes local attention in place of SDPA, a user's or a library's. It is called like SDPA, and may
# also return the lse: (query, key, value, attn_mask=, dropout_p=, is_causal=, scale=) -> out or (out, lse).
AttnFunc = Callable[..., "Tensor | tuple[Tensor, Tensor]"]


def local_attention(call: LocalAttentionCall, backend: Backend | None = None) -> Tensor:
    """Compute ``scaled_dot_product_attention`` of 4-D tensors by a call that attention modes do not
    intercept.

    The function accepts more than SDPA: ``mask`` may have another float dtype than ``query``; ``mask`` and
    ``is_causal`` may be combined on every backend; any dim may be 0; and there may be fewer key heads than
    query heads without ``enable_gqa``. For ``backend`` see :func:`local_attention_with_lse`.
    """
    query, key, value, mask, is_causal, scale = call
    shape, key_shape = query.shape, key.shape
    if 0 in shape or 0 in key_shape:
        return empty_output(query, value).zero_()
    if backend is not None:
        return local_attention_with_lse(call, backend)[0]
    grouped = key_shape[1] != shape[1]
    if mask is not None or grouped:
        call = call.fold()
        if grouped:
            call = with_supported_heads(call, choose_backend(call))
        query, key, value, mask, is_causal, _ = call
        grouped = key.shape[1] != shape[1]
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped
        )
        return out
    # In eager code this function is faster than the aten operator above, whose arguments the dispatcher has
    # to convert from Python.
    with DisableTorchFunction():
        if scale is None and not grouped:
            # Each argument by keyword costs the host half a microsecond.
            return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal)
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped
        )


def local_attention_with_lse(
    call: LocalAttentionCall,
    backend: Backend | None = None,
    *,
    hides_rows: bool = True,
    choice: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention and the log-sum-exp of its scaled scores, with the best backend that ``sdpa_kernel``
    allows.

    Autograd does not record this computation; use :func:`local_attention_backward` for the gradient.

    Args:
        backend: The name of the backend; by default SDPA chooses.
        hides_rows: Whether the mask may hide all keys of a row. If not, such rows are not looked for.
        choice: The result of :func:`choose_backend` for this call, if it is known. Not read if there is a
            ``backend``.

    Returns:
        ``out``, ``[B, H, S_q, D_v]`` in the dtype of query, and ``lse``, ``[B, H, S_q]``, natural log, in
        float32 (float64 for float64 input). A query that sees no key gets 0 and -inf. ``out`` has the memory
        layout that SDPA's result would have, so that ``out.transpose(1, 2).view(...)`` works in the same
        cases: with FlashAttention and cuDNN the layout of ``query``, otherwise ``[B, S_q, H, D_v]``.

    Raises:
        RuntimeError: ``sdpa_kernel`` disables all backends that support the call, or the named one does not
            support it. :func:`~para_core.attention.backend_selection.check_some_backend` raises the same
            error in advance, before ranks wait for each other.
    """
    query, key, value, mask, is_causal, _ = call
    if 0 in query.shape or 0 in key.shape:
        return empty_output(query, value).zero_(), query.new_full(
            query.shape[:-1], -inf, dtype=lse_dtype(query)
        )
    if backend is not None:
        check_backend(backend, query, value, masked=mask is not None, is_causal=is_causal)
        if backend in ADDED:
            return ADDED[backend].attend(call)
    if mask is not None:
        call = call.fold()
    if backend is not None:
        choice = OF_PYTORCH[backend]
        call = call.with_dense_rows()
    elif choice is None:
        choice = choose_backend(call)
    if key.shape[1] != query.shape[1]:
        call = with_supported_heads(call, choice)
    out, lse = FORWARD[choice](call)
    if call.mask is not None and hides_rows:
        # Backends return NaN or an lse of 0 for a row without a key. Fill in place, because masked_fill()
        # would change the memory layout.
        empty_row = fully_masked_rows(call.mask)
        out.masked_fill_(empty_row[..., None], 0.0)
        lse.masked_fill_(empty_row, -inf)
    return out, lse


def continue_attention(
    so_far: Merged,
    call: LocalAttentionCall,
    backend: Backend | None = None,
    *,
    is_last: bool = False,
    hides_rows: bool = True,
) -> None:
    """Compute ``call`` without autograd, and merge it in place into ``so_far``, the result of the same
    queries for other keys.

    A backend that can continue from ``so_far`` does so in one launch. With any other backend, merging is one
    more launch. If the call ``is_last``, the result may be rounded to the dtype of query; otherwise a merged
    result stays in float32. ``hides_rows`` says whether the mask may hide all keys of a row.
    """
    query, key = call.query, call.key
    is_empty = 0 in query.shape or 0 in key.shape
    if so_far.count and is_empty:
        return
    continue_from = None
    if backend is not None and backend in ADDED and not is_empty:
        masked = call.mask is not None
        check_backend(backend, query, call.value, masked=masked, is_causal=call.is_causal)
        continue_from = ADDED[backend].continue_from
    if continue_from is None:
        choice = None
        if backend is None and call.mask is None and not is_empty:
            choice = _choice_for(so_far, call)
        so_far.add(*local_attention_with_lse(call, backend, hides_rows=hides_rows, choice=choice))
        return
    earlier = None
    if so_far.count:
        earlier = (so_far.out, so_far.lse)
    out_dtype = torch.float32
    if is_last:
        out_dtype = query.dtype
    so_far.replace(*continue_from(earlier, call, out_dtype))


def _choice_for(so_far: Merged, call: LocalAttentionCall) -> int:
    """Return the result of :func:`choose_backend`, which is looked up if an earlier block of the same queries
    has keys and values that lie in memory in the same way: asking SDPA costs the host as much as a small
    operator.
    """
    key, value = call.key, call.value
    layout = (key.shape, key.stride(), value.shape, value.stride(), call.is_causal)
    choice = so_far.choices.get(layout)
    if choice is None:
        choice = so_far.choices[layout] = choose_backend(call)
    return choice


def local_attention_backward(
    call: LocalAttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask_gradient: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of attention to the keys of ``call``, which may be one block of all keys.

    With P = exp(scores - lse): dv = Pᵀ·do, ds = P ∘ (do·vᵀ - rowsum(do ∘ out)), dq = ds·k, dk = dsᵀ·q
    (FlashAttention, arXiv:2205.14135, appendix B). If ``key`` is one of several blocks, the caller adds up
    their dq.

    Args:
        out, lse: The results over all blocks of keys; lse is -inf for a row without a key.
        backend: The backend of the forward, which must be exact. For one that is not PyTorch's, the backend
            that SDPA would choose computes the gradient from ``out`` and ``lse``.
        mask_gradient: Whether to compute the gradient of ``mask``.

    Returns:
        The gradients of query, key and value, and that of ``mask`` before broadcasting, ``[B, H, S_q, S_k]``,
        or None.
    """
    query, key, value, mask, *_ = call
    if 0 in query.shape or 0 in key.shape:
        grad_mask = None
        if mask_gradient:
            grad_mask = query.new_zeros(*query.shape[:-1], key.shape[-2])
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape), grad_mask
    if mask is not None:
        call = call.fold()
        # Replace the lse of a row without a key by inf: exp(scores - inf) is 0, so the row gets no gradient.
        # Without a mask every row has a key.
        lse = lse.masked_fill(lse == -inf, inf)
    # Use the math backend for this, because no fused backward can compute the gradient of a broadcast mask.
    if mask_gradient:
        choice = MATH
    else:
        forward = None
        if backend is not None:
            forward = OF_PYTORCH.get(backend)
        if forward is None:
            forward = choose_backend(call)
        else:
            call = call.with_dense_rows()
        choice = backward_of(forward, query, value)
    call = with_supported_heads(call, choice)
    grad_query, grad_key, grad_value, *rest = BACKWARD[choice](call, grad_out, out, lse)
    if call.key.shape[1] != key.shape[1]:  # Sum the gradients of the copies of each key head.
        grad_key, grad_value = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (grad_key, grad_value))
    grad_mask = None
    if mask_gradient:
        grad_mask = rest[0]
    return grad_query, grad_key, grad_value, grad_mask


def add_autograd_dependency(x: Tensor, received: Sequence[Tensor]) -> Tensor:
    """Return a tensor equal to ``x`` that depends on each of ``received`` in autograd, with gradient 0.

    Without this, a rank that does not use a tensor that it received would not run the backward of the
    collective, and the other ranks would hang. Returns ``x`` itself if gradients are disabled.
    """
    if not torch.is_grad_enabled():
        return x
    for tensor in received:
        if tensor.requires_grad:
            x = x + tensor[:0].sum().to(x.dtype)
    return x


def lay_out_like_sdpa(out: Tensor) -> Tensor:
    """Return ``out``, ``[B, H, S, D]``, with the memory layout ``[B, S, H, D]`` of SDPA's result.

    Models rely on it: they call ``out.transpose(1, 2).view(...)``.
    """
    _, heads, num_tokens, width = out.shape
    if out.stride() == (num_tokens * heads * width, width, heads * width, 1):
        return out
    # Strides of dims of size 1 have no meaning, so others may be as good.
    by_token = out.transpose(1, 2)
    if by_token.is_contiguous():
        return out
    return by_token.contiguous().transpose(1, 2)


def lse_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of lse, and of merged results: float64 for float64 queries, otherwise float32."""
    if query.dtype == torch.float64:
        return torch.float64
    return torch.float32
