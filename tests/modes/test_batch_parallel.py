"""BatchParallelAttnMode shards samples, and each rank computes the attention of its own."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from para_core import BatchParallelAttnMode, UnifiedAttnMode
from tests.attention.one_device import make_qkv, relative_error
from tests.rank_pool import RankPoolError

BATCHES = (1, 2, 5, 8)  # The numbers of samples leave one rank without any, are uneven, or are even.
# The tuple has the dims of [B, H, S_q, S_k] that a mask has.
MASKS = {
    "none": None,
    "padding": lambda B: (B, 1, 1, 11),
    "full": lambda B: (B, 3, 11, 11),
    "shared": lambda B: (11, 11),
}


def make_mask(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(shape, generator=generator) < 0.8
    visible[..., 0] = True
    return visible if dtype == torch.bool else torch.randn(shape, generator=generator)


def case_mask(kind, B, dtype):
    return None if MASKS[kind] is None else make_mask(MASKS[kind](B), dtype)


def on_one_device(B, kind, dtype):
    return F.scaled_dot_product_attention(*make_qkv(11, 3, 8, B=B), case_mask(kind, B, dtype))


def attend_in_batch(kind, dtype, cut_mask, compile_with=None):
    mesh, outs, collectives = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("batch",)), [], 0

    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)

    if compile_with:
        torch.compiler.reset()
        attend = torch.compile(attend, fullgraph=True, backend=compile_with)
    for B in BATCHES:
        mask = case_mask(kind, B, dtype)
        with BatchParallelAttnMode(mesh) as cp:
            q, k, v = (cp.shard(x, dim=0) for x in make_qkv(11, 3, 8, B=B))
            if cut_mask and mask is not None and mask.ndim == 4:
                mask = cp.shard(mask, dim=0)
            if compile_with:  # Dynamo traces the call only if no other mode is active.
                out = attend(q, k, v, mask)
            else:
                with CommDebugMode() as counter:
                    out = attend(q, k, v, mask)
                collectives += counter.get_total_counts()
            outs.append(cp.gather(out, dim=0))
    return outs, collectives


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_attention_to_own_samples_sends_nothing(rank_pool, world_size, kind, dtype):
    for cut_mask in (False, True):
        for outs, collectives in rank_pool.run(attend_in_batch, world_size, kind, dtype, cut_mask):
            assert collectives == 0
            for B, out in zip(BATCHES, outs, strict=True):
                assert relative_error(out, on_one_device(B, kind, dtype)) < 1e-5, f"{B} samples"


def test_compiled_it_is_the_same(rank_pool):
    for outs, _ in rank_pool.run(attend_in_batch, 2, "padding", torch.bool, False, "aot_eager"):
        for B, out in zip(BATCHES, outs, strict=True):
            assert relative_error(out, on_one_device(B, "padding", torch.bool)) < 1e-5, f"{B} samples"


def attend_by_the_operator():
    mask = torch.rand(4, 1, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    q = torch.randn(4, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    expected = F.scaled_dot_product_attention(q, q, q, mask)
    with torch.no_grad(), BatchParallelAttnMode(init_device_mesh("cpu", (2,), mesh_dim_names=("batch",))) as cp:
        x = cp.shard(q, dim=0)
        out = cp.gather(torch.ops.aten.scaled_dot_product_attention(x, x, x, mask), dim=0)
    return relative_error(out, expected)


def test_the_operator_itself_is_intercepted(rank_pool):
    assert max(rank_pool.run(attend_by_the_operator, 2)) < 1e-5


def attend_in_batch_and_sequence(batch_outside):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "ulysses"))
    batch, sequence = BatchParallelAttnMode(mesh), UnifiedAttnMode(mesh["ulysses"])
    first, second = (batch, sequence) if batch_outside else (sequence, batch)
    qkv = make_qkv(11, 3, 8, B=3)
    mask = case_mask("padding", 3, torch.bool)
    with first, second:
        parts = [sequence.shard(batch.shard(x, dim=0), dim=2) for x in qkv]
        # With the sequence mode inside, the sequence mode receives the mask first, so the mask has to be sharded by
        # hand.
        attn_mask = batch.shard(mask, dim=0) if batch_outside else mask
        out = F.scaled_dot_product_attention(*parts, attn_mask)
        return batch.gather(sequence.gather(out, dim=2), dim=0)


@pytest.mark.parametrize("batch_outside", [True, False])
def test_samples_and_tokens_may_be_sharded_at_once(rank_pool, batch_outside):
    expected = on_one_device(3, "padding", torch.bool)
    for out in rank_pool.run(attend_in_batch_and_sequence, 4, batch_outside):
        assert relative_error(out, expected) < 1e-5


def learn_in_batch():
    qkv = [x.requires_grad_() for x in make_qkv(11, 3, 8, B=3)]
    with BatchParallelAttnMode(dist.group.WORLD) as cp:
        out = F.scaled_dot_product_attention(*[cp.shard(x, dim=0) for x in qkv])
        whole = cp.gather(out, dim=0)
    (whole * make_qkv(11, 3, 8, B=3, seed=1)[0]).sum().backward()
    return [x.grad for x in qkv]


def test_gradients_are_of_summed_losses(rank_pool):
    qkv = [x.requires_grad_() for x in make_qkv(11, 3, 8, B=3)]
    (F.scaled_dot_product_attention(*qkv) * make_qkv(11, 3, 8, B=3, seed=1)[0]).sum().backward()
    totals = [sum(grads) / 2 for grads in zip(*rank_pool.run(learn_in_batch, 2), strict=True)]
    for total, x in zip(totals, qkv, strict=True):
        assert relative_error(total, x.grad) < 1e-5


def attend_with(mask_samples=None, dropout_p=0.0):
    with BatchParallelAttnMode(dist.group.WORLD) as cp:
        q, k, v = (cp.shard(x, dim=0) for x in make_qkv(11, 3, 8, B=5))
        mask = None if mask_samples is None else torch.ones(mask_samples, 1, 1, 11, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_samples": 7}, r"ValueError: attn_mask \[7, 1, 1, 11\] .*7 .* 1, 3 .* 5 "),
        ({"dropout_p": 0.1}, r"ValueError: .*dropout_p=0\.1 "),
    ],
)
def test_what_does_not_fit_is_an_error(rank_pool, options, message):
    with pytest.raises(RankPoolError, match=message):
        rank_pool.run(attend_with, 2, **options)


def make_mode_on_a_mesh_without_batch():
    BatchParallelAttnMode(init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)))


def test_a_mesh_without_a_batch_dim_is_an_error(rank_pool):
    with pytest.raises(RankPoolError, match=r"ValueError: .*\('ulysses',\).* 'batch'"):
        rank_pool.run(make_mode_on_a_mesh_without_batch, 2)
