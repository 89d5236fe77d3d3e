"""Unusual inputs of SDPA, attention of the user's own, declared masks and keys, and errors for what is refused."""

import re
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

import para_core
from para_core import BatchParallelAttnMode, Segment, SequenceLayout, UnifiedAttnMode, unified_attention
from para_core.attention.sdpa_call import SdpaCall
from tests.attention.cases import cpu_mesh, own_attention
from tests.attention.one_device import make_qkv, relative_error

sdpa = F.scaled_dot_product_attention


def own(mesh, tensors):
    return [x.chunk(mesh.size(), dim=-2)[mesh.get_rank()] for x in tensors]


# -- Odd calls. Each is made with a rank's parts, and with whole tensors on one device.

ADDED, PADDING = torch.ones(12, 12).tril().log(), torch.arange(9) < 5
ODD = {
    "numpy scale": lambda q, k, v: sdpa(q, k, v, scale=np.float64(0.3)),
    "tensor scale": lambda q, k, v: sdpa(q, k, v, None, 0.0, False, scale=torch.tensor(0.3)),
    "one key head": lambda q, k, v: sdpa(q, k[:, :1], v[:, :1]),
    "one query": lambda q, k, v: sdpa(q[:1, :1], k, v),
    "one key of grouped heads": lambda q, k, v: sdpa(q, k[:1, :2], v[:1, :2], enable_gqa=True),
    "2-D": lambda q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0]),
}
IN_AUTOCAST = {
    "autocast": lambda q, k, v: sdpa(q, k, v.bfloat16()),
    "autocast mask": lambda q, k, v: sdpa(q, k, v.bfloat16(), ADDED),
    "autocast float64": lambda q, k, v: sdpa(q.double(), k.double(), v.double()),
}


def attend_oddly(ring, ulysses):
    mesh = cpu_mesh(ring, ulysses)
    qkv = own(mesh, make_qkv(12, 4))
    with torch.no_grad(), UnifiedAttnMode(mesh):
        outs = {name: call(*qkv) for name, call in ODD.items()}
        with torch.autocast("cpu", torch.bfloat16):
            outs |= {name: call(*qkv) for name, call in IN_AUTOCAST.items()}
        for mask in (None, torch.ones(qkv[0].shape[2], 12, device="meta")):
            assert sdpa(*[x.to("meta") for x in qkv], mask).shape == qkv[0].shape
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_inputs_of_sdpa_are_accepted(rank_pool, ring, ulysses):
    q, k, v = make_qkv(12, 4)
    expected = {name: call(q, k, v) for name, call in ODD.items() if "grouped" not in name}
    grouped = [x[:1, :2].repeat_interleave(2, dim=1) for x in (k, v)]  # SDPA alone takes no broadcast with groups.
    expected["one key of grouped heads"] = sdpa(q, *grouped)
    # Queries, keys, values and the result have 8 bits of mantissa, and what is not cast has its own.
    expected |= {"autocast": sdpa(q, k, v).bfloat16(), "autocast mask": sdpa(q, k, v, ADDED).bfloat16()}
    expected["autocast float64"] = sdpa(q.double(), k.double(), v.double())
    for rank, outs in enumerate(rank_pool.run(attend_oddly, ring * ulysses, ring, ulysses)):
        for name, out in outs.items():
            whole = expected[name].chunk(ring * ulysses, dim=-2)[rank]
            assert out.dtype == whole.dtype, name
            bound = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[out.dtype]
            assert relative_error(out.double(), whole.double()) < bound, name


def attend_in_autocast(ring, ulysses):
    """Return whether a 16-bit call and its gradients have the same bits in autocast, for each mode."""
    mesh, equal = cpu_mesh(ring, ulysses), []
    for name, options in (("UnifiedAttnMode", {}), ("SparseKVAttnMode", {"share": 0.2, "window": 12})):
        results = []
        for enabled in (True, False):
            qkv = [x.requires_grad_() for x in own(mesh, [x.bfloat16() for x in make_qkv(64, 2, 16, D_v=5)])]
            with getattr(para_core, name)(mesh, **options), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = sdpa(*qkv)
            out.float().square().sum().backward()
            results.append([out.detach(), *[x.grad for x in qkv]])
        equal += [torch.equal(*pair) for pair in zip(*results, strict=True)]
    return equal


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_autocast_rounds_nothing_inside(rank_pool, ring, ulysses):
    assert rank_pool.run(attend_in_autocast, 2, ring, ulysses) == [[True] * 8] * 2


