"""Attention on one device over what it holds now: ``out`` and, where a ring needs it, ``lse``; and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.backends import BACKWARD, FORWARD, MATH, Problem, backward_of, room_for_out


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` under another name, so that no mode intercepts it a second time.

    Args, shapes and result are SDPA's own for 4-D tensors, but that ``mask`` may have another float dtype than
    ``query``, that ``mask`` and ``is_causal`` go together on every backend, and that any dim may be 0. Key heads that
    divide the query's are grouped-query attention.
    """
    if 0 in query.shape or 0 in key.shape:
        return room_for_out(query, value).zero_()
    if mask is not None:
        mask, is_causal = with_diagonal(mask, is_causal, query, key)
    grouped = key.shape[1] != query.shape[1]
    if grouped:
        problem = Problem(query, key, value, mask, is_causal, scale)
        _, key, value, *_ = problem.as_taken_by(_choose_backend(problem))
        grouped = key.shape[1] != query.shape[1]
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped
        )
        return out
    # The same without the detour of an operator's arguments from Python.
    with torch._C.DisableTorchFunction():
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)


def local_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scaled scores, from the best backend that the user's switches allow.

    Has no gradient: :func:`local_attention_backward` computes it.

    Args:
        query: ``[B, H, S_q, D]``; any dim may be 0.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``; S_k may be 0. H_kv divides H: query head i uses key
            head ``i // (H // H_kv)``.
        mask: bool (True where a query sees a key) or float (added to the scores), 4-D, broadcastable to
            ``[B, H, S_q, S_k]``.
        is_causal: query i sees keys 0 … i, of those that ``mask`` leaves.
        scale: of the scores; ``1 / sqrt(D)`` if None.

    Returns:
        ``out`` ``[B, H, S_q, D_v]`` in query's dtype, and ``lse`` ``[B, H, S_q]`` in float32 (float64 for float64
        input), natural log. A row without a key gives 0 and -inf. ``out`` lies in memory as SDPA's result does: like
        ``query`` from FlashAttention and cuDNN, else as ``[B, S_q, H, D_v]``. So ``out.transpose(1, 2).view(...)``
        works where it works on SDPA's.

    Raises:
        RuntimeError: if the user's switches leave no backend; :func:`require_backend` says so beforehand.
    """
    if 0 in query.shape or 0 in key.shape:
        return room_for_out(query, value).zero_(), query.new_full(query.shape[:-1], -inf, dtype=lse_dtype(query))
    if mask is not None:
        mask, is_causal = with_diagonal(mask, is_causal, query, key)
    problem = Problem(query, key, value, mask, is_causal, scale)
    backend = _choose_backend(problem)
    if key.shape[1] != query.shape[1]:
        problem = problem.as_taken_by(backend)
    out, lse = FORWARD[backend](problem)
    if mask is not None:
        # Backends disagree about a row that sees no key: NaN, or an lse of 0. In place: masked_fill() returns another
        # memory format.
        empty_row = sees_nothing(mask)
        out.masked_fill_(empty_row[..., None], 0.0)
        lse.masked_fill_(empty_row, -inf)
    return out, lse


def local_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of attention with respect to these keys, where ``out`` and ``lse`` may be over others too.

    With P = exp(scores - lse): dv = Pᵀ·do, ds = P ∘ (do·vᵀ - rowsum(do ∘ out)), dq = ds·k, dk = dsᵀ·q (FlashAttention,
    arXiv:2205.14135, appendix B), which is additive over blocks of keys.

    Args:
        query, key, value, mask, is_causal, scale: as :func:`local_attention_with_lse` took them.
        out, lse: ``[B, H, S_q, D_v]`` and ``[B, H, S_q]`` of the whole row; -inf for a row that saw no key.

    Returns:
        The gradients of query, key and value, and of ``mask`` before broadcasting (``[B, H, S_q, S_k]``) if asked for.
    """
    if 0 in query.shape or 0 in key.shape:
        grad_mask = query.new_zeros(*query.shape[:-1], key.shape[-2]) if mask_gradient else None
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape), grad_mask
    if mask is not None:
        mask, is_causal = with_diagonal(mask, is_causal, query, key)
        # exp(scores - inf) is 0: a row that saw nothing has no gradient. Without a mask each row sees a key here.
        lse = lse.masked_fill(lse == -inf, inf)
    problem = Problem(query, key, value, mask, is_causal, scale)
    # No fused backward gives the gradient of a broadcast mask.
    backend = MATH if mask_gradient else backward_of(_choose_backend(problem), query, value)
    problem = problem.as_taken_by(backend)
    grad_query, grad_key, grad_value, *rest = BACKWARD[backend](problem, grad_out, out, lse)
    if problem.key is not key:  # expanded
        grad_key, grad_value = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, rest[0] if mask_gradient else None


