"""Further options of a call: a user's own attention, transports, replicated keys, torch.func."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import Segment, SequenceLayout, UnifiedAttnMode, unified_attention
from para_core.attention.masks import MaskExtents, mask_extents
from para_core.layout.sequence import even_layout
from tests.attention.cases import CAUSAL, MESHES, ON_MOST_MESHES, TEXT_FIRST, Case, Mask, attend, on_most_meshes
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.test_exactness import check


def by_hand(query, key, value, *, attn_mask, dropout_p, is_causal, scale):
    assert dropout_p == 0.0
    assert attn_mask is None or not is_causal
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        bias = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=scores.dtype)
        scores = scores + (bias if attn_mask.is_floating_point() else bias.masked_fill(~attn_mask, float("-inf")))
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]) @ value, lse


def by_hand_without_lse(*args, **options):
    return by_hand(*args, **options)[0]


CASES = [
    Case(13, 4),
    Case(13, 5, options=CAUSAL | {"scale": 0.3}),
    Case(3, 1),
    Case(13, 6, H_kv=2, options={"enable_gqa": True}),
    Case(H=4, segments=TEXT_FIRST, mask=Mask("bk")),
    Case(13, 5, mask=Mask("bhqk", torch.float32, "local"), options=CAUSAL),
]


OPTIONS = {
    "of the user": {"attn_func": by_hand},
    "gathered": {"rotate_method": "allgather"},
    "of the user, gathered": {"rotate_method": "allgather", "attn_func": by_hand},
}


# The default run compiles these.
COMPILED = {("of the user", 1, 2), ("gathered", 2, 1)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "ring", "ulysses", "compile_with"),
    [
        *[pytest.param(name, *mesh.values, None, marks=mesh.marks) for name in OPTIONS for mesh in ON_MOST_MESHES],
        *[
            pytest.param(name, *mesh, "aot_eager", marks=() if (name, *mesh) in COMPILED else pytest.mark.long)
            for name in OPTIONS
            for mesh in MESHES
        ],
    ],
)
def test_own_attention_and_transports_are_exact(rank_pool, name, ring, ulysses, compile_with):
    cases = CASES if compile_with is None else CASES[:4:3]
    results = rank_pool.run(attend, ring * ulysses, cases, ring, ulysses, compile_with, OPTIONS[name])
    for rank, outs in enumerate(results):
        for case, out in zip(cases, outs, strict=True):
            check(case, out, f"ring {ring} × ulysses {ulysses}, rank {rank}, {name}")


def doubled(*args, **options):
    out, lse = by_hand(*args, **options)
    return 2 * out, lse


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_attn_func_computes_local_attention(rank_pool, ring, ulysses):
    whole = Case(13, 4).on_one_device()
    for outs in rank_pool.run(attend, 2, [Case(13, 4)], ring, ulysses, None, {"attn_func": doubled}):
        assert relative_error(outs[0], 2 * whole) < 1e-5


def learn_with_attn_func(ring, ulysses, options):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()].requires_grad_() for x in make_qkv(12, 4)]
    with UnifiedAttnMode(mesh, attn_func=by_hand, **options):
        F.scaled_dot_product_attention(*qkv).square().sum().backward()
    return [x.grad for x in qkv]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ring", "ulysses", "options"), [(2, 1, {}), (1, 2, {}), (2, 1, {"rotate_method": "allgather"})]
)
def test_attention_of_the_users_own_has_its_own_gradient(rank_pool, ring, ulysses, options):
    qkv = [x.requires_grad_() for x in make_qkv(12, 4)]
    F.scaled_dot_product_attention(*qkv).square().sum().backward()
    for rank, grads in enumerate(rank_pool.run(learn_with_attn_func, 2, ring, ulysses, options)):
        for x, grad in zip(qkv, grads, strict=True):
            assert relative_error(grad, x.grad.chunk(2, dim=2)[rank]) < 1e-5


def learn_scale(ring, ulysses):
    scale = torch.tensor(0.7, requires_grad=True)

    def with_own_scale(query, key, value, **options):
        return by_hand(query * scale, key, value, **options)

    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(12, 4)]
    with UnifiedAttnMode(mesh, attn_func=with_own_scale):
        F.scaled_dot_product_attention(*qkv).square().sum().backward()
    return scale.grad


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_what_the_users_function_captures_gets_its_gradient(rank_pool, ring, ulysses):
    scale, (query, key, value) = torch.tensor(0.7, requires_grad=True), make_qkv(12, 4)
    F.scaled_dot_product_attention(query * scale, key, value).square().sum().backward()
    assert relative_error(sum(rank_pool.run(learn_scale, 2, ring, ulysses)), scale.grad) < 1e-4


def attend_without_lse(ring, ulysses, is_causal):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    q, k, v = (x.tensor_split(ring * ulysses, dim=2)[mesh.get_rank()] for x in make_qkv(5, 4))
    with torch.no_grad(), UnifiedAttnMode(mesh, attn_func=by_hand_without_lse) as cp, cp.using(cp.sequence(5)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def test_ring_needs_lse_and_ulysses_does_not(rank_pool):
    whole = F.scaled_dot_product_attention(*make_qkv(5, 4))
    for rank, out in enumerate(rank_pool.run(attend_without_lse, 2, 1, 2, False)):
        assert relative_error(out, whole.tensor_split(2, dim=2)[rank]) < 1e-5
    for error in rank_pool.run_expecting_errors(attend_without_lse, 3, 3, 1, False):
        assert re.search(r"attn_func.* out .*ring of 3 ranks", str(error))
    for error in rank_pool.run_expecting_errors(attend_without_lse, 2, 1, 2, True):
        assert re.search(r"attn_func.* out .*is_causal", str(error))


def attend_to_replicated_keys(ring, ulysses):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    q, k, v = make_qkv(13, 4, S_k=9)
    outs, errors = [], []
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        k = cp.replicated(k)
        part = cp.shard(q, dim=2)
        outs.append(cp.gather(F.scaled_dot_product_attention(part, k, v), dim=2))
        padding = torch.arange(9) < 5
        outs.append(cp.gather(F.scaled_dot_product_attention(part, k, v, padding[None]), dim=2))
        own = cp.shard(padding.repeat(2)[:13], dim=0)
        outs.append(cp.gather(F.scaled_dot_product_attention(part, part, part, cp.local_mask(own[None])), dim=2))
        joint = torch.cat([k, part], dim=2)
        try:
            F.scaled_dot_product_attention(joint, joint, joint)
        except ValueError as error:
            errors.append(str(error))
    return outs, errors


@pytest.mark.sample(3)
@on_most_meshes
def test_replicated_keys_and_local_masks_are_declared(rank_pool, ring, ulysses):
    q, k, v = make_qkv(13, 4, S_k=9)
    padding = torch.arange(9) < 5
    expected = [
        F.scaled_dot_product_attention(q, k, v),
        F.scaled_dot_product_attention(q, k, v, padding[None]),
        F.scaled_dot_product_attention(q, q, q, padding.repeat(2)[:13][None]),
    ]
    for outs, errors in rank_pool.run(attend_to_replicated_keys, ring * ulysses, ring, ulysses):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5
        assert len(errors) == 1
        assert re.search(r"cp\.using\(.*replicated=True", errors[0])


def attend_with_a_gathered_mask(ring, ulysses):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    mode = UnifiedAttnMode(mesh)
    q, padding = make_qkv(7, 4)[0], torch.arange(7) < 5

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, padding):
        with mode:
            tokens = mode.sequence(q.shape[2])
            part, own = mode.shard(q, 2, sequence=tokens), mode.shard(padding, 0, sequence=tokens)
            mask = mode.local_mask(own[None], sequence=tokens)
            with mode.using(tokens):
                out = F.scaled_dot_product_attention(part, part, part, mask)
            return mode.gather(out, 2, sequence=tokens)

    with torch.no_grad():
        return run(q, padding)


@pytest.mark.long
def test_local_mask_of_one_token_is_gathered_in_graph(rank_pool):
    q = make_qkv(7, 4)[0]
    expected = F.scaled_dot_product_attention(q, q, q, (torch.arange(7) < 5)[None])
    for out in rank_pool.run(attend_with_a_gathered_mask, 4, 2, 2):
        assert relative_error(out, expected) < 1e-5


def test_local_mask_is_not_guessed_for_one_token():
    layout = even_layout(7, 4)  # The ranks have 2, 2, 2 and 1 tokens.
    with pytest.raises(ValueError, match=r"attn_mask has key dim 2.* 7"):
        mask_extents([(1, 2)], layout, layout, [0])
    assert mask_extents([(1, 2), (1, 2), (1, 2), (1, 1)], layout, layout, range(4)) == MaskExtents("broadcast", "local")


def attend_with_masks_of_single_tokens(ring, ulysses, S):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    q, k, v = make_qkv(S, 4)
    mask, keys = masks_of_single_tokens(S)
    outs = []
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        q, k, v = (cp.shard(x, dim=2) for x in (q, k, v))
        first = mesh.get_rank() if q.shape[2] else S
        own = mask[first : first + 1].clone()
        for attn_mask in (cp.shard(mask, dim=-2), own, cp.shard(mask, dim=-1), mask, keys, cp.shard(keys, dim=-1)):
            outs.append(cp.gather(F.scaled_dot_product_attention(q, k, v, attn_mask), dim=2))
    return outs


def masks_of_single_tokens(S):
    """Return a causal mask and a mask of one row."""
    return torch.ones(S, S, dtype=torch.bool).tril(), (torch.arange(S) != 0)[None]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses", "S"), [(2, 1, 2), (1, 2, 2), (2, 2, 4), (1, 3, 2)])
def test_masks_of_single_tokens_are_of_the_rank(rank_pool, ring, ulysses, S):
    q, k, v = make_qkv(S, 4)
    mask, keys = masks_of_single_tokens(S)
    causal = F.scaled_dot_product_attention(q, k, v, mask)
    expected = [causal] * 4 + [F.scaled_dot_product_attention(q, k, v, keys)] * 2
    for outs in rank_pool.run(attend_with_masks_of_single_tokens, ring * ulysses, ring, ulysses, S):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5


def test_mask_is_not_guessed_if_one_rank_holds_all():
    layout = SequenceLayout((Segment("one", 1), Segment("other", 1)), 2)  # The ranks have 2 and 0 tokens.
    for size in (2, 0):
        with pytest.raises(ValueError, match=rf"attn_mask has key dim {size}.* 2 tokens"):
            mask_extents([(1, size)], layout, layout, [size // 2])
    assert mask_extents([(1, 2), (1, 0)], layout, layout, range(2)) == MaskExtents("broadcast", "local")
    assert mask_extents([(1, 2), (1, 2)], layout, layout, range(2)) == MaskExtents("broadcast", "global")


def transform(ring, ulysses):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    q, k, v = (x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(12, 4))
    gradient = torch.func.grad(lambda q: unified_attention(q, k, v, mesh=mesh).square().sum())(q)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda q, k, v: unified_attention(q, k, v, mesh=mesh))(q, k, v)
    return gradient


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_torch_func_grad_works_and_vmap_raises(rank_pool, ring, ulysses):
    q, k, v = make_qkv(12, 4)
    whole = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).square().sum())(q)
    for rank, gradient in enumerate(rank_pool.run(transform, 2, ring, ulysses)):
        assert relative_error(gradient, whole.chunk(2, dim=2)[rank]) < 1e-5


def checkpointed(ring, ulysses, bound):
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    q, k, v = (x.requires_grad_() for x in make_qkv(13, 4))
    with UnifiedAttnMode(mesh) as cp:
        parts = [cp.shard(x, dim=2) for x in (q, k, v)]

        def block(q, k, v):
            return F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True)

        out = checkpoint(cp.bound(block) if bound else block, *parts, use_reentrant=False)
        loss = cp.gather(out, dim=2).square().sum() / (ring * ulysses)
    loss.backward()
    for x in (q, k, v):
        torch.distributed.all_reduce(x.grad)
    return [x.grad for x in (q, k, v)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("bound", [True, False])
def test_activation_checkpointing_recomputes_under_the_mode(rank_pool, ring, ulysses, bound):
    qkv = [x.requires_grad_() for x in make_qkv(13, 4)]
    F.scaled_dot_product_attention(qkv[0].sin(), *qkv[1:], is_causal=True).square().sum().backward()
    for grads in rank_pool.run(checkpointed, 2, ring, ulysses, bound):
        for x, grad in zip(qkv, grads, strict=True):
            assert relative_error(grad, x.grad) < 1e-5
