"""Rows that hide every key with a large number instead of -inf weigh the blocks of a ring as SDPA weighs its keys."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import UnifiedAttnMode
from tests.attention.cases import MESHES
from tests.attention.one_device import make_qkv, relative_error

S, H = 13, 4
LOW = [torch.finfo(torch.float32).min, -1e9]


def make_mask(low, kind):
    mask = torch.zeros(2, 1, S, S)
    if kind == "key padding":  # one sample sees five keys, the other none
        mask[0, :, :, 5:] = low
        mask[1] = low
        return mask[:, :, :1]
    if kind == "one column":  # one number for all keys of a query
        mask[:, :, 3] = low
        mask[1, :, 9] = -1.5
        return mask[..., :1]
    mask[:, :, 3] = low  # a query that sees nothing
    mask[0, :, 7, 2:] = low
    mask[1, :, 9, :6] = 2 * low if low > -1e30 else low  # two levels: only the higher one counts
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
    # The value of a score that is absorbed is 0, its derivative is its own.
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
