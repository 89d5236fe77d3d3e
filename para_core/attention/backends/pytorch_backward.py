"""Backward of attention on one device, by each of PyTorch's backends.

See :mod:`para_core.attention.backends.pytorch` for the sources that comments refer to.

Only :func:`~para_core.attention.local.local_attention_backward` calls these functions. It passes the lse over
all keys, with inf in place of -inf for rows without a key. The lse of a row that hides every key with a
number such as finfo.min does not give the weights of its keys: its caller must have changed it and grad_out
by :meth:`~para_core.attention.finite_masks.FiniteMaskedRows.for_gradient`. Tests:
tests/attention/test_local.py, and tests/attention/test_cuda_paths.py for the requirements of GPU kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.backends.pytorch import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    additive_on_cpu,
    masked_scores,
    pad_head_dim,
)
from para_core.attention.local_call import LocalAttentionCall
from para_core.torch_internals import (
    cudnn_attention_backward,
    efficient_attention_backward,
    flash_attention_backward,
    flash_attention_on_cpu_backward,
)

# The backward functions return the gradients of query, key and value. Only that of the math backend returns a
# fourth gradient, the one of the scores, which is also the gradient of the mask.


def _math_backward(call: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    query, key, value = [x.to(lse.dtype) for x in call[:3]]
    weights = torch.exp(masked_scores(call) - lse[..., None])
    grad = grad_out.to(lse.dtype)
    grad_scores = weights * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    grad_query = (grad_scores @ key) * call.factor
    grad_key = grad_scores.transpose(-1, -2) @ (query * call.factor)
    grad_value = weights.transpose(-1, -2) @ grad
    return *[x.to(call.query.dtype) for x in (grad_query, grad_key, grad_value)], grad_scores


def _flash_backward(call: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    query, key, value, mask, is_causal, scale = call
    grads: Sequence[Tensor]
    tensors: Sequence[Tensor] = (grad_out, query, key, value, out.to(query.dtype))
    if query.is_cpu:
        grads = flash_attention_on_cpu_backward(
            *tensors, lse, 0.0, is_causal, attn_mask=additive_on_cpu(mask, query), scale=scale
        )
        return grads
    head_dim, lengths, unread = query.shape[-1], (query.shape[-2], key.shape[-2]), _unread(query)
    if head_dim % 8:
        tensors, scale = [pad_head_dim(x) for x in tensors], call.factor
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
    call: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    query, unread = call.query, _unread(call.query)
    if query.shape[-2] % 32:
        # The kernel reads lse in whole tiles of 32 rows (mem_eff/gemm/mma_from_smem.h, accumApplyLSEToSmem).
        lse = F.pad(lse, (0, -query.shape[-2] % 32), value=inf)
    tensors = (
        grad_out,
        *call[:3],
        call.expanded_bias,
        _with_packed_rows(out.to(query.dtype)),
        _make_dense(lse),
    )
    grads: Sequence[Tensor] = efficient_attention_backward(
        *tensors, unread, unread, 0.0, [True, True, True, False], call.is_causal, scale=call.scale
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


def _cudnn_backward(call: LocalAttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    query, key, value, _, is_causal, scale = call
    grad_out, out, unread = _lay_out_like(query, grad_out), _lay_out_like(query, out), _unread(query)
    rest = (unread, unread, call.bias, None, None, query.shape[-2], key.shape[-2], 0.0, is_causal)
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
