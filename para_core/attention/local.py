"""Attention on one device over what it holds now: ``out`` and, where a ring needs it, ``lse``; and its gradient.

What a fused kernel asks of its arguments was read in PyTorch 2.13's sources. Paths in comments are relative to
``aten/src/ATen/native``; ``mem_eff`` is ``transformers/cuda/mem_eff_attention``, which torch installs among its headers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

_MATH = SDPBackend.MATH.value
_FLASH = SDPBackend.FLASH_ATTENTION.value
_EFFICIENT = SDPBackend.EFFICIENT_ATTENTION.value
_CUDNN = SDPBackend.CUDNN_ATTENTION.value


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
        return _no_keys(query, value)
    if mask is not None:
        mask, is_causal = with_diagonal(mask, is_causal, query, key)
    grouped = key.shape[1] != query.shape[1]
    if grouped and _choose_backend(query, key, value, mask, is_causal, scale) not in _TAKE_GROUPED_HEADS:
        key, value, grouped = _expand_heads(key, query), _expand_heads(value, query), False
    out: Tensor = torch.ops.aten.scaled_dot_product_attention(
        query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped
    )
    return out


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
        return _no_keys(query, value), query.new_full(query.shape[:-1], -inf, dtype=lse_dtype(query))
    if mask is not None:
        mask, is_causal = with_diagonal(mask, is_causal, query, key)
    backend = _choose_backend(query, key, value, mask, is_causal, scale)
    if key.shape[1] != query.shape[1] and backend not in _TAKE_GROUPED_HEADS:
        key, value = _expand_heads(key, query), _expand_heads(value, query)
    out, lse = _FORWARD[backend](query, key, value, mask, is_causal, scale)
    if mask is not None:
        # Backends disagree about a row that sees no key: NaN, or an lse of 0. In place: masked_fill() returns another
        # memory format.
        empty_row = sees_nothing(mask)
        out.masked_fill_(empty_row[..., None], 0.0)
        lse.masked_fill_(empty_row, -inf)
    return out, lse


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
    _choose_backend(probe, probe, probe_value, mask, False, None)


def _no_keys(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, num_queries, _ = query.shape
    return query.new_zeros(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)


def _choose_backend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> int:
    """The value of the ``SDPBackend`` that SDPA would take, had key and value as many heads as ``query``."""
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
    return choice if choice in _FORWARD else _MATH  # a backend of another device has no lse to give


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

# Grouped heads as they are: transformers/cuda/flash_attn/flash_api.cpp (mha_fwd; mha_bwd sums gradients over the group),
# transformers/cuda/sdp_utils.cpp (can_use_cudnn_attention), transformers/sdp_utils_cpp.cpp (FlashAttention on a CPU).
_TAKE_GROUPED_HEADS = frozenset({_FLASH, _CUDNN})


def _expand_heads(x: Tensor, query: Tensor) -> Tensor:
    """``x`` ``[B, H_kv, S, D]`` with the key head of each head of ``query``."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


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


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """``[B, H, S_q, S_k]`` in the dtype of lse; -inf where a query does not see a key."""
    dtype = lse_dtype(query)
    scores = (query.to(dtype) * _scale(query, scale)) @ key.to(dtype).transpose(-1, -2)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -inf)
    elif mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -inf)
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    # Not exp(scores - lse): beside the scores of a row that is masked by finfo.min throughout, log(n) in lse is lost.
    weights = torch.softmax(scores, dim=-1)
    batch, heads, num_queries, _ = query.shape
    out = query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
    return out.copy_(weights @ value.to(lse.dtype)), lse


