"""flex_attention under a mode, compared with flex_attention on one device."""

import re
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from tests.attention.one_device import make_qkv, relative_error


def make_mesh(ring, ulysses):
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 3


def per_head(b, h, q, k):
    return (q - k).abs() <= 2 + h


def per_sample(b, h, q, k):
    return k <= q + 2 * b


def by_distance(score, b, h, q, k):
    return score - (h + 1) * 0.1 * (q - k).abs()


def attend(q, k, v, **options):
    with warnings.catch_warnings():
        # flex_attention warns that it is slow without torch.compile.
        warnings.simplefilter("ignore")
        return flex_attention(q, k, v, **options)


def attend_in_mode(ring, ulysses, cases):
    mesh = make_mesh(ring, ulysses)
    outs = []
    for S, H, H_kv, score_mod, mask_mod, block, batch_and_heads in cases:
        q, k, v = make_qkv(S, H, H_kv=H_kv, D=16)
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, *batch_and_heads, S, S, device="cpu", BLOCK_SIZE=block)
        with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
            q, k, v = (cp.shard(x, dim=2) for x in (q, k, v))
            mask = mask if mask is None else cp.shard(mask)
            out = attend(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=H_kv != H)
            outs.append(cp.gather(out, dim=2))
    return outs


CASES = [
    (13, 3, 3, None, causal, 4, (None, None)),
    (12, 4, 2, by_distance, None, 128, (None, None)),
    (13, 4, 2, by_distance, per_head, 4, (None, 4)),
    (9, 1, 1, None, window, 2, (None, None)),
    (10, 3, 1, None, per_sample, 128, (2, None)),
    (3, 3, 3, by_distance, causal, 128, (None, None)),
]


@pytest.mark.parametrize(("ring", "ulysses"), [pytest.param(1, 2, marks=pytest.mark.long), (2, 1)])
def test_flex_attention_equals_one_device(rank_pool, ring, ulysses):
    expected = []
    for S, H, H_kv, score_mod, mask_mod, block, batch_and_heads in CASES:
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, *batch_and_heads, S, S, device="cpu", BLOCK_SIZE=block)
        q, k, v = make_qkv(S, H, H_kv=H_kv, D=16)
        expected.append(attend(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=H_kv != H))
    for rank, outs in enumerate(rank_pool.run(attend_in_mode, ring * ulysses, ring, ulysses, CASES)):
        for case, out, whole in zip(CASES, outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5, f"{case}, rank {rank}"


# -- Other layouts.


def attend_in_layouts(ring, ulysses):
    mesh, S = make_mesh(ring, ulysses), 13
    q, k, v = make_qkv(S, 4, H_kv=2, D=16)
    options = {"score_mod": by_distance, "enable_gqa": True}
    mask = create_block_mask(per_head, None, 4, S, S, device="cpu", BLOCK_SIZE=4)
    outs = {}
    with torch.no_grad():
        with UnifiedAttnMode(mesh) as cp:
            balanced = cp.sequence(S, balance="causal")
            parts = [cp.shard(x, dim=2, sequence=balanced) for x in (q, k, v)]
            out = attend(*parts, block_mask=cp.shard(mask), **options)
            outs["balanced"] = cp.gather(out, dim=2, sequence=balanced)
        # Five tokens are replicated, and eight tokens after them are sharded.
        ranks = ring * ulysses
        layout = SequenceLayout((Segment("text", 5, replicated=True), Segment("image", S - 5)), ranks)
        with UnifiedAttnMode(mesh, layout=layout) as cp:
            image = cp.sequence(S - 5)
            parts = [torch.cat([x[:, :, :5], cp.shard(x[:, :, 5:], 2, sequence=image)], dim=2) for x in (q, k, v)]
            out, lse = attend(*parts, block_mask=cp.shard(mask), return_lse=True, **options)
            for name, x in (("out", out), ("lse", lse)):
                text, own = x.split([5, x.shape[2] - 5], dim=2)
                outs[f"replicated, {name}"] = torch.cat([text, cp.gather(own, dim=2, sequence=image)], dim=2)
        with UnifiedAttnMode(mesh) as cp:
            # Cross-attention reads keys that are replicated.
            cross = create_block_mask(window, None, None, S, 5, device="cpu", BLOCK_SIZE=4)
            part = cp.shard(q, dim=2)
            keys, values = (cp.replicated(x[:, :, :5]) for x in (k, v))
            out = attend(part, keys, values, block_mask=cp.shard(cross), **options)
            outs["replicated keys"] = cp.gather(out, dim=2, sequence=cp.sequence(S))
    return outs


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
def test_balanced_and_replicated_segments_equal_one_device(rank_pool, ring, ulysses):
    S = 13
    q, k, v = make_qkv(S, 4, H_kv=2, D=16)
    options = {"score_mod": by_distance, "enable_gqa": True}
    mask = create_block_mask(per_head, None, 4, S, S, device="cpu", BLOCK_SIZE=4)
    out, lse = attend(q, k, v, block_mask=mask, return_lse=True, **options)
    cross = create_block_mask(window, None, None, S, 5, device="cpu", BLOCK_SIZE=4)
    expected = {
        "balanced": out,
        "replicated, out": out,
        "replicated, lse": lse,
        "replicated keys": attend(q, k[:, :, :5], v[:, :, :5], block_mask=cross, **options),
    }
    for rank, outs in enumerate(rank_pool.run(attend_in_layouts, ring * ulysses, ring, ulysses)):
        for name, whole in expected.items():
            finite = whole.nan_to_num(neginf=-100.0)
            assert relative_error(outs[name].nan_to_num(neginf=-100.0), finite) < 1e-5, f"{name}, rank {rank}"


# -- Compiled calls.


def attend_compiled(ring, ulysses):
    """Return the relative errors of compiled calls with captured tensors, with a mask sharded outside and inside."""
    mesh = make_mesh(ring, ulysses)
    slopes, documents = torch.tensor([0.1, 0.5, 0.3]), torch.tensor([0] * 5 + [1] * 8)
    S = len(documents)

    def score_mod(score, b, h, q, k):
        return score - slopes[h] * (q - k).abs()

    def mask_mod(b, h, q, k):
        return (documents[q] == documents[k]) & (q >= k)

    q, k, v = make_qkv(S, 3, D=16)
    mask = create_block_mask(mask_mod, None, None, S, S, device="cpu", BLOCK_SIZE=4)
    expected = attend(q, k, v, score_mod=score_mod, block_mask=mask)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, v, mask):
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run_sharding(cp, q, k, v, mask):
        tokens = cp.sequence(q.shape[2])
        own = cp.shard(mask, sequence=tokens)
        q, k, v = (cp.shard(x, 2, sequence=tokens) for x in (q, k, v))
        return cp.gather(flex_attention(q, k, v, score_mod=score_mod, block_mask=own), 2, sequence=tokens)

    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        parts = [cp.shard(x, dim=2) for x in (q, k, v)]
        outside = [cp.gather(run(*parts, cp.shard(mask)), dim=2) for _ in range(2)]
        inside = run_sharding(cp, q, k, v, mask)
    return [relative_error(out, expected) for out in (*outside, inside)]


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_compiled_with_captured_tensors_equals_one_device(rank_pool, ring, ulysses):
    for errors in rank_pool.run(attend_compiled, 2, ring, ulysses):
        assert max(errors) < 1e-5, errors


