"""Inputs of SDPA other than four dims of one dtype, and errors for the refused ones."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core import UnifiedAttnMode
from para_core.attention.sdpa_call import SdpaCall
from tests.attention.cases import MESHES
from tests.attention.one_device import make_qkv, relative_error


def make_mesh(ring, ulysses):
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def own(mesh, tensors):
    ranks = mesh.size()
    return [x.chunk(ranks, dim=-2)[mesh.get_rank()] for x in tensors]


def attend_oddly(ring, ulysses):
    mesh = make_mesh(ring, ulysses)
    q, k, v = own(mesh, make_qkv(12, 4))
    outs = {}
    with torch.no_grad(), UnifiedAttnMode(mesh):
        outs["numpy scale"] = F.scaled_dot_product_attention(q, k, v, scale=np.float64(0.3))
        outs["tensor scale"] = F.scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=torch.tensor(0.3))
        outs["one key head"] = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1])
        outs["one query"] = F.scaled_dot_product_attention(q[:1, :1], k, v)
        outs["one key of grouped heads"] = F.scaled_dot_product_attention(q, k[:1, :2], v[:1, :2], enable_gqa=True)
        outs["2-D"] = F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0])
        outs["meta"] = F.scaled_dot_product_attention(*[x.to("meta") for x in (q, k, v)]).shape
        with torch.autocast("cpu", torch.bfloat16):
            outs["autocast"] = F.scaled_dot_product_attention(q, k, v.bfloat16())
            outs["autocast mask"] = F.scaled_dot_product_attention(q, k, v.bfloat16(), torch.ones(12, 12).tril().log())
            doubles = [x.double() for x in (q, k, v)]
            outs["autocast float64"] = F.scaled_dot_product_attention(*doubles)
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_inputs_of_sdpa_are_accepted(rank_pool, ring, ulysses):
    q, k, v = make_qkv(12, 4)
    scaled = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    plain = F.scaled_dot_product_attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        double = F.scaled_dot_product_attention(*[x.double() for x in (q, k, v)])
    assert double.dtype == torch.float64
    broadcast = {
        "one key head": F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
        "one query": F.scaled_dot_product_attention(q[:1, :1], k, v),
        "one key of grouped heads": F.scaled_dot_product_attention(
            q, *[x[:1, :2].repeat_interleave(2, dim=1) for x in (k, v)]
        ),
    }
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for rank, outs in enumerate(rank_pool.run(attend_oddly, ring * ulysses, ring, ulysses)):
        local = [x.chunk(ring * ulysses, dim=2)[rank] for x in (scaled, plain, double, causal)]
        assert relative_error(outs["numpy scale"], local[0]) < 1e-5
        assert relative_error(outs["tensor scale"], local[0]) < 1e-5
        for name, whole in broadcast.items():
            assert relative_error(outs[name], whole.chunk(ring * ulysses, dim=2)[rank]) < 1e-5
        assert relative_error(outs["2-D"], local[1][0, 0]) < 1e-5
        assert outs["meta"] == local[1].shape
        assert outs["autocast"].dtype == torch.bfloat16
        # Queries, keys, values and the result have 8 bits of mantissa.
        assert relative_error(outs["autocast"].float(), local[1]) < 1e-2
        assert relative_error(outs["autocast mask"].float(), local[3]) < 1e-2
        assert outs["autocast float64"].dtype == torch.float64
        assert relative_error(outs["autocast float64"], local[2]) < 1e-12


def attend_with_one_mask_value(ring, ulysses, mask):
    mesh = make_mesh(ring, ulysses)
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        parts = [cp.shard(x, dim=2) for x in make_qkv(3, 4)]
        return cp.gather(F.scaled_dot_product_attention(*parts, attn_mask=mask), dim=2)


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2)])
def test_mask_of_one_entry_with_an_empty_rank_is_accepted(rank_pool, ring, ulysses):
    mask = torch.tensor([0.0, 1.0, -1.0, 2.0]).view(1, 4, 1, 1)
    expected = F.scaled_dot_product_attention(*make_qkv(3, 4), attn_mask=mask)
    for out in rank_pool.run(attend_with_one_mask_value, 4, ring, ulysses, mask):
        assert relative_error(out, expected) < 1e-5


def small_masks(S):
    """Return masks of at most two dims that are equal for all queries, float and bool."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(), (1,), (S,), (1, S), (1, 1)]
    floats = [torch.randn(shape, generator=generator) for shape in shapes]
    return floats + [x > -1 for x in floats]


