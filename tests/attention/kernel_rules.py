"""The preconditions of the fused attention kernels of CUDA.

The kernels check few of these themselves. Their sources are cited from PyTorch 2.13: `mem_eff/…` with lines is in
`torch/include/ATen/native/transformers/cuda/mem_eff_attention/`, the rest in `aten/src/ATen/native/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
aten = torch.ops.aten


def _require(condition, message):
    if not condition:
        raise AssertionError(message)


def _aligned(x, name):
    """Require rows that load 16 bytes at a time: mem_eff/kernel_forward.h:573-612, kernel_backward.h:1182-1238."""
    step = 16 // x.element_size()
    _require(x.stride(-1) == 1, f"{name} has last stride {x.stride(-1)}")
    _require(x.storage_offset() % step == 0, f"{name} begins at an unaligned {x.storage_offset()}")
    for size, stride in list(zip(x.shape, x.stride(), strict=True))[:-1]:
        _require(size == 1 or stride % step == 0, f"{name} has strides {x.stride()}, not multiples of {step}")


def _bias_of_efficient(bias, query, key):
    """Require a valid dtype, shape and last stride of bias: transformers/cuda/attention_backward.cu,
    _efficient_attention_backward.
    """
    if bias is None:
        return
    _require(bias.dtype == query.dtype, f"bias is {bias.dtype}, query {query.dtype}")
    _require(bias.shape == (*query.shape[:3], key.shape[2]), f"bias is {list(bias.shape)}")
    _aligned(bias, "bias")
    # The last load of the last row reads this far, for which preprocess_mask of transformers/attention.cpp pads.
    last = bias.storage_offset() + sum(s * (n - 1) for n, s in zip(bias.shape[:-1], bias.stride()[:-1], strict=True))
    end = (last + -(-key.shape[2] // 8) * 8) * bias.element_size()
    _require(end <= bias.untyped_storage().nbytes(), "the last row of bias is loaded past its storage")


def check_efficient(query, key, value, bias, *_, **__):
    for name, x in {"query": query, "key": key, "value": value}.items():
        _aligned(x, name)
        _require(x.shape[1] == query.shape[1], "no grouped heads: one stride of heads for all of q, k and v")
    _bias_of_efficient(bias, query, key)


def check_efficient_backward(grad_out, query, key, value, bias, out, lse, *_, **__):
    check_efficient(query, key, value, bias)
    _require(grad_out.dtype == out.dtype == query.dtype, "grad_out, out and query have different dtypes")
    heads, num_queries, head_dim = out.shape[1:]
    if out.dtype != F32:  # kKernelComputesDelta of kernel_backward.h:272 says so.
        # The stride of its rows is not passed: o_strideM() is head_dim_value * num_heads, kernel_backward.h:684.
        _require(num_queries == 1 or out.stride(2) == heads * head_dim, f"out has strides {out.stride()}")
        _require(out.stride(3) == 1, f"out has strides {out.stride()}")
    # lse is read in tiles of 32 rows (mma_from_smem.h:1602-1605), by strides of B and H (kernel_backward.h:1189-1194).
    _require(lse.dtype == F32 and lse.stride(2) == 1, f"lse is {lse.dtype} with strides {lse.stride()}")
    _require(lse.shape[2] == -(-num_queries // 32) * 32, f"lse has {lse.shape[2]} rows for {num_queries} queries")
    _require(lse.stride(1) % 8 == 0 and lse.stride(0) % 8 == 0, f"lse has strides {lse.stride()}, not multiples of 8")


def _sixteen_bits(query, key, value):
    """Require one dtype of 16 bits, dense head dims of a multiple of 8 up to 256, and heads in groups."""
    for x in (query, key, value):
        _require(x.dtype in (F16, BF16) and x.dtype == query.dtype, f"a tensor is {x.dtype}, query {query.dtype}")
        _require(x.stride(-1) == 1, f"a tensor has strides {x.stride()}")
        _require(x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, f"head dim {x.shape[-1]}")
        _require(query.shape[1] % x.shape[1] == 0, f"{x.shape[1]} key heads for {query.shape[1]} heads")


def check_flash(query, key, value, dropout_p=0.0, is_causal=False, *_, **__):
    """Check the conditions of transformers/cuda/flash_attn/flash_api.cpp, mha_fwd, and the causal diagonal of
    transformers/cuda/sdp_utils.cpp.
    """
    _sixteen_bits(query, key, value)
    _require(query.shape[-1] == key.shape[-1] == value.shape[-1], "different head dims")
    _require(not is_causal or query.shape[2] == key.shape[2], "its diagonal ends at the last key")


def check_flash_backward(
    grad_out, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *_, **__
):
    """Check the conditions of transformers/cuda/flash_attn/flash_api.cpp, mha_bwd."""
    check_flash(query, key, value, dropout_p, is_causal)
    _require(not 192 < query.shape[-1] <= 224, "not on sm86 to sm89, nor sm120 (transformers/cuda/sdp_utils.cpp)")
    _require(
        grad_out.dtype == out.dtype == query.dtype and grad_out.shape == out.shape == query.shape,
        "grad_out, out and query have different dtypes or shapes",
    )
    _require(lse.dtype == F32 and lse.shape == query.shape[:3] and lse.is_contiguous(), "lse is read by its pointer")
    _require(cum_seq_q is None and cum_seq_k is None, "defined, they mean sequences of different lengths")
    lengths = (query.shape[2], key.shape[2])
    _require((max_q, max_k) == lengths and dropout_p == 0, f"max_q {max_q}, max_k {max_k}, dropout {dropout_p}")


def check_cudnn(query, key, value, bias, *_, **__):
    """Check transformers/cuda/sdp_utils.cpp, can_use_cudnn_attention, and the bias by cudnn/MHA.cpp, build_graph."""
    _sixteen_bits(query, key, value)
    _require(key.shape[2] > 1, "a single key")
    if bias is not None:
        _require(bias.dtype == query.dtype, f"bias is {bias.dtype}: it is read as {query.dtype}")
        fits = bias.ndim == 4 and bias.shape[1] in (1, query.shape[1]) and bias.shape[3] == key.shape[2]
        _require(fits, f"bias is {list(bias.shape)}")
        _aligned(bias, "bias")


def check_cudnn_backward(grad_out, query, key, value, out, lse, seed, offset, bias, cum_seq_q, cum_seq_k, *_, **__):
    """Check cudnn/MHA.cpp, run_cudnn_SDP_bprop, which finds a cached graph by the strides of q, k, v and bias only."""
    check_cudnn(query, key, value, bias)
    _require(query.shape[-1] == value.shape[-1] <= 128, "cuda/sdp_utils.cpp, check_cudnn_d256_bprop_head_dim")
    for name, x in {"out": out, "grad_out": grad_out}.items():
        _require(x.dtype == query.dtype, f"{name} is {x.dtype}, query {query.dtype}")
        _require(x.stride() == torch.empty_like(query).stride(), f"{name} has strides {x.stride()}, not the forward's")
    _require(
        lse.dtype == F32 and lse.shape == (*query.shape[:3], 1) and lse.is_contiguous(),
        f"lse is {lse.dtype} of {list(lse.shape)} with strides {lse.stride()}",
    )
    _require(cum_seq_q is None and cum_seq_k is None, "defined, they mean sequences of different lengths")


PRECONDITIONS: dict[Any, Callable[..., None]] = {
    aten._scaled_dot_product_efficient_attention.default: check_efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: check_efficient_backward,
    aten._scaled_dot_product_flash_attention.default: check_flash,
    aten._scaled_dot_product_flash_attention_backward.default: check_flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: check_cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: check_cudnn_backward,
}
