"""One convolution and one group norm over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from para_core.spatial.mode import SpatialShardMode
from tests.attention.one_device import relative_error


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 3, padding=1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model, torch.randn(2, 3, 11, 7) + 1


def run_sharded():
    model, x = make_model()
    with torch.no_grad(), SpatialShardMode(dist.group.WORLD) as rows:
        return rows.gather(model(rows.shard(x)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_convolutions_and_a_group_norm_equal_one_device(rank_pool, world_size):
    model, x = make_model()
    expected = model(x).detach()
    for found in rank_pool.run(run_sharded, world_size):
        assert relative_error(found, expected) < 1e-6