def attend_with_small_masks(ring, ulysses, S):
    mesh, outs = make_mesh(ring, ulysses), []
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        parts = [cp.shard(x, dim=2) for x in make_qkv(S, 4)]
        for mask in small_masks(S):
            outs.append(cp.gather(F.scaled_dot_product_attention(*parts, mask), dim=2))
            if mask.ndim == 1 and len(mask) == S and mesh.size() < S:
                own = cp.shard(mask, dim=0)
                outs.append(cp.gather(F.scaled_dot_product_attention(*parts, own), dim=2))
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("S", [2, 3, 4, 5])
def test_masks_without_rows_with_few_tokens_are_accepted(rank_pool, ring, ulysses, S):
    ranks, expected = ring * ulysses, []
    for mask in small_masks(S):
        whole = F.scaled_dot_product_attention(*make_qkv(S, 4), mask.expand(S, S))
        expected += [whole] * (1 + (mask.ndim == 1 and len(mask) == S and ranks < S))
    for outs in rank_pool.run(attend_with_small_masks, ranks, ring, ulysses, S):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5


def ask_one_rank_for_weights():
    mesh = make_mesh(2, 1)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        cp.intercepted = True
        x = cp.shard(torch.randn(1, 6, 8), dim=1)
        with pytest.raises(ValueError, match="need_weights=False"):
            module(x, x, x, need_weights=mesh.get_rank() == 1)
        with pytest.raises(ValueError, match="sparse"):
            mask = torch.ones(3, 6).to_sparse()
            F.scaled_dot_product_attention(*[x[None]] * 3, attn_mask=mask)


def test_unsupported_option_on_one_rank_raises_on_all(rank_pool):
    rank_pool.run(ask_one_rank_for_weights, 2)


def refuse(assume_equal):
    mesh = make_mesh(1, 2)
    q, k, v = own(mesh, make_qkv(12, 4))
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    distributed = DTensor.from_local(q, mesh["ulysses"], [Replicate()])
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal) as mode:
        mode.intercepted = True
        with pytest.raises(TypeError, match=r"query.* nested tensor"):
            mode.attend(SdpaCall(nested, nested, nested))
        with pytest.raises(TypeError, match=r"key is a DTensor.*x\.to_local\(\)"):
            mode.attend(SdpaCall(q, distributed, v))
        with pytest.raises(TypeError, match=r"value.* list"):
            mode.attend(SdpaCall(q, k, [1.0]))


@pytest.mark.parametrize("assume_equal", [False, True])
def test_nested_and_distributed_tensors_are_refused_by_a_sentence(rank_pool, assume_equal):
    rank_pool.run(refuse, 2, assume_equal)


def lay_out(ring, ulysses, memory):
    mesh = make_mesh(ring, ulysses)
    q, k, v = own(mesh, make_qkv(12, 4))
    if memory == "as a model gives it":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    outs = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad), UnifiedAttnMode(mesh):
            out = F.scaled_dot_product_attention(q.clone().requires_grad_(grad), k, v)
            outs.append(out.transpose(1, 2).view(2, -1, 4 * 8).detach())
            mask = torch.ones(1, 1, 1, 12, dtype=torch.bool)
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=True).transpose(1, 2).view(2, -1, 4 * 8)
    return outs


@pytest.mark.sample(3)
@pytest.mark.parametrize("memory", ["as a model gives it", "contiguous"])
@pytest.mark.parametrize(("ring", "ulysses"), [*MESHES[::2], (1, 4)])  # On the last mesh each rank has one head.
def test_result_has_strides_that_models_expect(rank_pool, ring, ulysses, memory):
    whole = F.scaled_dot_product_attention(*make_qkv(12, 4)).transpose(1, 2).reshape(2, 12, 32)
    for rank, outs in enumerate(rank_pool.run(lay_out, ring * ulysses, ring, ulysses, memory)):
        for out in outs:
            assert relative_error(out, whole.chunk(ring * ulysses, dim=1)[rank]) < 1e-5


def pin_a_backend(ring, ulysses, heads, assume_equal):
    mesh = make_mesh(ring, ulysses)
    q, k, v = own(mesh, make_qkv(12, heads))
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal):
        F.scaled_dot_product_attention(q, k, v)  # The mode knows this sequence before the switch.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            try:
                F.scaled_dot_product_attention(q, k, v)
            except RuntimeError as error:
                message = str(error)
        after = F.scaled_dot_product_attention(q, k, v)
    return message, after


