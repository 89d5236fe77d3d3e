"""Forward and backward of attention on one device, by each of PyTorch's backends.

The requirements of the fused kernels are taken from the sources of PyTorch 2.13. Paths in comments are
relative to ``aten/src/ATen/native``; ``mem_eff`` is ``transformers/cuda/mem_eff_attention``, which torch
installs among its headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from para_core.torch_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    cudnn_sdp_enabled,
    efficient_attention,
    efficient_attention_backward,
    efficient_sdp_enabled,
    flash_attention,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
    flash_sdp_enabled,
    fused_sdp_choice,
    math_sdp_enabled,
)

MATH = SDPBackend.MATH.value
FLASH = SDPBackend.FLASH_ATTENTION.value
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION.value
CUDNN = SDPBackend.CUDNN_ATTENTION.value
# For each backend, a function that returns whether it is enabled; sdpa_kernel(...) and
# torch.backends.cuda.enable_*_sdp(...) can disable it. These are private functions of torch, because Dynamo
# treats them as constants, but not the public functions that call them.
SWITCHES: Mapping[str, Callable[[], bool]] = {
    "flash": flash_sdp_enabled,
    "efficient": efficient_sdp_enabled,
    "cudnn": cudnn_sdp_enabled,
    "math": math_sdp_enabled,
}
_aten = torch.ops.aten

# Backends that accept grouped heads (fewer key heads than query heads). Sources:
# transformers/cuda/flash_attn/flash_api.cpp (mha_fwd; mha_bwd sums gradients over the group),
# transformers/cuda/sdp_utils.cpp (can_use_cudnn_attention), transformers/sdp_utils_cpp.cpp (FlashAttention on
# a CPU).
_TAKE_GROUPED_HEADS = frozenset({FLASH, CUDNN})


class LocalAttentionCall(NamedTuple):
    """The arguments of attention on one device.

    H_kv divides H: query head i uses key head ``i // (H // H_kv)``. The backends in this file take calls that
    are :meth:`fold`, without dims of size 0.
    """

    query: Tensor  # [B, H, S_q, D]
    key: Tensor  # [B, H_kv, S_k, D]
    value: Tensor  # [B, H_kv, S_k, D_v]
    # Broadcastable to [B, H, S_q, S_k]: bool (True shows a key) or float (added to the scores).
    mask: Tensor | None = None
    is_causal: bool = False  # Whether query i sees only keys 0 … i, in addition to the mask.
    scale: float | None = None  # Factor of the scores; 1 / √D if None.

    def fold(self) -> LocalAttentionCall:
        """Return the call with its causal mask merged into ``mask``, so that at most one of them is set.

        The mask gets a dtype that SDPA accepts: bool or that of ``query``; on a CPU also float32. Without a
        mask the call is returned unchanged.
        """
        query, key, value, mask, is_causal, scale = self
        if mask is None:
            return self
        is_taken = mask.dtype in (torch.bool, bias_dtype(mask, query))
        if is_taken and not is_causal:
            return self
        if is_causal:
            causal = mask.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            if mask.dtype == torch.bool:
                mask = mask & causal
            else:
                mask = mask.masked_fill(~causal, -inf)
        if not is_taken:
            largest = torch.finfo(query.dtype).max
            if torch.finfo(mask.dtype).max <= largest:
                mask = mask.to(query.dtype)
            else:
                # finfo(float32).min must not become -inf: in a row full of finfo.min SDPA gives all keys
                # equal weights, but a row full of -inf has no keys. Clamp to half of the range, because
                # kernels multiply scores by log2(e).
                hidden = mask == -inf
                mask = mask.clamp(min=-largest / 2).to(query.dtype).masked_fill_(hidden, -inf)
        return LocalAttentionCall(query, key, value, mask, False, scale)

    def as_taken_by(self, backend: int) -> LocalAttentionCall:
        """Return the call with one key head per query head, unless ``backend`` accepts grouped heads."""
        heads, key_heads = self.query.shape[1], self.key.shape[1]
        if heads == key_heads or backend in _TAKE_GROUPED_HEADS:
            return self
        key, value = (x.repeat_interleave(heads // key_heads, dim=1) for x in (self.key, self.value))
        return self._replace(key=key, value=value)

    @property
    def factor(self) -> float:
        """The factor by which q·k is multiplied: ``scale``, or 1 / √D if ``scale`` is None."""
        if self.scale is not None:
            return self.scale
        factor: float = self.query.shape[-1] ** -0.5
        return factor

    @property
    def bias(self) -> Tensor | None:
        """``mask`` as an additive mask ``[B or 1, H or 1, S_q or 1, S_k]`` in the dtype of query, with
        aligned rows.

        Rows begin at multiples of 8 elements, because memory-efficient attention loads 16 bytes at a time
        (mem_eff/kernel_forward.h and kernel_backward.h, ``check_supported``). SDPA pads masks in the same way
        (transformers/attention.cpp, ``preprocess_mask``).
        """
        query, mask, num_keys = self.query, self.mask, self.key.shape[-2]
        if mask is None:
            return None
        *strides, last = mask.stride()
        is_aligned = (
            last == 1 and mask.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in strides)
        )
        if is_aligned and mask.dtype == query.dtype and mask.shape[-1] == num_keys:
            return mask
        bias = aligned_rows(query, (*mask.shape[:-1], num_keys), query.dtype).copy_(mask)
        if mask.dtype == torch.bool:
            return bias.log_()  # log(True) = 0, log(False) = -inf
        return bias

    @property
    def expanded_bias(self) -> Tensor | None:
        bias = self.bias
        if bias is None:
            return None
        return bias.expand(*self.query.shape[:-1], self.key.shape[-2])


def bias_dtype(mask: Tensor, query: Tensor) -> torch.dtype:
    """Return the dtype in which SDPA takes ``mask`` as an additive mask: that of ``query``; on a CPU also float32."""
    if mask.dtype == torch.float32 and query.is_cpu:
        return mask.dtype
    return query.dtype


def aligned_rows(
    query: Tensor, shape: Sequence[int], dtype: torch.dtype, *, fill: float | None = None
) -> Tensor:
    """Return a tensor of ``shape`` on the device of ``query`` whose rows begin at multiples of 8 elements.

    It is filled with ``fill``, or uninitialised if that is None. The padding of the rows is initialised in
    both cases.
    """
    *leading, width = shape
    padding = -width % 8
    padded = (*leading, width + padding)
    if fill is not None:
        return query.new_full(padded, fill, dtype=dtype)[..., :width]
    # Kernels also read the padding of a row, so it must not be NaN.
    if padding:
        rows = query.new_zeros(padded, dtype=dtype)
    else:
        rows = query.new_empty(padded, dtype=dtype)
    return rows[..., :width]


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return an uninitialised ``[B, H, S_q, D_v]`` with the memory layout of SDPA's result, ``[B, S_q, H, D_v]``."""
    batch, heads, num_queries, _ = query.shape
    return query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)


