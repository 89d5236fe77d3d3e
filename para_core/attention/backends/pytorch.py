"""Forward of attention on one device, by each of PyTorch's backends, and PyTorch's choice among them.

The requirements of the fused kernels are taken from the sources of PyTorch 2.13. Paths in comments are
relative to ``aten/src/ATen/native``; ``mem_eff`` is ``transformers/cuda/mem_eff_attention``, which torch
installs among its headers.

:mod:`para_core.attention.local` calls these functions; the gradients are in :mod:`.pytorch_backward`. Tests:
tests/attention/test_local.py on a CPU, and tests/attention/test_cuda_paths.py for the requirements of GPU
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from para_core.attention.local_call import LocalAttentionCall, empty_output
from para_core.option_values import Backend
from para_core.torch_internals import (
    cudnn_attention,
    cudnn_sdp_enabled,
    efficient_attention,
    efficient_sdp_enabled,
    flash_attention,
    flash_attention_on_cpu,
    flash_sdp_enabled,
    fused_sdp_choice,
    math_sdp_enabled,
)

MATH = SDPBackend.MATH.value
FLASH = SDPBackend.FLASH_ATTENTION.value
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION.value
CUDNN = SDPBackend.CUDNN_ATTENTION.value
OF_PYTORCH: Mapping[Backend, int] = {"flash": FLASH, "efficient": EFFICIENT, "cudnn": CUDNN, "math": MATH}
# Backends that accept grouped heads (fewer key heads than query heads). Sources:
# transformers/cuda/flash_attn/flash_api.cpp (mha_fwd; mha_bwd sums gradients over the group),
# transformers/cuda/sdp_utils.cpp (can_use_cudnn_attention), transformers/sdp_utils_cpp.cpp (FlashAttention on
# a CPU).
_TAKE_GROUPED_HEADS = frozenset({FLASH, CUDNN})
# For each backend, a function that returns whether it is enabled; sdpa_kernel(...) and
# torch.backends.cuda.enable_*_sdp(...) can disable it. These are private functions of torch, because Dynamo
# treats them as constants, but not the public functions that call them.
SWITCHES: Mapping[str, Callable[[], bool]] = {
    "flash": flash_sdp_enabled,
    "efficient": efficient_sdp_enabled,
    "cudnn": cudnn_sdp_enabled,
    "math": math_sdp_enabled,
}


def additive_on_cpu(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return ``mask`` as an additive mask for FlashAttention on a CPU, which accepts any strides but no bool masks."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return query.new_empty(mask.shape).copy_(mask).log_()


def masked_scores(call: LocalAttentionCall) -> Tensor:
    """Return the masked scores ``[B, H, S_q, S_k]`` in the dtype of lse; -inf if a key is hidden from a query."""
    query, key, _, mask, is_causal, _ = call
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) * call.factor) @ key.to(dtype).transpose(-1, -2)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -inf)
    elif mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -inf)
    return scores


def _math(call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    scores = masked_scores(call)
    lse = torch.logsumexp(scores, dim=-1)
    # Do not use exp(scores - lse): if finfo.min masks a whole row of n keys, the log(n) in lse is lost to
    # rounding, and the weights would not sum to 1.
    weights = torch.softmax(scores, dim=-1)
    return empty_output(call.query, call.value).copy_(weights @ call.value.to(lse.dtype)), lse


def _flash(call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    query, key, value, mask, is_causal, scale = call
    if query.is_cpu:
        result: tuple[Tensor, Tensor]
        if mask is None and scale is None:
            # Each argument by keyword costs the host half a microsecond, so leave out what is the default.
            result = flash_attention_on_cpu(query, key, value, 0.0, is_causal)
        else:
            bias = additive_on_cpu(mask, query)
            result = flash_attention_on_cpu(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
        return result
    head_dim = query.shape[-1]
    if head_dim % 8:  # The kernel requires rows of a multiple of 16 bytes. SDPA pads the head dim, too.
        query, key, value, scale = pad_head_dim(query), pad_head_dim(key), pad_head_dim(value), call.factor
    out, lse, *_ = flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    if head_dim % 8:
        out = out[..., :head_dim]
    return out, lse


def pad_head_dim(x: Tensor) -> Tensor:
    """Return ``x`` with zeros at the end of its last dim, so that this is a multiple of 8."""
    return F.pad(x, (0, -x.shape[-1] % 8))


def _memory_efficient(call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = efficient_attention(
        *call[:3], call.expanded_bias, True, 0.0, call.is_causal, scale=call.scale
    )
    # The kernel pads lse to a multiple of 32 queries (mem_eff/kernel_forward.h, kAlignLSE).
    return out, lse[..., : call.query.shape[-2]]


def _cudnn(call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
    # Like SDPA, do not expand the mask over heads. The operator itself expands the other dims.
    out, lse, *_ = cudnn_attention(*call[:3], call.bias, True, 0.0, call.is_causal, scale=call.scale)
    # cuDNN returns lse as [B, H, S_q, 1] (cudnn/MHA.cpp, run_cudnn_SDP_fprop).
    return out, lse.view(call.query.shape[:-1])


# Each function returns ``out`` and ``lse`` of a call that :meth:`LocalAttentionCall.fold` returned. In a row
# without a key they may be anything: :func:`~para_core.attention.local.local_attention_with_lse` overwrites
# it.
FORWARD = {MATH: _math, FLASH: _flash, EFFICIENT: _memory_efficient, CUDNN: _cudnn}


def with_supported_heads(call: LocalAttentionCall, backend: int) -> LocalAttentionCall:
    """Return ``call`` with one key head per query head, unless ``backend`` accepts grouped heads."""
    if backend in _TAKE_GROUPED_HEADS:
        return call
    return call.expand_key_heads()


def choose_backend(call: LocalAttentionCall) -> int:
    """Return the ``SDPBackend`` value that SDPA would choose if key and value had as many heads as query."""
    query, key, value, mask, is_causal, scale = call
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
    """Return the error for a call that none of the enabled backends supports."""
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
