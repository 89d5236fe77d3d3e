"""Which backend computes attention on one device, and the Triton kernel as one of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.interpreted import interpreted
from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention import choice
from para_core.attention.choice import chosen
from para_core.attention.local import (
    continued_attention,
    local_attention,
    local_attention_backward,
    local_attention_with_lse,
    require_backend,
)
from para_core.attention.merge import Merged
from para_core.attention.options import AttnOptions
from tests.attention.one_device import make_qkv, relative_error
from tests.kernels.attention_cases import by_formula, check_lse, error, make

ALL_ON = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# -- a backend that is named


@pytest.mark.parametrize(("backend", "fused"), [("flash", True), ("math", False)])
def test_the_named_backend_of_pytorch_computes_forward_and_backward(backend, fused):
    tensors = make(5, 7)
    with Names() as names:
        out, lse = local_attention_with_lse(*tensors, backend=backend)
        local_attention_backward(out, *tensors, out, lse, backend=backend)
        local_attention(*tensors, backend=backend)
    kernels = [name for name in names.seen if "flash_attention" in name]
    assert len(kernels) == (3 if fused else 0)
    assert error(out, by_formula(*tensors)[0]) < 1e-6


def test_a_named_backend_that_the_users_switches_forbid_is_an_error():
    query, key, value = make(5, 7)
    with sdpa_kernel([SDPBackend.MATH]):
        assert chosen("math", query, value, masked=False) == "math"
        for function in (local_attention, local_attention_with_lse, continued_attention):
            arguments = (Merged(), query, key, value) if function is continued_attention else (query, key, value)
            with pytest.raises(RuntimeError, match="backend='flash' is switched off by sdpa_kernel"):
                function(*arguments, backend="flash")
        with pytest.raises(RuntimeError, match="backend='flash' is switched off"):
            require_backend(query, value, backend="flash")


def test_a_backend_that_nobody_has_is_an_error():
    with pytest.raises(
        ValueError, match="backend is 'xformers'; expected one of flash, efficient, cudnn, math, triton"
    ):
        AttnOptions(backend="xformers")


def test_triton_without_a_gpu_is_an_error_that_says_so():
    query, key, value = make(5, 7)
    with pytest.raises(RuntimeError, match="needs a CUDA device, and query is on the CPU"):
        local_attention(query, key, value, backend="triton")
    with pytest.raises(RuntimeError, match=r"this is torch\.float64 with 16"):
        require_backend(query.double(), value.double(), backend="triton")
    with pytest.raises(RuntimeError, match=r"this is torch\.float32 with 264"):
        require_backend(query.new_empty(1, 1, 1, 264), value, backend="triton")


def test_triton_that_is_not_installed_is_an_error_that_names_the_package(monkeypatch):
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    query, key, value = make(5, 7)
    with pytest.raises(RuntimeError, match=r'pip install "triton>=3\.5"'):
        local_attention(query, key, value, backend="triton")


# -- the table


def test_without_a_measurement_pytorch_chooses():
    assert not choice.FASTEST
    query, _, value = make(5, 7)
    assert chosen(None, query.bfloat16(), value.bfloat16(), masked=False) is None


def test_a_row_of_the_table_holds_for_its_device_while_the_user_has_switched_nothing_off(monkeypatch):
    monkeypatch.setattr(choice, "FASTEST", {(90, 16, False): "cudnn", (90, 16, True): "triton"})
    monkeypatch.setattr(choice, "_arch", lambda device: 90)
    query, _, value = (x.bfloat16() for x in make(5, 7))
    with sdpa_kernel(ALL_ON):
        assert chosen(None, query, value, masked=False) == "cudnn"
        assert chosen(None, query, value, masked=False, is_causal=True) == "triton"
        assert chosen("math", query, value, masked=False) == "math"
        # A mask may be one that the fastest does not take, but that the Triton kernel does.
        assert chosen(None, query, value, masked=True) is None
        assert chosen(None, query, value, masked=True, is_causal=True) == "triton"
        assert chosen(None, query.float(), value.float(), masked=False) is None
    with sdpa_kernel(ALL_ON[1:]):
        assert chosen(None, query, value, masked=False) is None
    monkeypatch.setattr(choice, "_arch", lambda device: 80)
    assert chosen(None, query, value, masked=False) is None


# -- the Triton kernel behind the functions of this package


@pytest.mark.parametrize("kind", ["none", "keys", "rows"])
def test_the_triton_kernel_gives_out_and_lse_and_pytorchs_backward_takes_them(kind):
    tensors = make(5, 20, key_heads=1)
    mask = None
    if kind != "none":
        mask = torch.rand(2, 1, 1 if kind == "keys" else 5, 20, generator=torch.Generator().manual_seed(1)) > 0.4
        mask[0, ..., 12:] = False
        mask[1] = mask[1] & (kind == "rows")  # with a mask of keys the second sample sees nothing
    with interpreted():
        out, lse = local_attention_with_lse(*tensors, mask=mask, backend="triton")
        assert torch.equal(local_attention(*tensors, mask=mask, backend="triton"), out)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    exact_out, exact_lse = by_formula(*leaves, mask=mask)
    assert error(out, exact_out.detach()) < 1e-6
    check_lse(lse, exact_lse.detach(), 1e-5)
    grad_out = torch.ones_like(out)
    if kind != "keys":
        exact = torch.autograd.grad(exact_out, leaves, grad_out.double())
        found = local_attention_backward(grad_out, *tensors, out, lse, mask=mask, backend="triton")
        for grad, expected in zip(found[:3], exact, strict=True):
            assert error(grad, expected) < 1e-5


def test_continuing_with_the_triton_kernel_equals_merging_what_pytorch_computes():
    query, key, value = (x.half() for x in make(5, 20, batch=1))
    parts = [(key[:, :, start:end], value[:, :, start:end]) for start, end in ((0, 8), (8, 8), (8, 20))]
    with interpreted():
        found, so_far = Merged(), Merged()
        for place, part in enumerate(parts):
            continued_attention(so_far, query, *part, backend="triton", is_last=place == 2)
            continued_attention(found, query, *part)
    assert so_far.out.dtype == torch.float16
    exact_out, exact_lse = by_formula(query, key, value)
    # Merged, each part is rounded to float16 beforehand; here the weights are, once.
    assert error(so_far.out, exact_out) <= 1.1 * error(found.out.half(), exact_out)
    check_lse(so_far.lse, exact_lse, 1e-5)


def ring(is_causal, masked):
    query, key, value = make_qkv(13, 2, seed=0)
    mask = torch.rand(1, 1, 1, 13, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    with interpreted(), torch.no_grad(), UnifiedAttnMode(mesh, backend="triton") as cp:
        shards = [cp.shard(x, dim=2) for x in (query, key, value)]
        options = {"attn_mask": mask, "is_causal": is_causal}
        return cp.gather(F.scaled_dot_product_attention(*shards, **options), dim=2)


@pytest.mark.parametrize(("is_causal", "masked"), [(False, False), (True, False), (False, True)])
def test_a_ring_of_triton_kernels_equals_one_device(rank_pool, is_causal, masked):
    query, key, value = make_qkv(13, 2, seed=0)
    mask = torch.rand(1, 1, 1, 13, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
    for rank, out in enumerate(rank_pool.run(ring, 2, is_causal=is_causal, masked=masked)):
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"
