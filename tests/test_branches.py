"""Branches of guidance over the ``batch`` mesh dim of a mode, for a user's own model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from para_core import UnifiedAttnMode
from tests.rank_pool import RankPoolError
from tests.tiny import cpu_mesh, fill, relative_error


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def branches(num=2):
    return torch.randn(num, 11, 8, generator=torch.Generator().manual_seed(3))


def guide(batch, ring, ulysses, compiled):
    model = fill(Model(), seed=1)

    def step(x):
        tokens = cp.sequence(x.shape[1])
        own = cp.shard(cp.split_branches(x), dim=1, sequence=tokens)
        assert own.shape[0] == x.shape[0] // batch
        return cp.merge_branches(cp.gather(model(own), dim=1, sequence=tokens))

    if compiled:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(ring, ulysses, batch=batch)) as cp:
        return step(branches()), step(branches(4))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("batch", "ring", "ulysses", "compiled"),
    [
        (2, 1, 2, False),
        (2, 1, 1, False),
        (1, 1, 2, False),
        (2, 1, 2, True),
        *[pytest.param(*case, marks=pytest.mark.long) for case in ((2, 2, 1, False), (2, 1, 1, True), (1, 1, 2, True))],
    ],
)
def test_branches_and_tokens_are_shared_out_together(rank_pool, batch, ring, ulysses, compiled):
    model = fill(Model(), seed=1)
    for outs in rank_pool.run(guide, batch * ring * ulysses, batch, ring, ulysses, compiled):
        for out, num in zip(outs, (2, 4), strict=True):
            assert relative_error(out, model(branches(num))) < 1e-5


def split_three():
    with UnifiedAttnMode(cpu_mesh(1, 1, batch=2)) as cp:
        cp.split_branches(branches(3))


def test_parts_that_are_not_equal_are_an_error(rank_pool):
    with pytest.raises(RankPoolError, match=r"ValueError: .*\[3, 11, 8\], .*2 ranks .*'batch'"):
        rank_pool.run(split_three, 2)
