"""The hand-written baselines of the host-cost benchmark compute attention."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.attention import mesh as by_hand

B, H, S, D = 2, 4, 12, 16


def attend_by_hand(name):
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(B, S, H, D, generator=generator) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*[x.transpose(1, 2) for x in whole])
    ranks, rank = dist.get_world_size(), dist.get_rank()
    query, key, value = (x.chunk(ranks, dim=1)[rank].contiguous().transpose(1, 2) for x in whole)
    out = getattr(by_hand, name)(query, key, value, group=dist.group.WORLD)
    torch.testing.assert_close(out, expected.chunk(ranks, dim=2)[rank])
    return out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", ["ulysses_by_hand", "ulysses_in_graph", "ring_by_hand", "ring_in_graph"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_by_hand_equals_sdpa_and_its_strides(rank_pool, name, ranks):
    assert all(rank_pool.run(attend_by_hand, ranks, name))