@pytest.mark.sample(2)
@pytest.mark.parametrize("assume_equal", [False, True])
@pytest.mark.parametrize(("ring", "ulysses", "heads"), [(1, 2, 1), (1, 4, 3), (2, 1, 2)])
def test_missing_pinned_backend_raises_on_idle_ranks(rank_pool, ring, ulysses, heads, assume_equal):
    whole = F.scaled_dot_product_attention(*make_qkv(12, heads))
    for rank, (message, after) in enumerate(
        rank_pool.run(pin_a_backend, ring * ulysses, ring, ulysses, heads, assume_equal)
    ):
        assert re.search(r"sdpa_kernel\(.* EFFICIENT_ATTENTION.* torch.float32 .*8 and 8 ", message)
        assert relative_error(after, whole.chunk(ring * ulysses, dim=2)[rank]) < 1e-5


def probe_often():
    mesh, probes = make_mesh(2, 1), []

    def attn_func(query, key, value, *, attn_mask, dropout_p, is_causal, scale):
        if query.shape[-2] == 1:
            probes.append(query.shape)
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    q, k, v = own(mesh, make_qkv(12, 4))
    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=attn_func):
        for _ in range(5):
            F.scaled_dot_product_attention(q, k, v)
    return len(probes)


def test_own_attention_is_probed_once_per_call_kind(rank_pool):
    assert rank_pool.run(probe_often, 2) == [1, 1]


def compile_under_switches(ring, ulysses, kernel):
    mode, outs = UnifiedAttnMode(make_mesh(ring, ulysses)), []

    def attend(q, k, v):
        with mode:
            tokens = mode.sequence(q.shape[2])
            q, k, v = (mode.shard(x, dim=2, sequence=tokens) for x in (q, k, v))
            return mode.gather(F.scaled_dot_product_attention(q, k, v), dim=2, sequence=tokens)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), sdpa_kernel([getattr(SDPBackend, kernel)]):
        for S in (12, 7):
            try:
                outs.append(compiled(*make_qkv(S, 4)))
            except RuntimeError as error:
                outs.append(str(error))
    return outs


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_graph_is_traced_without_math_backend(rank_pool, ring, ulysses):
    for outs in rank_pool.run(compile_under_switches, 2, ring, ulysses, "FLASH_ATTENTION"):
        for S, out in zip((12, 7), outs, strict=True):
            assert relative_error(out, F.scaled_dot_product_attention(*make_qkv(S, 4))) < 1e-5


def test_graph_without_backend_raises_on_every_rank(rank_pool):
    for outs in rank_pool.run(compile_under_switches, 2, 1, 2, "EFFICIENT_ATTENTION"):
        assert all("EFFICIENT_ATTENTION" in out and "SDPBackend.MATH" in out for out in outs), outs


def expand_a_key_mask(ring, ulysses, lengths):
    """Attend with one mask row that is expanded to all queries, over all keys and over this rank's, eager and
    compiled.
    """
    mesh, outs = make_mesh(ring, ulysses), []
    for S in lengths:
        padding = torch.arange(S) < max(1, S - 2)
        for assume_equal, compiled in ((False, False), (True, False), (True, True)):
            mode = UnifiedAttnMode(mesh, assume_equal=assume_equal)

            def attend(q, k, v, mask, sharded, mode=mode):
                with mode:
                    tokens = mode.sequence(q.shape[2])
                    q, k, v = (mode.shard(x, dim=2, sequence=tokens) for x in (q, k, v))
                    mask = mode.shard(mask, dim=0, sequence=tokens) if sharded else mask
                    mask = mask.expand(1, 1, q.shape[2], mask.shape[0])
                    return mode.gather(F.scaled_dot_product_attention(q, k, v, mask), dim=2, sequence=tokens)

            call = torch.compile(attend, fullgraph=True, backend="eager") if compiled else attend
            with torch.no_grad():
                outs += [call(*make_qkv(S, 4), padding, sharded) for sharded in (False, True)]
    return outs


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)])
def test_a_key_mask_expanded_over_rows_is_one_row(rank_pool, ring, ulysses):
    lengths, expected = [12, 7], []
    for S in lengths:
        expected += [F.scaled_dot_product_attention(*make_qkv(S, 4), (torch.arange(S) < S - 2)[None])] * 6
    for outs in rank_pool.run(expand_a_key_mask, 2, ring, ulysses, lengths):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5