def _cpu_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return ``mask`` as an additive mask for FlashAttention on a CPU, which accepts any strides but no bool masks."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return query.new_empty(mask.shape).copy_(mask).log_()


def fully_masked_rows(mask: Tensor) -> Tensor:
    """Return a bool tensor ``[B or 1, H or 1, S_q or 1]`` that is True for rows of ``mask`` that hide every key."""
    if mask.dtype == torch.bool:
        return ~mask.any(-1)
    return (mask == -inf).all(-1)


def _scores(problem: LocalAttentionCall) -> Tensor:
    """Return the masked scores ``[B, H, S_q, S_k]`` in the dtype of lse; -inf if a key is hidden from a query."""
    query, key, _, mask, is_causal, _ = problem
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) * problem.factor) @ key.to(dtype).transpose(-1, -2)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -inf)
    elif mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -inf)
    return scores


def _math(problem: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    scores = _scores(problem)
    lse = torch.logsumexp(scores, dim=-1)
    # Do not use exp(scores - lse): if finfo.min masks a whole row of n keys, the log(n) in lse is lost to
    # rounding, and the weights would not sum to 1.
    weights = torch.softmax(scores, dim=-1)
    return empty_output(problem.query, problem.value).copy_(weights @ problem.value.to(lse.dtype)), lse


def _flash(problem: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    query, key, value, mask, is_causal, scale = problem
    if query.is_cpu:
        result: tuple[Tensor, Tensor] = flash_attention_on_cpu(
            query, key, value, 0.0, is_causal, attn_mask=_cpu_bias(mask, query), scale=scale
        )
        return result
    head_dim = query.shape[-1]
    if head_dim % 8:  # The kernel requires rows of a multiple of 16 bytes. SDPA pads the head dim, too.
        query, key, value, scale = _pad(query), _pad(key), _pad(value), problem.factor
    out, lse, *_ = flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    if head_dim % 8:
        out = out[..., :head_dim]
    return out, lse


def _pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 8))


