"""The wrappers of other libraries, around stand-ins that have their signatures and compute by the formula."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from para_core import UnifiedAttnMode
from para_core.attention.backends import library
from para_core.attention.backends.flash3 import flash_attention_3
from para_core.attention.backends.flash4 import flash_attention_4
from para_core.attention.backends.sage import sage_attention
from tests.attention import fake_libraries
from tests.attention.cases import CAUSAL, cpu_mesh
from tests.attention.fake_libraries import PLACES, flash_attn_3, flash_attn_4, libraries_installed, sageattn
from tests.attention.one_device import make_qkv, relative_error
from tests.kernels.attention_cases import by_formula

WRAPPED = {
    "FlashAttention-3": lambda: flash_attention_3(flash_attn_3),
    "FlashAttention-3, earlier": lambda: flash_attention_3(fake_libraries.earlier_flash_attn_3),
    "FlashAttention-4": lambda: flash_attention_4(flash_attn_4),
    "SageAttention": lambda: sage_attention(sageattn, smooth_k=True),
}
# The numbers of queries and keys. The causal diagonal begins at the first key.
CALLS = [(13, 13, {}), (13, 13, {**CAUSAL, "scale": 0.3}), (7, 13, CAUSAL), (13, 7, CAUSAL)]


def make(queries, keys, heads=3):
    return make_qkv(queries, heads, S_k=keys, H_kv=3)


@pytest.mark.parametrize("name", WRAPPED)
def test_attention_of_another_library_equals_sdpa(name):
    for queries, keys, options in CALLS[:2]:  # In a mode, a causal rectangle is cut into squares.
        tensors = make(queries, keys)
        out, lse = WRAPPED[name]()(*tensors, **options)
        assert relative_error(out, F.scaled_dot_product_attention(*tensors, **options)) < 1e-5, (queries, keys)
        assert torch.allclose(lse, by_formula(*tensors, **options)[1].float(), atol=1e-5), (queries, keys)
    with pytest.raises(ValueError, match="7 queries and 13 keys"):
        WRAPPED[name]()(*make(7, 13), is_causal=True)


def test_library_is_imported_without_a_function(monkeypatch):
    module = ModuleType("sageattention")
    monkeypatch.setitem(sys.modules, "sageattention", module)
    module.sageattn = kernel = mock.create_autospec(sageattn, side_effect=sageattn)
    tensors = make(13, 13)
    with mock.patch.object(library, "signature", wraps=library.signature) as read:
        for _ in range(2):  # As a backend does in each call.
            out, _ = sage_attention(smooth_k=False)(*tensors)
    assert relative_error(out, F.scaled_dot_product_attention(*tensors)) < 1e-5
    assert read.call_count == 1 and kernel.call_args.kwargs["smooth_k"] is False
    module.sageattn = lambda q, k, v, is_causal=False, sm_scale=None, smooth_k=True: q  # As before 2.1.1.
    with pytest.raises(ImportError, match=r"2\.1\.1"):
        sage_attention()


def by_name(backends, ring, ulysses, compiled):
    """Return the attention of each call with 6 query heads and 3 key heads by each library."""
    results = {}
    for backend in backends:
        torch._dynamo.reset()
        attend = F.scaled_dot_product_attention
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
        for index, (queries, keys, options) in enumerate(CALLS[: 2 if compiled else 4]):
            mesh = cpu_mesh(ring, ulysses)
            with libraries_installed() as calls, torch.no_grad(), UnifiedAttnMode(mesh, backend=backend) as cp:
                shards = [cp.shard(x, dim=2) for x in make(queries, keys, heads=6)]
                out = attend(*shards, **options, enable_gqa=True)
                results[backend, index] = cp.gather(out, dim=2, sequence=cp.sequence(queries))
            assert list(calls) == [backend]
    return results


@pytest.mark.parametrize(
    ("backends", "ring", "ulysses", "compiled"),
    [(list(PLACES), 2, 1, False), (list(PLACES), 1, 2, False), (["flash3"], 2, 1, True), (["flash4"], 1, 1, False)],
)
def test_libraries_by_name_equal_one_device(rank_pool, backends, ring, ulysses, compiled):
    for results in rank_pool.run(by_name, ring * ulysses, backends, ring, ulysses, compiled):
        for (backend, index), out in results.items():
            queries, keys, options = CALLS[index]
            expected = F.scaled_dot_product_attention(*make(queries, keys, heads=6), **options, enable_gqa=True)
            assert relative_error(out, expected) < 1e-5, (backend, CALLS[index])


def gradients(backend):
    tensors = [x.requires_grad_() for x in make_qkv(13, 2, seed=0)]
    with libraries_installed() as calls, UnifiedAttnMode(cpu_mesh(2, 1), backend=backend) as cp:
        out = F.scaled_dot_product_attention(*[cp.shard(x, dim=2) for x in tensors])
        out.square().sum().backward()
    for x in tensors:
        dist.all_reduce(x.grad)
    return [x.grad for x in tensors], calls[backend]


@pytest.mark.parametrize(("backend", "computes"), [("flash3", True), ("sage", False)])
def test_a_gradient_is_exact(rank_pool, backend, computes):
    tensors = [x.requires_grad_() for x in make_qkv(13, 2, seed=0)]
    F.scaled_dot_product_attention(*tensors).square().sum().backward()
    for grads, calls in rank_pool.run(gradients, 2, backend):
        assert max(relative_error(grad, x.grad) for grad, x in zip(grads, tensors, strict=True)) < 1e-5
        assert (calls > 0) == computes


def refused():
    """Check the errors of each backend about the mode, a mask, the CPU and float32."""
    mesh, ways_out = cpu_mesh(2, 1), {"flash3": "hopper/", "flash4": "flash-attn-4", "sage": "2.1.1"}
    for backend in PLACES:
        with pytest.raises(ImportError) as missing:
            UnifiedAttnMode(mesh, backend=backend)
        assert ways_out[backend] in str(missing.value) and PLACES[backend][0] in str(missing.value)
        with libraries_installed(), UnifiedAttnMode(mesh, backend=backend) as cp:
            shards = [cp.shard(x, dim=2) for x in make_qkv(13, 2, seed=0)]
            with pytest.raises(RuntimeError, match=rf"(?s)(?=.*'{backend}').*attn_mask"):
                F.scaled_dot_product_attention(*shards, attn_mask=torch.ones(13, 13, dtype=torch.bool))
            for name, word in (("LIBRARY_DEVICES", "cpu"), ("LIBRARY_DTYPES", "float32")):
                with mock.patch.object(library, name, ()), pytest.raises(RuntimeError, match=word):
                    F.scaled_dot_product_attention(*shards)


def test_call_that_a_library_cannot_compute_is_refused(rank_pool):
    rank_pool.run(refused, 2)
