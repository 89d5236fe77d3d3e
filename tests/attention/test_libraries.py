"""The wrappers of other libraries, around stand-ins that have their signatures and compute by the formula."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention.backends import library
from para_core.attention.backends.flash3 import flash_attention_3
from para_core.attention.backends.flash4 import flash_attention_4
from para_core.attention.backends.sage import sage_attention
from tests.attention.fake_libraries import (
    PLACES,
    earlier_flash_attn_3,
    flash_attn_3,
    flash_attn_4,
    libraries_installed,
    sageattn,
)
from tests.attention.one_device import make_qkv, relative_error

WRAPPED = {
    "FlashAttention-3": lambda: flash_attention_3(flash_attn_3),
    "FlashAttention-3, earlier": lambda: flash_attention_3(earlier_flash_attn_3),
    "FlashAttention-4": lambda: flash_attention_4(flash_attn_4),
    "SageAttention": lambda: sage_attention(sageattn, smooth_k=True),
}


def ring(name, is_causal, scale):
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=WRAPPED[name]()) as cp:
        shards = [cp.shard(x, dim=2) for x in make_qkv(13, 2, seed=0)]
        return cp.gather(F.scaled_dot_product_attention(*shards, is_causal=is_causal, scale=scale), dim=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize(("is_causal", "scale"), [(False, None), (True, 0.3)])
def test_a_ring_of_another_librarys_attention_equals_one_device(rank_pool, name, is_causal, scale):
    expected = F.scaled_dot_product_attention(*make_qkv(13, 2, seed=0), is_causal=is_causal, scale=scale)
    for rank, out in enumerate(rank_pool.run(ring, 2, name=name, is_causal=is_causal, scale=scale)):
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"


def rectangle(name, ring, queries, keys):
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring)
    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=WRAPPED[name]()) as cp:
        query, (key, value) = make_qkv(queries, 2, seed=0)[0], make_qkv(keys, 2, seed=1)[1:]
        shards = [cp.shard(x, dim=2) for x in (query, key, value)]
        sequence = cp.sequence(queries)
        return cp.gather(F.scaled_dot_product_attention(*shards, is_causal=True), dim=2, sequence=sequence)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["FlashAttention-3", "FlashAttention-4", "SageAttention"])
@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(7, 13), (13, 7)])
def test_causal_diagonal_begins_at_first_key(rank_pool, name, ring, queries, keys):
    query, (key, value) = make_qkv(queries, 2, seed=0)[0], make_qkv(keys, 2, seed=1)[1:]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for rank, out in enumerate(rank_pool.run(rectangle, 2, name=name, ring=ring, queries=queries, keys=keys)):
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"


def test_options_are_passed_on():
    passed = {}

    def remember(*args, **options):
        passed.update(options)
        return sageattn(*args, **options)

    sage_attention(remember, smooth_k=False)(*make_qkv(13, 2, seed=0))
    assert passed["smooth_k"] is False


@pytest.mark.parametrize("wrapped", [WRAPPED["FlashAttention-3"], WRAPPED["SageAttention"]])
def test_a_mask_is_refused(wrapped):
    with pytest.raises(ValueError, match=r"attn_mask.* \[1, 1, 1, 13\]"):
        wrapped()(*make_qkv(13, 2, seed=0), attn_mask=torch.ones(1, 1, 1, 13, dtype=torch.bool))


def test_library_is_imported_without_a_function(monkeypatch):
    with pytest.raises(ImportError, match=r"flash_attn_interface\.flash_attn_func of FlashAttention-3"):
        flash_attention_3()
    module = ModuleType("sageattention")
    module.sageattn = sageattn
    monkeypatch.setitem(sys.modules, "sageattention", module)
    query, key, value = make_qkv(13, 2, seed=0)
    out, lse = sage_attention()(query, key, value)
    assert relative_error(out, F.scaled_dot_product_attention(query, key, value)) < 1e-5
    assert torch.allclose(lse, (query @ key.mT * query.shape[-1] ** -0.5).logsumexp(-1), atol=1e-5)


def test_library_without_lse_raises():
    with pytest.raises(RuntimeError, match="returned out alone"):
        flash_attention_3(lambda q, k, v, softmax_scale=None, causal=False: q)(*make_qkv(13, 2, seed=0))


# -- Backends by name.


def by_name(backend, ring, compiled):
    """Return the attention of 13 tokens with 6 query heads and 3 key heads, and how often the library was called."""
    torch._dynamo.reset()
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring)
    query, (key, value) = make_qkv(13, 6, seed=0)[0], make_qkv(13, 3, seed=1)[1:]
    attend = F.scaled_dot_product_attention
    attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    outs = []
    with libraries_installed() as calls, torch.no_grad(), UnifiedAttnMode(mesh, backend=backend) as cp:
        shards = [cp.shard(x, dim=2) for x in (query, key, value)]
        for is_causal in (False, True):
            outs.append(cp.gather(attend(*shards, is_causal=is_causal, scale=0.3, enable_gqa=True), dim=2))
    return outs, dict(calls)


def all_by_name(cases):
    return {case: by_name(*case) for case in cases}


def test_libraries_by_name_equal_one_device(rank_pool):
    query, (key, value) = make_qkv(13, 6, seed=0)[0], make_qkv(13, 3, seed=1)[1:]
    expected = [
        F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.3, enable_gqa=True)
        for is_causal in (False, True)
    ]
    cases = [(backend, ring, False) for backend in PLACES for ring in (1, 2)]
    cases += [("flash3", 2, True), ("flash4", 1, True), ("sage", 1, True)]
    for ranks in (1, 2):
        for results in rank_pool.run(all_by_name, ranks, cases):
            for (backend, ring, compiled), (outs, calls) in results.items():
                errors = [relative_error(*pair) for pair in zip(outs, expected, strict=True)]
                assert max(errors) < 1e-5, (ranks, backend, ring, compiled, errors)
                assert list(calls) == [backend], (ranks, backend, ring, compiled, calls)


def gradients(backend):
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    tensors = [x.requires_grad_() for x in make_qkv(13, 2, seed=0)]
    with libraries_installed() as calls, UnifiedAttnMode(mesh, backend=backend) as cp:
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


def refused(backend):
    """Return the errors about the mode, a mask, the CPU and float32."""
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    query, key, value = make_qkv(13, 2, seed=0)
    errors = []
    for at_once in (True, False):
        try:
            with ExitStack() as stack:
                if not at_once:
                    stack.enter_context(libraries_installed())
                UnifiedAttnMode(mesh, backend=backend)
        except ImportError as error:
            errors.append(str(error))
    with libraries_installed(), UnifiedAttnMode(mesh, backend=backend) as cp:
        shards = [cp.shard(x, dim=2) for x in (query, key, value)]
        for patched, mask in ((None, torch.ones(13, 13, dtype=torch.bool)), ("DEVICES", None), ("DTYPES", None)):
            with ExitStack() as stack, pytest.raises(RuntimeError) as raised:
                if patched is not None:
                    stack.enter_context(mock.patch.object(library, patched, ()))
                F.scaled_dot_product_attention(*shards, attn_mask=mask)
            errors.append(str(raised.value))
    return errors


@pytest.mark.sample(1)
@pytest.mark.parametrize(("backend", "install"), [("flash3", "hopper/"), ("flash4", "flash-attn-4"), ("sage", "2.1.1")])
def test_call_that_a_library_cannot_compute_is_refused(rank_pool, backend, install):
    for missing, masked, device, dtype in rank_pool.run(refused, 2, backend):
        assert install in missing
        assert PLACES[backend][0] in missing
        assert f"'{backend}'" in masked and "attn_mask" in masked
        assert "cpu" in device and "float32" in dtype


def test_an_earlier_sage_attention_without_lse_is_refused(monkeypatch):
    module = ModuleType("sageattention")
    module.sageattn = lambda q, k, v, is_causal=False, sm_scale=None, smooth_k=True: q
    monkeypatch.setitem(sys.modules, "sageattention", module)
    with pytest.raises(ImportError, match=r"2\.1\.1"):
        sage_attention()