def _memory_efficient(problem: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = efficient_attention(
        *problem[:3], problem.expanded_bias, True, 0.0, problem.is_causal, scale=problem.scale
    )
    # The kernel pads lse to a multiple of 32 queries (mem_eff/kernel_forward.h, kAlignLSE).
    return out, lse[..., : problem.query.shape[-2]]


def _cudnn(problem: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    # Like SDPA, do not expand the mask over heads. The operator itself expands the other dims.
    out, lse, *_ = cudnn_attention(
        *problem[:3], problem.bias, True, 0.0, problem.is_causal, scale=problem.scale
    )
    # cuDNN returns lse as [B, H, S_q, 1] (cudnn/MHA.cpp, run_cudnn_SDP_fprop).
    return out, lse.view(problem.query.shape[:-1])


FORWARD = {MATH: _math, FLASH: _flash, EFFICIENT: _memory_efficient, CUDNN: _cudnn}


# The backward functions return the gradients of query, key and value. Only that of the math backend returns a
# fourth gradient, the one of the scores, which is also the gradient of the mask.


def _math_backward(
    problem: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    query, key, value = [x.to(lse.dtype) for x in problem[:3]]
    weights = torch.exp(_scores(problem) - lse[..., None])
    grad = grad_out.to(lse.dtype)
    grad_scores = weights * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    grad_query = (grad_scores @ key) * problem.factor
    grad_key = grad_scores.transpose(-1, -2) @ (query * problem.factor)
    grad_value = weights.transpose(-1, -2) @ grad
    return *[x.to(problem.query.dtype) for x in (grad_query, grad_key, grad_value)], grad_scores


def _flash_backward(
    problem: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    query, key, value, mask, is_causal, scale = problem
    grads: Sequence[Tensor]
    tensors: Sequence[Tensor] = (grad_out, query, key, value, out.to(query.dtype))
    if query.is_cpu:
        grads = flash_attention_on_cpu_backward(
            *tensors, lse, 0.0, is_causal, attn_mask=_cpu_bias(mask, query), scale=scale
        )
        return grads
    head_dim, lengths, unread = query.shape[-1], (query.shape[-2], key.shape[-2]), _unread(query)
    if head_dim % 8:
        tensors, scale = [_pad(x) for x in tensors], problem.factor
    # Without dropout the kernel reads neither the random seed nor its offset
    # (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd). The operator itself makes grad_out and out
    # contiguous (transformers/cuda/attention_backward.cu).
    grads = flash_attention_backward(
        *tensors, _make_dense(lse), None, None, *lengths, 0.0, is_causal, unread, unread, scale=scale
    )
    if head_dim % 8:
        return [x[..., :head_dim] for x in grads]
    return grads


def _memory_efficient_backward(
    problem: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    query, unread = problem.query, _unread(problem.query)
    if query.shape[-2] % 32:
        # The kernel reads lse in whole tiles of 32 rows (mem_eff/gemm/mma_from_smem.h, accumApplyLSEToSmem).
        lse = F.pad(lse, (0, -query.shape[-2] % 32), value=inf)
    tensors = (
        grad_out,
        *problem[:3],
        problem.expanded_bias,
        _with_packed_rows(out.to(query.dtype)),
        _make_dense(lse),
    )
    grads: Sequence[Tensor] = efficient_attention_backward(
        *tensors, unread, unread, 0.0, [True, True, True, False], problem.is_causal, scale=problem.scale
    )
    return grads


def _with_packed_rows(out: Tensor) -> Tensor:
    """Return ``out``, ``[B, H, S, D_v]``, in 16-bit dtypes with the memory layout ``[B, S, H, D_v]``.

    The memory-efficient backward assumes this layout unchecked (mem_eff/kernel_backward.h, ``o_strideM`` and
    ``kKernelComputesDelta``).
    """
    _, heads, num_queries, head_dim = out.shape
    packed = out.stride(3) == 1 and (out.stride(2) == heads * head_dim or num_queries == 1)
    if packed or out.dtype == torch.float32:
        return out
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _cudnn_backward(
    problem: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    query, key, value, _, is_causal, scale = problem
    grad_out, out, unread = _lay_out_like(query, grad_out), _lay_out_like(query, out), _unread(query)
    rest = (unread, unread, problem.bias, None, None, query.shape[-2], key.shape[-2], 0.0, is_causal)
    grads: Sequence[Tensor] = cudnn_attention_backward(
        grad_out, query, key, value, out, _make_dense(lse)[..., None], *rest, scale=scale
    )
    return grads


def _lay_out_like(query: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` with the dtype and strides of ``query``, as cuDNN's forward returns ``out``.

    cuDNN builds a graph for the strides of ``out`` and ``grad_out``, but caches the graph by the strides of
    query, key and value alone (cudnn/MHA.cpp, run_cudnn_SDP_bprop). A tensor with other strides would be read
    wrongly.
    """
    like = torch.empty_like(query)
    if x.dtype == like.dtype and x.stride() == like.stride():
        return x
    return like.copy_(x)


def _make_dense(lse: Tensor) -> Tensor:
    """Return ``lse`` contiguous and aligned: kernels ignore some of its strides, and some load 16 bytes at once."""
    if lse.is_contiguous() and lse.storage_offset() % 4 == 0:
        return lse
    return lse.clone(memory_format=torch.contiguous_format)


def _unread(query: Tensor) -> Tensor:
    """Return a placeholder for the dropout seed or offset, which are not read without dropout."""
    return query.new_empty((), dtype=torch.int64)


def backward_of(backend: int, query: Tensor, value: Tensor) -> int:
    """Return the ``SDPBackend`` value for the backward of a call that ``backend`` computed.

    The result is ``backend`` itself if its backward supports the head dims on all GPUs. Otherwise it is the
    memory-efficient or the math backend, whose backward accepts the ``out`` and ``lse`` of any backend.
    """
    head_dim = query.shape[-1]
    if query.is_cpu:
        return backend
    if backend == FLASH and 192 < head_dim <= 224:
        # Some GPUs do not support this: transformers/cuda/sdp_utils.cpp,
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120.
        if head_dim % 8:
            return MATH
        return EFFICIENT
    if backend == CUDNN and (head_dim > 128 or head_dim != value.shape[-1]):
        # Some GPUs do not support this: transformers/cuda/sdp_utils.cpp, check_cudnn_d256_bprop_head_dim.
        return EFFICIENT
    return backend


BACKWARD = {
    MATH: _math_backward,
    FLASH: _flash_backward,
    EFFICIENT: _memory_efficient_backward,
    CUDNN: _cudnn_backward,
}


def choose_backend(problem: LocalAttentionCall) -> int:
    """Return the ``SDPBackend`` value that SDPA would choose if key and value had as many heads as query."""
    query, key, value, mask, is_causal, scale = problem
    heads = query.shape[1]
    if key.shape[1] != heads:
        # Ask for expanded key heads: with enable_gqa SDPA excludes memory-efficient attention, which may be
        # the best backend once the heads are expanded.
        key, value = (x[:, :1].expand(-1, heads, -1, -1) for x in (key, value))
    try:
        choice: int = fused_sdp_choice(query, key, value, mask, 0.0, is_causal, scale=scale)
    except RuntimeError as error:
        if math_sdp_enabled():
            raise
        raise no_backend(query, value, mask) from error
    if choice in FORWARD:
        return choice
    # The fused backends of other device types return no lse.
    return MATH


def no_backend(query: Tensor, value: Tensor, mask: Tensor | None) -> RuntimeError:
    # Build the names from the keys of SWITCHES, because Dynamo cannot trace SDPBackend(value).name.
    enabled = []
    for name, is_on in SWITCHES.items():
        if not is_on():
            continue
        if name == "math":
            enabled.append("MATH")
        else:
            enabled.append(f"{name.upper()}_ATTENTION")
    masked = ""
    if mask is not None:
        masked = f" with a mask of {mask.dtype}"
    return RuntimeError(
        f"no attention backend is left: sdpa_kernel(...) or torch.backends.cuda.enable_*_sdp(...) allow "
        f"{', '.join(enabled) or 'none'}, and none of these takes {query.dtype} with head dims {query.shape[-1]} and "
        f"{value.shape[-1]}{masked} on {query.device.type}. Allow another one: SDPBackend.MATH takes everything."
    )