def _bias(mask: Tensor | None, query: Tensor, num_keys: int) -> Tensor | None:
    """``mask`` as a fused kernel adds it: ``[B or 1, H or 1, S_q or 1, S_k]`` in query's dtype, rows of aligned bytes.

    Memory-efficient attention loads 16 bytes at a time (mem_eff/kernel_forward.h and kernel_backward.h,
    ``check_supported``), and SDPA pads rows to 8 numbers for it (transformers/attention.cpp, ``preprocess_mask``).
    """
    if mask is None or (mask.dtype == query.dtype and mask.shape[-1] == num_keys and _has_aligned_rows(mask)):
        return mask
    shape = (*mask.shape[:-1], num_keys + -num_keys % 8)
    # Kernels read what is behind a row's end, too: it must be a number.
    padded = query.new_empty(shape) if num_keys % 8 == 0 else query.new_zeros(shape)
    bias = padded[..., :num_keys].copy_(mask)
    return bias.log_() if mask.dtype == torch.bool else bias  # log(True) = 0, log(False) = -inf


def _has_aligned_rows(x: Tensor) -> bool:
    *strides, last = x.stride()
    return last == 1 and x.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in strides)


def _expanded_bias(mask: Tensor | None, query: Tensor, num_keys: int) -> Tensor | None:
    bias = _bias(mask, query, num_keys)
    return bias if bias is None else bias.expand(*query.shape[:-1], num_keys)


def _cpu_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Of a CPU's FlashAttention, which broadcasts and takes any strides, but no bool."""
    return mask if mask is None or mask.dtype != torch.bool else query.new_empty(mask.shape).copy_(mask).log_()


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if query.is_cpu:
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=_cpu_bias(mask, query), scale=scale
        )
        return result
    head_dim = query.shape[-1]
    if head_dim % 8:  # SDPA pads, too: the kernel wants rows of 16 bytes
        scale = _scale(query, scale)
        query, key, value = _padded(query), _padded(key), _padded(value)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    return out[..., :head_dim] if head_dim % 8 else out, lse


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 8))


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    bias = _expanded_bias(mask, query, key.shape[-2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scale
    )
    # Rows are padded to a multiple of 32 (mem_eff/kernel_forward.h, kAlignLSE).
    return out, lse[..., : query.shape[-2]]


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    # Heads are not expanded: SDPA does not do it either, and the operator expands the other dims.
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, _bias(mask, query, key.shape[-2]), True, 0.0, is_causal, scale=scale
    )
    # [B, H, S_q, 1] (cudnn/MHA.cpp, run_cudnn_SDP_fprop).
    return out, lse.view(query.shape[:-1])


_FORWARD = {_MATH: _math, _FLASH: _flash, _EFFICIENT: _memory_efficient, _CUDNN: _cudnn}


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
    backend = _MATH  # no fused backward gives the gradient of a broadcast mask
    if not mask_gradient:
        backend = _backward_of(_choose_backend(query, key, value, mask, is_causal, scale), query, value)
    key_heads = key.shape[1]
    expanded = key_heads != query.shape[1] and backend not in _TAKE_GROUPED_HEADS
    if expanded:
        key, value = _expand_heads(key, query), _expand_heads(value, query)
    grad_query, grad_key, grad_value, grad_mask = _BACKWARD[backend](
        grad_out, query, key, value, out, lse, mask, is_causal, scale
    )
    if expanded:
        grad_key, grad_value = (x.unflatten(1, (key_heads, -1)).sum(2) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, grad_mask if mask_gradient else None


def _backward_of(backend: int, query: Tensor, value: Tensor) -> int:
    """The backend of the gradient of what ``backend`` computed: its own, where that takes these head dims everywhere.

    The memory-efficient one takes any ``out`` and ``lse``.
    """
    head_dim = query.shape[-1]
    if query.is_cpu:
        return backend
    if backend == _FLASH and 192 < head_dim <= 224:
        # transformers/cuda/sdp_utils.cpp, check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        return _MATH if head_dim % 8 else _EFFICIENT
    if backend == _CUDNN and (head_dim > 128 or head_dim != value.shape[-1]):
        # transformers/cuda/sdp_utils.cpp, check_cudnn_d256_bprop_head_dim
        return _EFFICIENT
    return backend


def _math_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weights = torch.exp(_scores(query, key, mask, is_causal, scale) - lse[..., None])
    grad = grad_out.to(lse.dtype)
    grad_weights = grad @ value.to(lse.dtype).transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True))
    scale = _scale(query, scale)
    grad_query = (grad_scores @ key.to(lse.dtype)) * scale
    grad_key = grad_scores.transpose(-1, -2) @ (query.to(lse.dtype) * scale)
    grad_value = weights.transpose(-1, -2) @ grad
    dtype = query.dtype
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), grad_scores


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    out = _in_dtype_of(query, out)
    if query.is_cpu:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=_cpu_bias(mask, query), scale=scale
        )
        return grads[0], grads[1], grads[2], None
    head_dim, num_queries, num_keys = query.shape[-1], query.shape[-2], key.shape[-2]
    if head_dim % 8:
        scale = _scale(query, scale)
        grad_out, query, key, value, out = (_padded(x) for x in (grad_out, query, key, value, out))
    # Neither seed nor offset is read without dropout (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd); the
    # operator itself makes grad_out and out contiguous (transformers/cuda/attention_backward.cu).
    unread = _unread(query)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        _dense(lse),
        None,
        None,
        num_queries,
        num_keys,
        0.0,
        is_causal,
        unread,
        unread,
        scale=scale,
    )
    if head_dim % 8:
        grads = [x[..., :head_dim] for x in grads]
    return grads[0], grads[1], grads[2], None


