"""Scaled dot-product attention as CUDA computes it: the choice of a kernel, and what each kernel asks for.

The choice follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.13 for an H100. PyTorch itself pads
masks and head dims. What kernels ask for is in tests/attention/kernel_rules.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from tests.attention.kernel_rules import PRECONDITIONS
from tests.simulated_gpu.native import on_cpu, on_device
from tests.simulated_gpu.operators import aten, reads_and_writes, refuse_host_tensors, tensors_of
from tests.simulated_gpu.record import record

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Return the kernel that SDPA takes: the first of flash, efficient and cuDNN that is switched on and fits."""
    if mask is not None:
        refuse_host_tensors("scaled_dot_product_attention", [query, mask])
        if mask.dtype not in (torch.bool, query.dtype):
            # Some kernels raise, and cuDNN may read it as 16-bit: no caller can rely on it.
            record.fault(f"scaled_dot_product_attention: a mask of {mask.dtype} with a query of {query.dtype}")
    regular = query.ndim == 4 and query.dtype == key.dtype == value.dtype and 0 not in (*query.shape, *key.shape)
    if not regular or any(x.stride(-1) != 1 for x in (query, key, value)):
        return SDPBackend.MATH.value
    low, dims = query.dtype in (torch.float16, torch.bfloat16), (query.shape[-1], value.shape[-1])
    takes_heads = enable_gqa or key.shape[1] == query.shape[1]
    square = not causal or query.shape[2] == key.shape[2]
    fits = (
        low and mask is None and dims[0] == dims[1] <= 256 and square and takes_heads,
        (low or query.dtype == torch.float32)
        and key.shape[1] == query.shape[1]
        and all(dim % (8 if low else 4) == 0 for dim in dims),
        low and takes_heads and key.shape[2] > 1 and all(dim % 8 == 0 and dim <= 128 for dim in dims),
    )
    backends = torch.backends.cuda
    enabled = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled())
    taken = (kernel for kernel, fit, is_on in zip(FUSED, fits, enabled, strict=True) if fit and is_on)
    return next(taken, SDPBackend.MATH).value


# -- The fused operators. Arguments come by the names of their schemas.


def forward(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Return the outputs of a fused forward operator: out with ``[B, S, H, D]`` in memory, lse, and the rest."""
    query, key = given["query"], given["key"]
    with torch.no_grad():
        scores, _, _, v = _scores(given)
        lse = scores.logsumexp(-1)
        # A row without keys is zero.
        out = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0) @ v
    out = out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    seed, offset = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    if name == "efficient":
        # lse has a multiple of 32 rows, of which the last ones are whatever was in memory.
        lse = F.pad(lse, (0, -query.shape[2] % 32), value=float("nan"))
        return out, lse if given["compute_log_sumexp"] else lse[..., :0], seed, offset
    if name == "cudnn":
        lse = lse.unsqueeze(-1).contiguous()
        if query.shape == out.shape:
            out = torch.empty_like(on_cpu(query)).copy_(out)  # It has the strides of query.
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, torch.empty(0)


def backward(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Return the gradients of query, key, value and the mask, from the given out and lse as the kernels do."""
    grad, out, lse = (on_cpu(given[part]).float() for part in (_GRAD[name], "out", "logsumexp"))
    lse = lse.view(*lse.shape[:2], -1)[..., : out.shape[2]]  # cuDNN has a last dim of 1, efficient has more rows.
    scores, q, k, v = _scores(given)
    scale = q.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    slope = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    of_keys = [slope.transpose(-1, -2) @ q * scale, weights.transpose(-1, -2) @ grad]
    of_keys = [x.unflatten(1, (given["key"].shape[1], -1)).sum(2) for x in of_keys]
    dtype = given["query"].dtype
    grads = [x.to(dtype) for x in (slope @ k * scale, *of_keys)]
    if name == "efficient":
        wanted = given["grad_input_mask"][3] and given["attn_bias"] is not None
        grads.append(slope.to(dtype) if wanted else None)
    return tuple(grads)


_GRAD = {"flash": "grad_out", "efficient": "grad_out_", "cudnn": "grad_out"}


def _scores(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return scores, queries, keys and values in float32 on the CPU, each key head once per query head."""
    q, k, v = (on_cpu(given[part]).float() for part in ("query", "key", "value"))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    scores = q @ k.transpose(-1, -2) * scale
    if given["is_causal"]:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    bias = given.get("attn_bias")
    return (scores if bias is None else scores + on_cpu(bias).float()), q, k, v


def _operator(name: str, suffix: str, operator: Any) -> Callable[..., Any]:
    """Return what runs ``operator`` after the checks of its preconditions."""

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = operator._schema.arguments
        given = {x.name: x.default_value for x in arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        refuse_host_tensors(operator, list(tensors_of(given)))
        try:
            PRECONDITIONS[operator](*args, **kwargs)
        except AssertionError as error:
            record.fault(f"{operator}: {error}")
        with reads_and_writes(operator, args, kwargs) as made:
            index = given["query"].device.index
            outputs = backward(name, given) if suffix else forward(name, given)
            made.append(tuple(on_device(x, index) if isinstance(x, Tensor) else x for x in outputs))
        record.count("launches", name + suffix)
        record.counts[f"kernel: {name}{suffix}"] += 1
        return made[0]

    return run


def rules() -> dict[str, Callable[..., Any]]:
    """Return what computes each fused operator, by its name in the namespace ``aten``."""
    parts = itertools.product(_GRAD, ("", "_backward"))
    names = {f"_scaled_dot_product_{name}_attention{suffix}": (name, suffix) for name, suffix in parts}
    return {full: _operator(*of_name, getattr(aten, full).default) for full, of_name in names.items()}
