"""The wrappers of other libraries, around stand-ins that have their signatures and that compute by the formula."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention.libraries import flash_attention_3, sage_attention
from tests.attention.one_device import make_qkv, relative_error
from tests.kernels.attention_cases import by_formula


# Dao-AILab/flash-attention, hopper/flash_attn_interface.py, commit 01afd16.
def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """``[B, S, H, D]``; lse ``[B, H, S_q]``; the diagonal ends at the last query and the last key."""
    shift = k.shape[1] - q.shape[1]
    options = {"scale": softmax_scale, "is_causal": causal, "query_offset": shift}
    found, lse = by_formula(*[x.transpose(1, 2) for x in (q, k, v)], **options)
    out = found.transpose(1, 2).contiguous().to(q.dtype)
    return (out, lse.float()) if return_attn_probs else out


def earlier_flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    return flash_attn_func(q, k, v, softmax_scale, causal, return_attn_probs=True)


# thu-ml/SageAttention, sageattention/core.py, commit 0116592.
def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    assert tensor_layout == "HND" and not (is_causal and q.shape != k.shape)  # "only applicable when qo_len == kv_len"
    out, lse = by_formula(q, k, v, scale=sm_scale, is_causal=is_causal)
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


WRAPPED = {
    "FlashAttention-3": lambda: flash_attention_3(flash_attn_func),
    "FlashAttention-3, earlier": lambda: flash_attention_3(earlier_flash_attn_func),
    "SageAttention": lambda: sage_attention(sageattn, smooth_k=True),
}


def ring(name, is_causal, scale):
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=WRAPPED[name]()) as cp:
        shards = [cp.shard(x, dim=2) for x in make_qkv(13, 2, seed=0)]
        return cp.gather(F.scaled_dot_product_attention(*shards, is_causal=is_causal, scale=scale), dim=2)


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


@pytest.mark.parametrize("name", ["FlashAttention-3", "SageAttention"])
@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(7, 13), (13, 7)])
def test_causal_diagonal_begins_at_first_key(rank_pool, name, ring, queries, keys):
    query, (key, value) = make_qkv(queries, 2, seed=0)[0], make_qkv(keys, 2, seed=1)[1:]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for rank, out in enumerate(rank_pool.run(rectangle, 2, name=name, ring=ring, queries=queries, keys=keys)):
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"


def test_options_are_passed_on():
    seen = {}

    def remember(*args, **options):
        seen.update(options)
        return sageattn(*args, **options)

    sage_attention(remember, smooth_k=False)(*make_qkv(13, 2, seed=0))
    assert seen["smooth_k"] is False


@pytest.mark.parametrize("wrapped", [WRAPPED["FlashAttention-3"], WRAPPED["SageAttention"]])
def test_a_mask_is_refused(wrapped):
    with pytest.raises(ValueError, match=r"attn_mask.* \[1, 1, 1, 13\]"):
        wrapped()(*make_qkv(13, 2, seed=0), attn_mask=torch.ones(1, 1, 1, 13, dtype=torch.bool))


def test_the_library_is_imported_where_no_function_is_passed(monkeypatch):
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