# -- Errors on every rank.


def misuse(ring, ulysses):
    mesh, S = make_mesh(ring, ulysses), 12
    q, k, v = make_qkv(S, 2, D=16)
    mask = create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=4)
    errors = {}

    def note(name, mask_of, call=attend):
        try:
            with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
                parts = [cp.shard(x, dim=2) for x in (q, k, v)]
                call(*parts, block_mask=mask_of(cp, parts[0].shape[2]))
            errors[name] = None
        except Exception as error:
            errors[name] = error

    note("whole", lambda cp, own: mask)
    note("of own length", lambda cp, own: create_block_mask(causal, None, None, own, own, device="cpu"))
    note("twice", lambda cp, own: cp.shard(cp.shard(mask)))
    note("another layout", lambda cp, own: cp.shard(mask, sequence=cp.sequence(S, balance="causal")))
    note("other lengths", lambda cp, own: cp.shard(mask, sequence=cp.sequence(S + 1)))
    note("of own length on one rank", lambda cp, own: cp.shard(mask) if cp._mesh.rank else cp_mask(own))
    return errors


def cp_mask(own):
    return create_block_mask(causal, None, None, own, own, device="cpu")


def test_unfitting_masks_raise_on_every_rank(rank_pool):
    for errors in rank_pool.run(misuse, 2, 1, 2):
        for name, error in errors.items():
            assert isinstance(error, ValueError), f"{name}: {error!r}"
        for name in ("whole", "of own length", "of own length on one rank"):
            assert "cp.shard(block_mask)" in str(errors[name])
        assert re.search("12|larger length", str(errors["whole"]))  # torch 2.15 names no lengths.
        assert "13" in str(errors["other lengths"])


# -- Gradients.


def gradients(ring, ulysses):
    """Return gradients of the operator itself, because flex_attention computes none on a CPU."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    S, mesh = 13, make_mesh(ring, ulysses)
    q, k, v = (x.requires_grad_() for x in make_qkv(S, 4, H_kv=2, D=16))
    weights = make_qkv(S, 4, D=16, seed=1)[0]
    mask = create_block_mask(per_head, None, 4, S, S, device="cpu", BLOCK_SIZE=4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, v, mask):
        return operator(q, k, v, by_distance, mask.as_tuple(), 0.25, {})[0]

    whole = torch.autograd.grad((run(q, k, v, mask) * weights).sum(), (q, k, v))
    with UnifiedAttnMode(mesh) as cp:
        # The parts are leaves, because Dynamo reads .grad of its inputs.
        parts = [cp.shard(x, dim=2).detach().requires_grad_() for x in (q, k, v)]
        out = run(*parts, cp.shard(mask))
        own = torch.autograd.grad((out * cp.shard(weights, dim=2)).sum(), parts)
        own = [cp.gather(x, dim=2) for x in own]
    return [relative_error(gradient, reference) for gradient, reference in zip(own, whole, strict=True)]


# Dynamo makes such a function while it traces how score_mod indexes a tensor.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_gradients_equal_one_device(rank_pool, ring, ulysses):
    for errors in rank_pool.run(gradients, 2, ring, ulysses):
        assert max(errors) < 1e-5, errors