# -- Masks of few entries, and what is declared about masks and keys.


def small_masks(S):
    """Return masks that are equal for all queries, of at most two dims, float and bool, and a causal one."""
    generator = torch.Generator().manual_seed(2)
    floats = [torch.randn(shape, generator=generator) for shape in [(), (1,), (S,), (1, S), (1, 1)]]
    return [*floats, *[x > -1 for x in floats], torch.ones(S, S, dtype=torch.bool).tril()]


def attend_with_small_masks(ring, ulysses):
    mesh, outs = cpu_mesh(ring, ulysses), []
    for S in (2, 3, 4):
        with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
            parts = [cp.shard(x, dim=2) for x in make_qkv(S, 4)]
            for mask in small_masks(S):
                variants = [mask]
                if mask.shape == (S,) and mesh.size() < S:
                    variants.append(cp.shard(mask, dim=0))
                if mask.ndim == 2 and len(mask) == 1 and mesh.size() <= S:
                    variants.append(mask.expand(1, 1, parts[0].shape[2], mask.shape[1]))
                if mask.shape == (S, S) and mesh.size() == S:  # Each rank has one token.
                    variants += [cp.shard(mask, dim=-2), mask[mesh.get_rank()][None].clone(), cp.shard(mask, dim=-1)]
                outs += [(S, mask, cp.gather(sdpa(*parts, variant), dim=2)) for variant in variants]
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(3, 1), (2, 2)])
def test_masks_of_few_entries_are_accepted(rank_pool, ring, ulysses):
    for outs in rank_pool.run(attend_with_small_masks, ring * ulysses, ring, ulysses):
        for S, mask, out in outs:
            assert relative_error(out, sdpa(*make_qkv(S, 4), mask.expand(S, S))) < 1e-5, (S, mask)


def attend_with_declared_masks(ring, ulysses):
    outs = []
    q, k, v = make_qkv(13, 4, S_k=9)
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(ring, ulysses)) as cp:
        k = cp.replicated(k)
        part = cp.shard(q, dim=2)
        outs.append(cp.gather(sdpa(part, k, v), dim=2))
        outs.append(cp.gather(sdpa(part, k, v, PADDING[None]), dim=2))
        own_padding = cp.shard(PADDING.repeat(2)[:13], dim=0)
        outs.append(cp.gather(sdpa(part, part, part, cp.local_mask(own_padding[None])), dim=2))
        first = cp.shard(torch.arange(13) > 1, dim=0)[None]  # hides keys of the first rank, so that others need no mask
        outs.append(cp.gather(sdpa(part, part, part, None if first.all() else first), dim=2))
        joint = torch.cat([k, part], dim=2)
        with pytest.raises(ValueError, match=r"cp\.using\(.*replicated=True"):
            sdpa(joint, joint, joint)
        rows, columns = (SequenceLayout([Segment("a", 1), Segment("b", size)], ring * ulysses) for size in (1, 8))
        few, keys, values = (cp.shard(x, 2, sequence=of) for x, of in ((q[:, :, :2], rows), (k, columns), (v, columns)))
        with cp.using(rows, key_layout=columns):  # The first rank has both queries.
            outs.append(cp.gather(sdpa(few, keys, values, PADDING.expand(few.shape[2], 9)), dim=2, sequence=rows))
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(3, 1), (2, 2)])
def test_replicated_keys_and_local_masks_are_declared(rank_pool, ring, ulysses):
    q, k, v = make_qkv(13, 4, S_k=9)
    expected = [sdpa(q, k, v), sdpa(q, k, v, PADDING[None]), sdpa(q, q, q, PADDING.repeat(2)[:13][None])]
    expected.append(sdpa(q, q, q, (torch.arange(13) > 1)[None]))
    for outs in rank_pool.run(attend_with_declared_masks, ring * ulysses, ring, ulysses):
        for out, whole in zip(outs, [*expected, expected[1][:, :, :2]], strict=True):
            assert relative_error(out, whole) < 1e-5


