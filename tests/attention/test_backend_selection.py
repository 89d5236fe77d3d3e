"""The choice of a backend for attention on one device, including the Triton kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention import local
from para_core.attention.attention_options import AttnOptions
from para_core.attention.backend_selection import require_backend, resolve_backend
from para_core.attention.backends import triton_backend
from para_core.attention.local import (
    continued_attention,
    local_attention,
    local_attention_backward,
    local_attention_with_lse,
)
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.merge import Merged
from para_core.distributed.mesh import one_rank
from tests.attention.one_device import make_qkv, relative_error
from tests.kernels.attention_cases import by_formula, check_lse, error, make
from tests.kernels.interpreted import interpreted

ALL_ON = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# -- A backend that is named.


@pytest.mark.parametrize(("backend", "fused"), [("flash", True), ("math", False)])
def test_the_named_backend_of_pytorch_computes_forward_and_backward(backend, fused):
    tensors = make(5, 7)
    with Names() as operators:
        out, lse = local_attention_with_lse(LocalAttentionCall(*tensors), backend=backend)
        local_attention_backward(LocalAttentionCall(*tensors), out, out, lse, backend=backend)
        local_attention(LocalAttentionCall(*tensors), backend=backend)
    kernels = [name for name in operators.names if "flash_attention" in name]
    assert len(kernels) == (3 if fused else 0)
    assert error(out, by_formula(*tensors)[0]) < 1e-6


def test_forbidden_backend_raises():
    query, key, value = make(5, 7)
    with sdpa_kernel([SDPBackend.MATH]):
        assert resolve_backend("math", query, value, masked=False) == "math"
        for function in (local_attention, local_attention_with_lse, continued_attention):
            so_far = (Merged(),) if function is continued_attention else ()
            with pytest.raises(RuntimeError, match=r"flash.* sdpa_kernel\("):
                function(*so_far, LocalAttentionCall(query, key, value), backend="flash")
        with pytest.raises(RuntimeError, match=r"flash.* sdpa_kernel\("):
            require_backend(query, value, backend="flash")


def test_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match=r"xformers.*flash, .*triton"):
        AttnOptions(backend="xformers")


def test_triton_without_gpu_raises():
    query, key, value = make(5, 7)
    with pytest.raises(RuntimeError, match=r"triton.* CUDA .*CPU.*TRITON_INTERPRET=1"):
        local_attention(LocalAttentionCall(query, key, value), backend="triton")
    with pytest.raises(RuntimeError, match=r"triton.*float32.* 256.* torch\.float64 .*16"):
        require_backend(query.double(), value.double(), backend="triton")
    with pytest.raises(RuntimeError, match=r"triton.*float32.* 256.* torch\.float32 .*264"):
        require_backend(query.new_empty(1, 1, 1, 264), value, backend="triton")


def test_missing_triton_package_is_named(monkeypatch):
    monkeypatch.setattr(triton_backend, "has_triton", lambda: False)
    query, key, value = make(5, 7)
    with pytest.raises(RuntimeError, match=r'pip install "triton>=3\.5"'):
        local_attention(LocalAttentionCall(query, key, value), backend="triton")


def test_flash_on_cuda_refuses_masks_and_rectangles():
    query, key, value = (x.half().to("meta") for x in make(5, 7))  # The meta device runs the kernels of CUDA.
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool, device="meta")
    for function in (local_attention, local_attention_with_lse):
        with pytest.raises(RuntimeError, match=r"flash.* attn_mask"):
            function(LocalAttentionCall(query, key, value, mask), backend="flash")
        with pytest.raises(RuntimeError, match=r"flash.* 5 .*7 "):
            function(LocalAttentionCall(query, key, value, is_causal=True), backend="flash")
    with pytest.raises(RuntimeError, match=r"flash.* attn_mask"):
        require_backend(query, value, mask=mask, backend="flash")
    require_backend(query, value, backend="flash")
    out, _ = local_attention_with_lse(
        LocalAttentionCall(query, key[:, :, :5], value[:, :, :5], is_causal=True), backend="flash"
    )
    assert out.shape == query.shape


@pytest.mark.parametrize("compiled", [False, True])
def test_the_named_backend_computes_on_one_rank_too(monkeypatch, compiled):
    """Check a named backend on one rank with a mask, shared heads, more keys than queries, and gradients."""
    query, key, value = make(5, 7, key_heads=1)
    query.requires_grad_()
    mask = torch.ones(5, 7, dtype=torch.bool).tril(1)
    by_math = []
    for table in (local.FORWARD, local.BACKWARD):
        function = table[local.OF_PYTORCH["math"]]
        counted = lambda *args, function=function: by_math.append(function) or function(*args)  # noqa: E731
        monkeypatch.setitem(table, local.OF_PYTORCH["math"], counted)

    def call(*tensors):
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.3, enable_gqa=True)

    grads = []
    for backend, expected in (("flash", 0), ("math", 2)):
        by_math.clear()
        with UnifiedAttnMode(one_rank("cpu"), backend=backend):
            out = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(query, key, value)
            grads += torch.autograd.grad(out.sum(), query)
        assert len(by_math) == expected
        assert error(out.detach(), by_formula(query.detach(), key, value, mask=mask, scale=0.3)[0]) < 1e-6
    assert relative_error(*grads) < 1e-5


def test_triton_runs_on_one_rank_or_raises():
    tensors = [x.half() for x in make(5, 7)]
    with torch.no_grad(), UnifiedAttnMode(one_rank("cpu"), backend="triton"):
        with pytest.raises(RuntimeError, match=r"triton.* CUDA .*CPU"):
            F.scaled_dot_product_attention(*tensors)
        with interpreted(), Names() as operators:
            out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        with interpreted():
            call = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
            assert torch.equal(call(*tensors, is_causal=True), out)
    assert "para_core.triton_attention.default" in operators.names
    assert error(out, by_formula(*tensors, is_causal=True)[0]) < 1e-3


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_cuda_backends_raise_on_cpu(backend, with_gradient):
    query, key, value = make(5, 7)
    query.requires_grad_(with_gradient)
    with (
        UnifiedAttnMode(one_rank("cpu"), backend=backend),
        pytest.raises(RuntimeError, match=rf"{backend}.* CUDA .*CPU"),
    ):
        F.scaled_dot_product_attention(query, key, value)


# -- The Triton kernel behind the functions of this package.


@pytest.mark.parametrize("kind", ["none", "keys", "rows"])
def test_triton_out_and_lse_fit_pytorch_backward(kind):
    tensors = make(5, 20, key_heads=1)
    mask = None
    if kind != "none":
        mask = torch.rand(2, 1, 1 if kind == "keys" else 5, 20, generator=torch.Generator().manual_seed(1)) > 0.4
        mask[0, ..., 12:] = False
        mask[1] = mask[1] & (kind == "rows")  # With a mask of keys the second sample sees no key.
    with interpreted():
        out, lse = local_attention_with_lse(LocalAttentionCall(*tensors, mask=mask), backend="triton")
        assert torch.equal(local_attention(LocalAttentionCall(*tensors, mask=mask), backend="triton"), out)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    exact_out, exact_lse = by_formula(*leaves, mask=mask)
    assert error(out, exact_out.detach()) < 1e-6
    check_lse(lse, exact_lse.detach(), 1e-5)
    grad_out = torch.ones_like(out)
    if kind != "keys":
        exact = torch.autograd.grad(exact_out, leaves, grad_out.double())
        gradients = local_attention_backward(
            LocalAttentionCall(*tensors, mask=mask), grad_out, out, lse, backend="triton"
        )
        for grad, expected in zip(gradients[:3], exact, strict=True):
            assert error(grad, expected) < 1e-5


def test_continued_triton_equals_merged_pytorch():
    query, key, value = (x.half() for x in make(5, 20, batch=1))
    parts = [(key[:, :, start:end], value[:, :, start:end]) for start, end in ((0, 8), (8, 8), (8, 20))]
    with interpreted():
        merged, so_far = Merged(), Merged()
        for index, part in enumerate(parts):
            continued_attention(so_far, LocalAttentionCall(query, *part), backend="triton", is_last=index == 2)
            continued_attention(merged, LocalAttentionCall(query, *part))
    assert so_far.out.dtype == torch.float16
    exact_out, exact_lse = by_formula(query, key, value)
    # Merging rounds each part to float16 first. Without merging, the weights are rounded once.
    assert error(so_far.out, exact_out) <= 1.1 * error(merged.out.half(), exact_out)
    check_lse(so_far.lse, exact_lse, 1e-5)


def ring(is_causal, masked):
    query, key, value = make_qkv(13, 2, seed=0)
    mask = torch.rand(1, 1, 1, 13, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    with interpreted(), torch.no_grad(), UnifiedAttnMode(mesh, backend="triton") as cp:
        shards = [cp.shard(x, dim=2) for x in (query, key, value)]
        options = {"attn_mask": mask, "is_causal": is_causal}
        return cp.gather(F.scaled_dot_product_attention(*shards, **options), dim=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("is_causal", "masked"), [(False, False), (True, False), (False, True)])
def test_a_ring_of_triton_kernels_equals_one_device(rank_pool, is_causal, masked):
    query, key, value = make_qkv(13, 2, seed=0)
    mask = torch.rand(1, 1, 1, 13, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
    for rank, out in enumerate(rank_pool.run(ring, 2, is_causal=is_causal, masked=masked)):
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"
