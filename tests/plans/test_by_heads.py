"""A plan runs a module on all tokens and some of the heads."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from para_core import Gather, Plan, Split
from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.plan import AttentionByHeads
from tests.tiny import cpu_mesh, fill, relative_error


class Attend(nn.Module):
    """Attention plus the mean of all keys, which needs all tokens."""

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
        # Modules with different numbers of heads must not share a wrapper.
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
    inputs = [torch.randn(2, tokens, 20, generator=torch.Generator().manual_seed(tokens)) for tokens in (7, 3)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        apply_plan(model, PLAN, sequence_mesh(cpu_mesh(*shape)))
        called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        errors = [relative_error(called(x), y) for x, y in zip(inputs, expected, strict=True)]
        # A block that is called by itself computes on all heads, also after a call of a graph.
        block, alone = model.blocks[0], fill(Model(), seed=1).blocks[0]
        errors.append(relative_error(block(inputs[0]), alone(inputs[0])))
        remove_plan(model)
        errors.append(relative_error(model(inputs[0]), expected[0]))
    assert [block.heads for block in model.blocks] == [4, 3]
    return max(errors)


@pytest.mark.parametrize(("shape", "compiled"), [((1, 2), False), ((2, 1), True)])
def test_heads_are_shared_in_graphs_too(rank_pool, shape, compiled):
    assert max(rank_pool.run(run, 2, shape, compiled)) < 1e-5


class Cached(nn.Module):
    """Attention to the keys of all chunks so far, which an argument keeps."""

    def __init__(self, heads=5):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(20, 4 * heads) for _ in range(3))
        self.out = nn.Linear(4 * heads, 20)

    def forward(self, x, kept, start):
        q, k, v = (project(x).unflatten(2, (self.heads, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        end = start + k.shape[2]
        kept["k"][:, :, start:end], kept["v"][:, :, start:end] = k, v
        out = F.scaled_dot_product_attention(q, kept["k"][:, :, :end], kept["v"][:, :, :end])
        return x + self.out(out.transpose(1, 2).flatten(2))


class InChunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Cached(), Cached()])

    def forward(self, x, caches, start):
        for block, kept in zip(self.blocks, caches, strict=True):
            x = block(x, kept, start)
        return x


def generate(model, lengths):
    """Return the output for each chunk. Their numbers of tokens are ``lengths``."""
    caches = [{name: torch.zeros(2, 5, sum(lengths), 4) for name in "kv"} for _ in model.blocks]
    generator, start, outs = torch.Generator().manual_seed(3), 0, []
    with torch.no_grad():
        for length in lengths:
            outs.append(model(torch.randn(2, length, 20, generator=generator), caches, start))
            start += length
    return outs


BY_HEADS = AttentionByHeads("tokens", ("q", "k", "v"), "out")


def generate_in_parallel(shape, lengths):
    model = fill(InChunks(), seed=1)
    attention = {"blocks.*": replace(BY_HEADS, caches=(("kept", 1),))}
    apply_plan(model, replace(PLAN, attention=attention), sequence_mesh(cpu_mesh(*shape)))
    return generate(model, lengths)


# A segment of fewer than two tokens per rank is replicated.
@pytest.mark.parametrize("lengths", [(9, 1, 3), (1, 11), (3, 2)])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 2)])
def test_short_chunks_share_heads_too(rank_pool, shape, lengths):
    expected = generate(fill(InChunks(), seed=1), lengths)
    for rank, outs in enumerate(rank_pool.run(generate_in_parallel, shape[0] * shape[1], shape, lengths)):
        errors = [relative_error(out, whole) for out, whole in zip(outs, expected, strict=True)]
        assert max(errors) < 1e-5, f"rank {rank}: {errors}"


class Fused(nn.Module):
    """Attention with one projection, whose outputs are in the order ``order``."""

    def __init__(self, order):
        super().__init__()
        self.heads, self.order = 3, order
        self.qkv, self.out = nn.Linear(20, 36), nn.Linear(12, 20)

    def forward(self, x):
        x, of_heads = self.qkv(x), {"parts": (3, self.heads, 4), "heads": (self.heads, 3, 4)}[self.order]
        q, k, v = x.unflatten(2, of_heads).unbind(2 if self.order == "parts" else 3)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return self.out(out.transpose(1, 2).flatten(2))


def attend_fused(order, tokens, parts):
    """Return the relative error of the module on several ranks, or the error that it raises."""
    model, x = fill(nn.Sequential(Fused(order)), seed=1), torch.randn(2, tokens, 20)
    with torch.no_grad():
        expected = model(x)
    by_heads = AttentionByHeads("tokens", ("qkv",), "out", parts=parts)
    inputs = {"input": Split(dim=1, segment="tokens")}
    plan = replace(PLAN, inputs=inputs, attention={"0": by_heads})
    apply_plan(model, plan, sequence_mesh(cpu_mesh(1, 2)))
    with torch.no_grad():
        return relative_error(model(x), expected)


@pytest.mark.parametrize(("order", "parts"), [("parts", 3), ("parts", (3,)), ("heads", 1)])
@pytest.mark.parametrize("tokens", [7, 3])
def test_fused_projection_in_a_stated_order(rank_pool, order, parts, tokens):
    assert max(rank_pool.run(attend_fused, 2, order, tokens, parts)) < 1e-5


@pytest.mark.parametrize("parts", [None, (2,), (3, 1)])
def test_fused_projection_in_an_unknown_order_raises(rank_pool, parts):
    for error in rank_pool.run_expecting_errors(attend_fused, 2, "parts", 7, parts):
        assert isinstance(error, ValueError)
        assert "qkv" in str(error)


class Grouped(nn.Module):
    """Attention with four heads of queries and two heads of keys and values."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v = nn.Linear(20, 16), nn.Linear(20, 8), nn.Linear(20, 8)
        self.out = nn.Linear(16, 20)

    def forward(self, x):
        q, k, v = (project(x).unflatten(2, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def attend_grouped(tokens):
    plan = replace(PLAN, inputs={"input": Split(dim=1, segment="tokens")}, attention={"0": BY_HEADS})
    model = nn.Sequential(Grouped())
    apply_plan(model, plan, sequence_mesh(cpu_mesh(1, 2)))
    return model(torch.randn(2, tokens, 20))


@pytest.mark.parametrize("tokens", [7, 3])
def test_grouped_heads_raise(rank_pool, tokens):
    for error in rank_pool.run_expecting_errors(attend_grouped, 2, tokens):
        assert isinstance(error, ValueError)
        assert "4 heads" in str(error)
        assert "[4, 2]" in str(error)
