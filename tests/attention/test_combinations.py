"""Options and modes in combinations that once failed."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import para_core
from para_core import (
    BatchParallelAttnMode,
    Segment,
    SequenceLayout,
    UnifiedAttnMode,
)
from tests.attention.one_device import make_qkv, relative_error
from tests.pairwise import long_beyond_pairs
from tests.rank_pool import RankPoolError

S = 12
LOWER = torch.ones(4, 4, dtype=torch.bool).tril()


def natural(query, key, value, *, attn_mask, dropout_p, is_causal, scale):
    """Attend by the formula, which gives NaN for a row that sees no key."""
    assert 0 not in query.shape
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def make_mode(kind, mesh, **options):
    if kind == "blocks":
        return para_core.BlockSparseAttnMode(mesh, LOWER, block_size=3, **options)
    if kind == "kept":
        return para_core.SparseKVAttnMode(mesh, share=0.2, window=S, **options)
    return UnifiedAttnMode(mesh, **options)


def learn_both(kind, ring, ulysses, inputs):
    """Return results and gradients of :func:`natural` and of para_core's attention, for 2 and 4 heads."""
    return [
        [learn(kind, ring, ulysses, heads, options, **inputs) for options in ({"attn_func": natural}, {})]
        for heads in (2, 4)
    ]


def learn(kind, ring, ulysses, heads, options, mask=None, is_causal=False):
    """Return the result and the gradients of a rank's part. Each rank has its own loss."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.tensor_split(ring * ulysses, dim=2)[mesh.get_rank()].requires_grad_() for x in make_qkv(S, heads)]
    with make_mode(kind, mesh, **options):
        out = F.scaled_dot_product_attention(*qkv, mask, is_causal=is_causal)
    out.square().sum().backward()
    return [out.detach(), *[x.grad for x in qkv]]


PADDING = torch.arange(S)[None, None, None] < 5  # One of three ranks has only padding keys.


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "mesh", "masked"),
    long_beyond_pairs(["all", "blocks", "kept"], [(3, 1), (1, 3), (2, 2)], ["causal", "padding", "neither"]),
)
def test_own_attention_is_learned_with_unseen_keys(rank_pool, kind, mesh, masked):
    inputs = {"causal": {"is_causal": True}, "padding": {"mask": PADDING}, "neither": {}}[masked]
    for of_rank in rank_pool.run(learn_both, mesh[0] * mesh[1], kind, *mesh, inputs):
        for ours, theirs in of_rank:
            for gradient, reference in zip(ours, theirs, strict=True):
                assert (gradient - reference).norm() <= 1e-5 * max(reference.norm(), theirs[0].norm())


def attend_to_replicated_keys(kind):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ring", "ulysses"))
    q, k, v = make_qkv(S, 2)
    q = q.tensor_split(mesh.size(), dim=2)[mesh.get_rank()].clone().requires_grad_()
    k, v = k.requires_grad_(), v.requires_grad_()
    queries = SequenceLayout((Segment("image", S),), mesh.size())
    keys = SequenceLayout((Segment("text", S, replicated=True),), mesh.size())
    with make_mode(kind, mesh, layout=queries, key_layout=keys):
        F.scaled_dot_product_attention(q, k, v).square().sum().backward()
    return [k.grad, v.grad]


@pytest.mark.parametrize("world_size", [2, 3])
def test_blocks_of_replicated_keys_have_gradients(rank_pool, world_size):
    q, k, v = (x.requires_grad_() for x in make_qkv(S, 2))
    dense = LOWER.repeat_interleave(3, 0).repeat_interleave(3, 1)
    F.scaled_dot_product_attention(q, k, v, dense).square().sum().backward()
    total = [sum(grads) for grads in zip(*rank_pool.run(attend_to_replicated_keys, world_size, "blocks"), strict=True)]
    assert relative_error(total[0], k.grad) < 1e-5
    assert relative_error(total[1], v.grad) < 1e-5


def learn_under_autocast(kind, ring, ulysses, D_v):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    outs = []
    for autocast in (True, False):
        qkv = [
            x.bfloat16().tensor_split(2, dim=2)[mesh.get_rank()].requires_grad_() for x in make_qkv(64, 2, 16, D_v=D_v)
        ]
        with (
            make_mode("all" if kind == "all" else "kept", mesh),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            out = F.scaled_dot_product_attention(*qkv)
        out.float().square().sum().backward()
        outs.append([out.detach(), *[x.grad for x in qkv]])
    return outs


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["all", "kept"])
@pytest.mark.parametrize("D_v", [16, 5])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_autocast_rounds_nothing_inside(rank_pool, kind, ring, ulysses, D_v):
    for with_autocast, without in rank_pool.run(learn_under_autocast, 2, kind, ring, ulysses, D_v):
        for out, reference in zip(with_autocast, without, strict=True):
            assert torch.equal(out, reference)


def attend_in_batch(what):
    with BatchParallelAttnMode(dist.group.WORLD) as cp:
        q, k, v = make_qkv(S, 2, B=5)
        mask = torch.rand(5, 1, 1, S, generator=torch.Generator().manual_seed(0)) < 0.7
        mask[..., 0] = True
        if what == "balanced":
            parts = [cp.shard(x, dim=0, balance="causal") for x in (q, k, v)]
        else:
            parts = [cp.shard(x, dim=0) for x in (q, k, v)]
        if what == "3-D":
            out = F.scaled_dot_product_attention(*[x[:, 0] for x in parts], mask[:, 0].expand(5, S, S))
            return cp.gather(out[:, None], dim=0), F.scaled_dot_product_attention(q, k, v, mask)[:, :1]
        if what == "dropout":
            return nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).train()(*[x[:, 0] for x in parts])
        return cp.gather(F.scaled_dot_product_attention(*parts, mask), dim=0), F.scaled_dot_product_attention(
            q, k, v, mask
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["plain", "balanced", "3-D"])
def test_mask_of_whole_batch_is_sharded(rank_pool, what):
    for out, expected in rank_pool.run(attend_in_batch, 2, what):
        assert relative_error(out, expected) < 1e-5


def test_dropout_of_multihead_attention_raises_in_batch(rank_pool):
    with pytest.raises(RankPoolError, match=r"ValueError: .*dropout_p=0\.3 "):
        rank_pool.run(attend_in_batch, 2, "dropout")


def compile_what_is_refused(what):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(S, 2)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, v):
        if what == "made inside":
            with para_core.BlockSparseAttnMode(mesh, LOWER, block_size=3):
                return F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with UnifiedAttnMode(mesh, attn_func=natural):
        run(*qkv)


@pytest.mark.parametrize(
    ("what", "message"),
    # Dynamo of torch 2.11 prints the arguments of the exception as RuntimeError([ConstantVariable(...)]).
    [
        ("made inside", r"RuntimeError[:(].*BlockSparseAttnMode"),
        ("attn_func", r"RuntimeError[:(].*attn_func.* is_causal"),
    ],
)
def test_uncompilable_options_raise_in_a_graph(rank_pool, what, message):
    with pytest.raises(RankPoolError, match=message):
        rank_pool.run(compile_what_is_refused, 2, what)
