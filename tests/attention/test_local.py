"""Attention on one device, with each backend that a CPU has, compared with float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core.attention.local import local_attention, local_attention_backward, local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall
from tests.attention.one_device import make_qkv, relative_error
from tests.kernels.attention_cases import by_formula
from tests.kernels.interpreted import interpreted

B, H, S_Q, S_K, D = 2, 6, 7, 9, 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
INFINITY = float("inf")


def make_masks(dtype):
    """Return masks by name. In some the third row of the first sample sees no key, or a number hides all its keys."""
    torch.manual_seed(1)
    shown = torch.rand(B, 1, S_Q, S_K) > 0.4
    shown[0, :, 2] = False
    large = torch.zeros(B, 1, S_Q, S_K, dtype=torch.float64)
    # Numbers of float32 end at 3e38. In float16, any number that hides rounds scores.
    large[:, :, 2] = large[:, :, 4, 1:] = 0.0 if dtype == torch.float16 else -1e300
    large[:, :, 5] = -INFINITY
    return {
        "none": None,
        "bool": shown,
        "-inf": torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, -INFINITY),
        "float": torch.randn(B, 1, 1, S_K).to(dtype),
        "float64": torch.randn(B, H, S_Q, S_K, dtype=torch.float64),
        "per query": torch.randn(1, H, S_Q, 1).to(dtype),
        "large": large,
    }


def check(actual, expected, dtype, what):
    assert relative_error(actual.detach(), expected.detach()) < TOLERANCE[dtype], what


@pytest.mark.parametrize(
    ("backend", "dtype", "key_heads"),
    [*product(["FLASH_ATTENTION", "MATH"], TOLERANCE, [6, 2]), ("triton", torch.float32, 2)],
)
def test_out_lse_and_gradients_equal_float64(backend, dtype, key_heads):
    with interpreted() if backend == "triton" else sdpa_kernel([getattr(SDPBackend, backend)]):
        for (kind, mask), is_causal, scale in product(make_masks(dtype).items(), (False, True), (None, 0.7)):
            if backend != "triton" or (kind in ("none", "bool") and scale):
                options = {"mask": mask, "is_causal": is_causal, "scale": scale}
                named = backend if backend == "triton" else None
                check_call(kind, make_qkv(S_Q, H, D, S_k=S_K, H_kv=key_heads, dtype=dtype), named, options)


def check_call(kind, qkv, backend, options):
    dtype, what = qkv[0].dtype, f"mask {kind}, {options}"
    leaves = [x.double().requires_grad_() for x in qkv]
    exact_out, exact_lse = by_formula(*leaves, **options)
    call = LocalAttentionCall(*qkv, **options)
    out, lse = local_attention_with_lse(call, backend)
    check(out, exact_out, dtype, what)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(lse > -INFINITY, exact_lse > -INFINITY), what
    if kind == "large":  # Below the range of float32, lse is a large number too.
        return
    finite = exact_lse > -INFINITY
    check(lse[finite], exact_lse[finite], dtype, what)
    if kind not in ("bool", "-inf"):  # SDPA's own rows without a key may be NaN.
        check(local_attention(call, backend), exact_out, dtype, what)
    grad_out = torch.randn_like(out)
    exact = torch.autograd.grad(exact_out, leaves, grad_out.double())
    *grads, of_mask = local_attention_backward(call, grad_out, out, lse, backend=backend)
    assert of_mask is None
    for grad, expected, x in zip(grads, exact, qkv, strict=True):
        assert grad.dtype == x.dtype
        check(grad, expected, dtype, what)
