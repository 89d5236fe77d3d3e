"""A module that a plan runs on all tokens and some of the heads."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from para_core import Gather, Plan, Split
from para_core.distributed.mesh import sequence_mesh
from para_core.plans.plan import AttentionByHeads
from para_core.plans.region import apply_plan, remove_plan
from tests.tiny import cpu_mesh, fill, relative_error


class Attend(nn.Module):
    """Each token attends beside the mean of all keys, which needs all tokens."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(20, 4 * heads) for _ in range(3))
        self.out = nn.Linear(4 * heads, 20)

    def forward(self, x):
        q, k, v = (project(x).unflatten(2, (self.heads, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        out = flex_attention(q - k.mean(dim=2, keepdim=True), k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        # Modules of different numbers of heads do not share their wrapper.
        self.blocks = nn.ModuleList([Attend(4), Attend(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


PLAN = Plan(
    inputs={"x": Split(dim=1, segment="tokens")},
    outputs={"": Gather(dim=1, segment="tokens")},
    joint_order=("tokens",),
    attention={"blocks.*": AttentionByHeads("tokens", ("q", "k", "v"), "out")},
)


def run(shape, compiled):
    model = fill(Model(), seed=1)
    inputs = [torch.randn(2, tokens, 20, generator=torch.Generator().manual_seed(tokens)) for tokens in (7, 7)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        apply_plan(model, PLAN, sequence_mesh(cpu_mesh(*shape)))
        called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        errors = [relative_error(called(x), y) for x, y in zip(inputs, expected, strict=True)]
        # A block by itself computes on all heads, after a call of a graph too.
        block, alone = model.blocks[0], fill(Model(), seed=1).blocks[0]
        errors.append(relative_error(block(inputs[0]), alone(inputs[0])))
        remove_plan(model)
        errors.append(relative_error(model(inputs[0]), expected[0]))
    assert [block.heads for block in model.blocks] == [4, 3]
    return max(errors)


@pytest.mark.parametrize(("shape", "compiled"), [((1, 2), False), ((2, 1), True)])
def test_heads_are_shared_in_graphs_too(rank_pool, shape, compiled):
    assert max(rank_pool.run(run, 2, shape, compiled)) < 1e-5