# -- which backend


def require_backend(query: Tensor, value: Tensor, *, mask: Tensor | None = None) -> None:
    """Raise unless the user's switches leave a backend for tensors like these.

    The verdict depends on dtypes, head dims, the kind of device and whether there is a mask, not on how many tokens or
    heads there are: it is the same on a rank that has nothing to compute. Costs nothing while the math backend is on.

    Raises:
        RuntimeError: if no backend is left.
    """
    if torch._C._get_math_sdp_enabled():
        return
    probe, probe_value = (x.new_empty(1, 1, 2, x.shape[-1]) for x in (query, value))
    if mask is not None:
        mask = _in_taken_dtype(mask.new_empty(1, 1, 2, 2), query)
    _choose_backend(Problem(probe, probe, probe_value, mask, False, None))


def _choose_backend(problem: Problem) -> int:
    """The value of the ``SDPBackend`` that SDPA would take, had key and value as many heads as ``query``."""
    query, key, value, mask, is_causal, scale = problem
    heads = query.shape[1]
    if key.shape[1] != heads:
        # Asked with enable_gqa, memory-efficient attention is out, though it may be the best once heads are expanded.
        key, value = (x[:, :1].expand(-1, heads, -1, -1) for x in (key, value))
    try:
        choice: int = torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, scale=scale)
    except RuntimeError as error:
        if torch._C._get_math_sdp_enabled():
            raise
        raise _no_backend(query, value, mask) from error
    return choice if choice in FORWARD else MATH  # a backend of another device has no lse to give


def _no_backend(query: Tensor, value: Tensor, mask: Tensor | None) -> RuntimeError:
    enabled = [name for name, is_enabled in _SWITCHES.items() if is_enabled()]
    masked = "" if mask is None else f" with a mask of {mask.dtype}"
    return RuntimeError(
        f"no attention backend is left: sdpa_kernel(...) or torch.backends.cuda.enable_*_sdp(...) allow "
        f"{', '.join(enabled) or 'none'}, and none of these takes {query.dtype} with head dims {query.shape[-1]} and "
        f"{value.shape[-1]}{masked} on {query.device.type}. Allow another one: SDPBackend.MATH takes everything."
    )


_SWITCHES: dict[str, Callable[[], bool]] = {
    "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled,
    "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled,
    "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled,
    "MATH": torch.backends.cuda.math_sdp_enabled,
}

# -- masks


def with_diagonal(mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """``mask`` and ``is_causal`` as one of the two, in a dtype that the backends take."""
    if mask is None:
        return None, is_causal
    if is_causal:
        seen = mask.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -inf)
    return _in_taken_dtype(mask, query), False


def _in_taken_dtype(mask: Tensor, query: Tensor) -> Tensor:
    """What SDPA takes: bool or query's dtype; on a CPU float32, too."""
    if mask.dtype in (torch.bool, query.dtype) or (mask.dtype == torch.float32 and query.is_cpu):
        return mask
    largest = torch.finfo(query.dtype).max
    if torch.finfo(mask.dtype).max <= largest:
        return mask.to(query.dtype)
    # finfo(float32).min hides a key, but a row of it still sees all of them alike: it must not become -inf. Half of
    # the range: kernels multiply scores by log2(e).
    return mask.clamp(min=-largest / 2).to(query.dtype).masked_fill_(mask == -inf, -inf)


def sees_nothing(mask: Tensor) -> Tensor:
    """Rows of ``mask`` that let no key through: ``[B or 1, H or 1, S_q or 1]``."""
    return ~mask.any(-1) if mask.dtype == torch.bool else (mask == -inf).all(-1)


def lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
