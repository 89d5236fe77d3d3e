"""If a row hides every key with a large number instead of -inf, a ring weighs its blocks as SDPA weighs its keys."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode
from para_core.attention.attend import Accumulator, Mask
from para_core.attention.blocks import local
from para_core.attention.low_rows import level_low_rows
from para_core.attention.tiles import Causal, Tiling
from tests.attention.cases import MESHES
from tests.attention.one_device import make_qkv, relative_error

S, H = 13, 4
LOW = [torch.finfo(torch.float32).min, -1e9]


def make_mask(low, kind):
    mask = torch.zeros(2, 1, S, S)
    if kind == "key padding":  # One sample sees five keys, and the other sees none.
        mask[0, :, :, 5:] = low
        mask[1] = low
        return mask[:, :, :1]
    if kind == "one column":  # All keys of a query have the same number.
        mask[:, :, 3] = low
        mask[1, :, 9] = -1.5
        return mask[..., :1]
    mask[:, :, 3] = low  # This query sees no key.
    mask[0, :, 7, 2:] = low
    mask[1, :, 9, :6] = 2 * low if low > -1e30 else low  # Of two levels only the higher one counts.
    mask[1, :, 9, 6:] = low
    return mask


def attend(low, kind, is_causal, ring, ulysses):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.requires_grad_() for x in make_qkv(S, H)]
    with UnifiedAttnMode(mesh) as cp:
        parts = [cp.shard(x, dim=2) for x in qkv]
        with cp.using(cp.sequence(S)):
            out = F.scaled_dot_product_attention(*parts, make_mask(low, kind), is_causal=is_causal)
        whole = cp.gather(out, dim=2)
    (whole.square().sum() / (ring * ulysses)).backward()
    for x in qkv:
        torch.distributed.all_reduce(x.grad)
    return whole.detach(), [x.grad for x in qkv]


def on_one_device(low, kind, is_causal):
    """Return the float64 result from float32 scores: the mean over the keys with the row's highest bias."""
    q, k, v = (x.requires_grad_() for x in make_qkv(S, H))
    mask = make_mask(low, kind).expand(2, 1, S, S)
    if is_causal:
        mask = mask.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf"))
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    highest = mask.amax(-1, keepdim=True)
    bias = torch.where(highest < -1e8, (mask.double() - highest.double()), mask.double())
    # A score that is absorbed has the value 0, but keeps its derivative.
    scores = torch.where(highest < -1e8, scores - scores.detach(), scores)
    out = (scores + bias).softmax(-1) @ v.double()
    out.square().sum().backward()
    return out.detach(), [x.grad for x in (q, k, v)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["key padding", "rows", "one column"])
@pytest.mark.parametrize("low", LOW, ids=["finfo.min", "-1e9"])
@pytest.mark.parametrize(("ring", "ulysses"), [mesh for mesh in MESHES if mesh in ((2, 1), (1, 2), (3, 1), (2, 2))])
def test_rows_hidden_by_finite_masks_equal_one_device(rank_pool, ring, ulysses, low, kind, is_causal):
    expected, gradients = on_one_device(low, kind, is_causal)
    if not is_causal:
        sdpa = F.scaled_dot_product_attention(*make_qkv(S, H), make_mask(low, kind))
        assert relative_error(sdpa, expected.float()) < 1e-5, "the formula is not SDPA's"
    for rank, (out, grads) in enumerate(rank_pool.run(attend, ring * ulysses, low, kind, is_causal, ring, ulysses)):
        assert relative_error(out, expected.float()) < 1e-5, f"rank {rank}"
        for name, grad, whole in zip("qkv", grads, gradients, strict=True):
            assert relative_error(grad, whole.float()) < 1e-4, f"gradient of {name}, rank {rank}"


# -- Blocks of keys on one device.


BLOCKS = [(5, 0, 3, 4), (1, 6), (7,), (2, 1, 1)]
LEVELS = [float("-inf"), -1e9, -1e4, -20.0]


def merged_over_blocks(query, key, value, mask, lengths, is_causal):
    """Attend to blocks of keys of these lengths, one after the other, as a ring does."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    runs = [[run] for run in zip(starts, lengths, strict=True)]
    tiling = Tiling([(0, query.shape[2])], runs, [Causal()] if is_causal else [])
    one_block = local(None, None)

    def all_blocks(into, key, value, _, is_last):
        for step, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            block = [x.narrow(2, start, length) for x in (key, value)]
            one_block(into, *block, step, is_last and step == len(lengths) - 1)

    into = Accumulator(query, Mask(mask), tiling)
    level_low_rows(all_blocks, None)(into, key, value, 0, True)
    return into.result(key, value)


def exactly(query, key, value, mask, is_causal):
    """Return attention in float64, and which rows see no key. Scores have no effect next to numbers below -2**24."""
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    bias = (
        torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.double()
    )
    bias = bias.expand(scores.shape)
    if is_causal:
        bias = bias.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    highest = bias.amax(-1, keepdim=True)
    is_empty = highest == -torch.inf
    weighed = torch.where(highest < -(2.0**24), 0.0, scores) + (bias - highest.masked_fill(is_empty, 0.0))
    out = weighed.masked_fill(is_empty, 0.0).softmax(-1) @ value.double()
    return out.masked_fill(is_empty, 0.0), is_empty[..., 0]


def draw_mask(dtype, shape, is_causal, generator):
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.4
    mask = torch.randn(shape, generator=generator).to(dtype)
    # In a causal call the numbers that a query sees may all be low although the row's other numbers are not. This is
    # not corrected.
    levels = [-torch.inf] if is_causal else [max(level, torch.finfo(dtype).min) for level in LEVELS]
    levels += [] if is_causal else [torch.finfo(dtype).min]
    for level in levels:
        mask.masked_fill_(torch.rand(shape, generator=generator) < 0.2, level)
        if not is_causal:
            mask.masked_fill_(torch.rand((*shape[:3], 1), generator=generator) < 0.2, level)
    return mask


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "mask_dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_masked_rows_of_any_dtype_merge_over_blocks_as_in_float64(dtype, mask_dtype, is_causal):
    bound = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 4 * torch.finfo(dtype).eps)
    with fake_group(1), torch.no_grad():
        for seed, lengths in enumerate(BLOCKS):
            generator, total = torch.Generator().manual_seed(seed), sum(lengths)
            q, k, v = make_qkv(total if is_causal else 5, 2, S_k=total, dtype=dtype, seed=seed)
            for shape in [(2, 1, 1, total), (1, 2, q.shape[2], total), (2, 2, q.shape[2], 1)]:
                mask = draw_mask(mask_dtype, shape, is_causal, generator)
                out, lse = merged_over_blocks(q, k, v, mask, lengths, is_causal)
                expected, is_empty = exactly(q, k, v, mask, is_causal)
                assert relative_error(out.double(), expected) < bound, (shape, lengths)
                assert torch.equal(lse == -torch.inf, is_empty), (shape, lengths)
