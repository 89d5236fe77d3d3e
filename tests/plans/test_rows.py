"""A plan shards rows of an image: linear attention sums over ranks, and convolutions see the rows of neighbouring
ranks.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from para_core import Gather, Halo, LinearAttention, Plan, Split
from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from tests.tiny import cpu_mesh, fill, relative_error


class Attend(nn.Module):
    """Linear attention, plus a sum over tokens as input of a softmax."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, tokens):
        q, k, v = (x.transpose(1, 2) for x in self.project(tokens).chunk(3, dim=2))
        normal = 1 / (F.relu(k).sum(dim=2, keepdim=True).transpose(1, 2) @ F.relu(q) + 1)
        states = torch.matmul(v, F.relu(k).transpose(1, 2))
        return (torch.matmul(states, F.relu(q)) * normal).transpose(1, 2)


class Model(nn.Module):
    """A model of images ``[B, 3, H, W]`` with patches of 2 × 2 pixels."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.attend = Attend()
        self.mix = nn.Conv2d(6, 6, 5, padding=2, groups=6)
        self.out = nn.ConvTranspose2d(6, 3, 2, 2)

    def forward(self, image, residual):
        x = self.patches(image)
        height, width = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2) + residual
        tokens = tokens + self.attend(tokens)
        x = tokens.transpose(1, 2).unflatten(2, (height, width))
        return self.out(x + self.mix(x))


PLAN = Plan(
    inputs={
        "image": Split(dim=2, segment="rows", per=2),
        # Its shape is [B, H · W, C].
        "residual": Split(dim=-2, like="rows", per=None),
    },
    outputs={"": Gather(dim=-2, segment="rows", per=None)},
    joint_order=("rows",),
    halos={"mix": Halo(dim=2, segment="rows", size=2)},
    attention={"attend": LinearAttention("rows", sums=(("sum", 0), ("matmul", 1)))},
)


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    image = torch.randn(2, 3, 2 * rows, 6, generator=generator)
    return image, torch.randn(2, rows * 3, 6, generator=generator)


def model():
    return fill(Model(), seed=1)


def results(called, rows):
    """Return the output and the gradient of each parameter."""
    called.requires_grad_()
    out = called(*inputs(rows))
    gradients = torch.autograd.grad(out.square().mean(), list(called.parameters()))
    return [out.detach(), *gradients]


def on_ranks(shape, rows):
    applied = model()
    apply_plan(applied, PLAN, sequence_mesh(cpu_mesh(*shape)))
    outs = [results(applied, count) for count in rows]
    with torch.no_grad():
        apart = [applied(*inputs(count)) for count in rows]
    remove_plan(applied)
    return outs, apart


# On these meshes (ring × Ulysses) neighbours are in one group, in the other, or in both.
@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (2, 2)])
def test_sums_and_halos_equal_one_device(rank_pool, shape):
    ranks = shape[0] * shape[1]
    rows = (2 * ranks, 2 * ranks + 3, ranks - 1)
    expected = [results(model(), count) for count in rows]
    every = rank_pool.run(on_ranks, ranks, shape, rows)
    for index in range(len(rows)):
        outs = [of_rank[index] for of_rank, _ in every]
        for (out, *_), (_, apart) in zip(outs, every, strict=True):
            assert relative_error(out, expected[index][0]) < 1e-5
            assert relative_error(apart[index], expected[index][0]) < 1e-5
        # Every rank computes the loss of the whole output, so gradients are averaged, as DistributedDataParallel does.
        for gradients in zip(expected[index][1:], *[out[1:] for out in outs], strict=True):
            assert relative_error(torch.stack(gradients[1:]).mean(dim=0), gradients[0]) < 1e-4


class OtherAttend(Attend):
    def forward(self, tokens):
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


class OtherAttendByOperator(Attend):
    def forward(self, tokens):
        return torch.ops.aten.scaled_dot_product_attention(tokens, tokens, tokens)


class NoAttend(Attend):
    def forward(self, tokens):
        return tokens


def misfits():
    mesh, messages = sequence_mesh(cpu_mesh(1, 2)), {}
    for name, attend in (("another", OtherAttend()), ("operator", OtherAttendByOperator()), ("none", NoAttend())):
        applied = model()
        applied.attend = attend
        apply_plan(applied, PLAN, mesh)
        with pytest.raises(RuntimeError) as error:
            applied(*inputs(6))
        messages[name] = str(error.value)
    applied = model()
    apply_plan(applied, PLAN, mesh)
    with pytest.raises(ValueError, match=r"3 rows on 2 ranks.* 2 "):
        applied(*inputs(3))
    applied.gradient_checkpointing, applied._gradient_checkpointing_func = True, None
    with pytest.raises(RuntimeError, match=r"Model .*activation checkpointing"):
        applied(*inputs(6))
    with torch.no_grad():
        applied(*inputs(6))
    return messages


def test_unexpected_sums_raise_on_every_rank(rank_pool):
    for messages in rank_pool.run(misfits, 2):
        for name in ("another", "operator"):
            assert re.search(r"scaled_dot_product_attention .*LinearAttention\(", messages[name])
        assert "[('sum', 0), ('matmul', 1)]" in messages["none"]