def attend_by_own(ring, ulysses):
    """Return the result of an attention that doubles, and how often it was tried out."""
    mesh, probes = cpu_mesh(ring, ulysses), []

    def doubled(query, *args, **options):
        if query.shape[-2] == 2:
            probes.append(query.shape)
        out, lse = own_attention(query, *args, **options)
        return 2 * out, lse

    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=doubled) as cp:
        parts = [cp.shard(x, dim=2) for x in make_qkv(13, 4)]
        for _ in range(3):
            out = cp.gather(sdpa(*parts), dim=2)
    return out, len(probes)


def without_lse(*args, **options):
    return own_attention(*args, **options)[0]


def with_lse_of_tokens(*args, **options):
    out, lse = own_attention(*args, **options)
    return out, lse.transpose(1, 2)


def with_none(*args, **options):
    return without_lse(*args, **options), None


def attend_without_lse(ring, ulysses, is_causal, attn_func=without_lse):
    mesh = cpu_mesh(ring, ulysses)
    qkv = [x.tensor_split(mesh.size(), dim=2)[mesh.get_rank()] for x in make_qkv(5, 4)]
    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=attn_func) as cp, cp.using(cp.sequence(5)):
        return sdpa(*qkv, is_causal=is_causal)


def test_own_attention_computes_and_needs_lse_for_a_ring(rank_pool):
    for ring, ulysses, probes in ((2, 1, 1), (1, 2, 0)):
        for out, count in rank_pool.run(attend_by_own, 2, ring, ulysses):
            assert relative_error(out, 2 * sdpa(*make_qkv(13, 4))) < 1e-5
            assert count == probes
    for rank, out in enumerate(rank_pool.run(attend_without_lse, 2, 1, 2, False)):
        assert relative_error(out, sdpa(*make_qkv(5, 4)).tensor_split(2, dim=2)[rank]) < 1e-5
    for *call, message in (
        (3, 1, False, r"attn_func.* out .*ring of 3 ranks"),
        (1, 2, True, r"attn_func.*is_causal"),
        (1, 2, False, with_none, r"attn_func returned \(Tensor, NoneType\); expected .* \(out, lse\)"),
        (2, 1, False, with_none, r"attn_func returned \(Tensor, NoneType\); expected .* \(out, lse\)"),
        (2, 1, False, with_lse_of_tokens, r"attn_func.*\[1, 4, 2, 8\] and \[1, 2, 4\].*lse, \[B, H, S_q\]"),
    ):
        for error in rank_pool.run_expecting_errors(attend_without_lse, call[0] * call[1], *call):
            assert re.search(message, str(error))


# -- What is refused on every rank.

TWO, ALL = (SequenceLayout([Segment(x, size) for x in "ab"], 2) for size in (1, 6))


def refuse():
    mesh = cpu_mesh(1, 2)
    q, k, v = own(mesh, make_qkv(12, 4))
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    with warnings.catch_warnings(action="ignore"):  # It has no shape and no strides.
        padded = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)])
    distributed = DTensor.from_local(q, mesh["ulysses"], [Replicate()])
    module = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    x = torch.randn(2, 6, 8)
    in_autocast = torch.autocast("cpu", torch.bfloat16)  # It casts tensors before they are checked.
    for assume_equal in (False, True):
        attend = partial(unified_attention, mesh=mesh, assume_equal=assume_equal)
        with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal) as mode:
            mode.intercepted = True
            rows = {
                r"query.* nested tensor": lambda: mode.attend(SdpaCall(nested, nested, nested)),
                r"key is a DTensor.*x\.to_local\(\)": lambda: mode.attend(SdpaCall(q, distributed, v)),
                r"value.* list": lambda: mode.attend(SdpaCall(q, k, [1.0])),
                r"attn_mask is a list": lambda: mode.attend(SdpaCall(q, k, v, [1.0])),
                r"query is a NoneType": in_autocast(lambda: mode.attend(SdpaCall(None, k, [1.0]))),
                r"scale is 'large'": lambda: mode.attend(SdpaCall(q, k, v, scale="large")),
                r"attn_mask is a nested tensor": lambda: mode.attend(SdpaCall(q, k, v, padded)),
                r"attn_mask is a nested tensor; ": partial(attend, q, k, v, padded),
                # A dense mask of the same shape may be known.
                r"sparse": lambda: [sdpa(q, k, v, x) for x in (torch.ones(1, 12), torch.ones(1, 12).to_sparse())],
            }
            if not assume_equal:
                # Rank 1 has keys and no query, so that its mask of these keys has no row.
                padding = PADDING[: k.shape[2]].expand(2 - 2 * mesh.get_rank(), -1)
                rows["dim 1, 0;"] = partial(attend, q[:, :, : len(padding)], k, v, padding, layout=TWO, key_layout=ALL)
                learning = torch.set_grad_enabled(mesh.get_rank() == 1)
                rows["gradients of attn_func"] = learning(partial(attend, q, k, v, attn_func=own_attention))
                rows["need_weights=False"] = lambda: module(x, x, x, need_weights=mesh.get_rank() == 1)
                fails = mock.patch("para_core.attention.call_agreement.describe_rows", side_effect=RuntimeError("GPU"))
                on_one = fails if mesh.get_rank() == 1 else lambda call: call
                rows["GPU"] = on_one(lambda *_: sdpa(q, k, v, torch.ones(1, 12)))
            for message, call in rows.items():
                with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
                    call()
    with pytest.raises(ValueError, match=r"dropout_p=0\.3 "), BatchParallelAttnMode(dist.group.WORLD) as cp:
        part = cp.shard(x, dim=0)
        torch.nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).train()(part, part, part)