def _memory_efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    num_queries = query.shape[-2]
    if num_queries % 32:
        # The kernel reads whole tiles of 32 rows (mem_eff/gemm/mma_from_smem.h, accumApplyLSEToSmem).
        lse = F.pad(lse, (0, -num_queries % 32), value=inf)
    bias, unread = _expanded_bias(mask, query, key.shape[-2]), _unread(query)
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        query,
        key,
        value,
        bias,
        _with_packed_rows(_in_dtype_of(query, out)),
        _dense(lse),
        unread,
        unread,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return grads[0], grads[1], grads[2], None


def _with_packed_rows(out: Tensor) -> Tensor:
    """``out`` as ``[B, S, H, D]`` in memory, where a kernel takes that for granted.

    In 16 bits the kernel itself sums grad_out ∘ out, stepping over rows of ``out`` by H · D_v: it is given no stride of
    them (mem_eff/kernel_backward.h, ``o_strideM`` and ``kKernelComputesDelta``).
    """
    _, heads, num_queries, head_dim = out.shape
    packed = out.stride(3) == 1 and (out.stride(2) == heads * head_dim or num_queries == 1)
    if packed or out.dtype == torch.float32:
        return out
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    bias, unread = _bias(mask, query, key.shape[-2]), _unread(query)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _lying_like(query, grad_out),
        query,
        key,
        value,
        _lying_like(query, out),
        _dense(lse)[..., None],
        unread,
        unread,
        bias,
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        0.0,
        is_causal,
        scale=scale,
    )
    return grads[0], grads[1], grads[2], None


def _lying_like(query: Tensor, x: Tensor) -> Tensor:
    """``x`` with the dtype and the strides that the forward gives to its result.

    cuDNN's graph is built with the strides of ``out`` and ``grad_out``, but found again by those of query, key and value
    alone (cudnn/MHA.cpp, run_cudnn_SDP_bprop): a second layout would be read as the first.
    """
    like = torch.empty_like(query)
    return x if x.dtype == like.dtype and x.stride() == like.stride() else like.copy_(x)


def _in_dtype_of(query: Tensor, x: Tensor) -> Tensor:
    return x if x.dtype == query.dtype else x.to(query.dtype)


def _dense(lse: Tensor) -> Tensor:
    """Contiguous and aligned: no kernel is given all of its strides, and some load 16 bytes at a time."""
    if lse.is_contiguous() and lse.storage_offset() % 4 == 0:
        return lse
    return lse.clone(memory_format=torch.contiguous_format)


def _unread(query: Tensor) -> Tensor:
    """In place of a seed or an offset, where there is no dropout."""
    return query.new_empty((), dtype=torch.int64)


_BACKWARD = {
    _MATH: _math_backward,
    _FLASH: _flash_backward,
    _EFFICIENT: _memory_efficient_backward,
    _CUDNN: _cudnn_backward,
}
