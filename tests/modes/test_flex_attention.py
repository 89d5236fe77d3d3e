"""flex_attention under a mode, against flex_attention of one device."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from para_core import UnifiedAttnMode
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


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)])
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