def test_other_tensors_and_options_of_one_rank_are_refused(rank_pool):
    rank_pool.run(refuse, 2)


def pin_a_backend(ring, ulysses, heads, assume_equal):
    mesh = cpu_mesh(ring, ulysses)
    q, k, v = own(mesh, make_qkv(12, heads))
    for backend, allowed, message in (
        ("flash", SDPBackend.MATH, r"'flash' is switched off by sdpa_kernel\("),
        (None, SDPBackend.EFFICIENT_ATTENTION, r"sdpa_kernel\(.* EFFICIENT_ATTENTION.* torch.float32 .*8 and 8 "),
    ):
        with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal, backend=backend) as cp:
            sdpa(q, k, v)  # The mode knows this sequence before the switch.
            with sdpa_kernel([allowed]), pytest.raises(RuntimeError, match=message):
                sdpa(q, k, v)
            out = cp.gather(sdpa(q, k, v), dim=2)
    return out


@pytest.mark.parametrize(("ring", "ulysses", "heads", "equal"), [(1, 2, 1, False), (1, 4, 3, True), (2, 1, 2, False)])
def test_missing_pinned_backend_raises_on_idle_ranks(rank_pool, ring, ulysses, heads, equal):
    for after in rank_pool.run(pin_a_backend, ring * ulysses, ring, ulysses, heads, equal):
        assert relative_error(after, sdpa(*make_qkv(12, heads))) < 1e-5


def compile_odd_calls():
    """Compile calls that no backend computes, that need the mode outside, or that own attention refuses."""
    mesh = cpu_mesh(1, 2)
    qkv, lower = own(mesh, make_qkv(12, 4)), torch.ones(4, 4, dtype=torch.bool).tril()

    def inside(q, k, v):
        with para_core.BlockSparseAttnMode(mesh, lower, block_size=3):
            return sdpa(q, k, v)

    def raises(mode, call, words):
        torch._dynamo.reset()
        # Dynamo of torch 2.11 prints the arguments of the exception as RuntimeError([ConstantVariable(...)]).
        with pytest.raises(Exception, match=words), mode:
            torch.compile(call, fullgraph=True, backend="aot_eager")(*qkv)

    own_mode = UnifiedAttnMode(mesh, attn_func=own_attention)
    raises(own_mode, inside, "BlockSparseAttnMode")
    raises(own_mode, lambda q, k, v: sdpa(q, k, v, is_causal=True), "attn_func.* is_causal")
    with torch.no_grad(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        raises(UnifiedAttnMode(mesh), sdpa, "(?s)EFFICIENT_ATTENTION.*SDPBackend.MATH")
    with torch.no_grad(), sdpa_kernel([SDPBackend.FLASH_ATTENTION]), UnifiedAttnMode(mesh) as cp:
        torch._dynamo.reset()
        out = torch.compile(sdpa, fullgraph=True, backend="aot_eager")(*qkv)
        return cp.gather(out, dim=2, sequence=cp.sequence(12))


def test_uncompilable_calls_raise_and_flash_alone_suffices(rank_pool):
    for out in rank_pool.run(compile_odd_calls, 2):
        assert relative_error(out, sdpa(*make_qkv(12, 4))) < 1e-5
