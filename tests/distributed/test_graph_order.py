"""Collectives of one graph run in program order on every rank, even if a compiler could reorder independent
operators.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import UnifiedAttnMode
from tests.attention.one_device import relative_error
from tests.rank_pool import heartbeat

# These are independent attention calls of a graph, [1, heads, tokens of all ranks, width]. Inductor ordered the first
# pair by memory, which differs between the ranks.
SEEN = [(10, 65, 8), (25, 26, 8)]


def make_graph(seed):
    if seed == 0:
        return SEEN
    draw = random.Random(seed)
    return [(draw.randint(1, 30), draw.randint(2, 80), draw.choice([4, 8, 16])) for _ in range(draw.randint(2, 4))]


def make_inputs(sizes):
    return [torch.randn(1, H, S, D, generator=torch.Generator().manual_seed(i)) for i, (H, S, D) in enumerate(sizes)]


def compute(parts, attend):
    """Attend to each part independently. The inputs are scaled, so that a compiler has something to reorder."""
    return [attend(x * 2, x + 1, x - 1) for x in parts]


def traced_anew():
    """Return a context without the graph cache on disk, which may hold a trace of an earlier version of the code."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


def run_graph(seed, ring, ulysses, backend, backward):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    sizes = make_graph(seed)
    inputs = [x.requires_grad_(backward) for x in make_inputs(sizes)]
    mode = UnifiedAttnMode(mesh)

    def attend_to_all(*inputs):
        with mode:
            outs = []
            for x in inputs:
                tokens = mode.sequence(x.shape[2])
                part = mode.shard(x, 2, sequence=tokens)
                with mode.using(tokens):
                    out = F.scaled_dot_product_attention(part * 2, part + 1, part - 1)
                outs.append(mode.gather(out, 2, sequence=tokens))
            return outs

    heartbeat()
    with torch.set_grad_enabled(backward), traced_anew():
        outs = torch.compile(attend_to_all, fullgraph=True, backend=backend, dynamic=False)(*inputs)
    heartbeat()
    if not backward:
        return [out.detach() for out in outs], None
    torch.stack([out.square().sum() for out in outs]).sum().div(ring * ulysses).backward()
    for x in inputs:
        torch.distributed.all_reduce(x.grad)
    return [out.detach() for out in outs], [x.grad for x in inputs]


def check(rank_pool, seed, ring, ulysses, backend, backward=False):
    inputs = [x.requires_grad_(backward) for x in make_inputs(make_graph(seed))]
    expected = compute(inputs, F.scaled_dot_product_attention)
    if backward:
        torch.stack([out.square().sum() for out in expected]).sum().backward()
    results = rank_pool.run(run_graph, ring * ulysses, seed, ring, ulysses, backend, backward, timeout=300)
    for rank, (outs, grads) in enumerate(results):
        for out, whole in zip(outs, expected, strict=True):
            assert relative_error(out, whole.detach()) < 1e-5, f"rank {rank}"
        for grad, x in zip(grads or [], inputs if grads else [], strict=True):
            assert relative_error(grad, x.grad) < 1e-4, f"gradient, rank {rank}"


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long) for seed in range(20)])
def test_independent_attentions_keep_their_order_under_inductor(rank_pool, seed):
    check(rank_pool, seed, 1, 2, "inductor")


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long) for seed in range(4)])
def test_and_so_do_their_gradients(rank_pool, seed):
    check(rank_pool, seed, 1, 2, "inductor", backward=True)


def attend_to_one_token(ring, ulysses, backward):
    """Attend to one token, held by rank 0. Rank 1 computes tensors without elements, which its compiler would drop."""
    mode = UnifiedAttnMode(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")))
    x, weight = make_inputs([(2, 1, 8), (2, 8, 8)])

    def attend(x, weight):
        with mode:
            tokens = mode.sequence(x.shape[2])
            part = mode.shard(x, 2, sequence=tokens) @ weight
            with mode.using(tokens):
                out = F.scaled_dot_product_attention(part * 2, part + 1, part - 1)
            return out.square().sum()

    with torch.set_grad_enabled(backward), traced_anew():
        loss = torch.compile(attend, fullgraph=True, dynamic=False)(x, weight.requires_grad_(backward))
        if backward:
            loss.backward()
    return loss.detach(), weight.grad


@pytest.mark.long
@pytest.mark.parametrize(
    ("ring", "ulysses", "backward"),
    [(1, 2, True), *[pytest.param(*x, marks=pytest.mark.long) for x in ((2, 1, True), (2, 1, False), (1, 2, False))]],
)
def test_empty_rank_takes_part_in_collectives(rank_pool, ring, ulysses, backward):
    x, weight = make_inputs([(2, 1, 8), (2, 8, 8)])
    (part,) = compute([x @ weight.requires_grad_()], F.scaled_dot_product_attention)
    loss = part.square().sum()
    loss.backward()
    results = rank_pool.run(attend_to_one_token, 2, ring, ulysses, backward, timeout=120)
    for (actual, _), expected in zip(results, [loss.detach(), torch.tensor(0.0)], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
    if backward:
        assert relative_error(results[0][1] + results[1][1], weight.grad) < 1e-4


def trace(ring, ulysses, backward=True):
    """Return the para_core operators of each forward and backward graph that a compiler gets, the token that each one
    waits for, and the tokens that are waited for at the end.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    run_graph(0, ring, ulysses, compiler, backward)
    operators = []
    for graph in graphs:
        ours = [node for node in graph.nodes if "para_core." in str(node.target)]
        after = [node.args[len(node.target._schema.arguments) - 1] for node in ours]
        # The token is the last entry of the tuple that the previous operator returned.
        waits_for = [None if token is None or token.op == "placeholder" else token.args[0].name for token in after]
        waited = [node.args[0].args[0].name for node in graph.nodes if "wait_tensor" in str(node.target)]
        operators.append(([(node.name, node.target.name()) for node in ours], waits_for, waited))
    return operators


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_collectives_of_a_graph_are_ordered_by_tokens(rank_pool, ring, ulysses):
    for graphs in rank_pool.run(trace, ring * ulysses, ring, ulysses):
        assert len(graphs) == 2
        for ours, waits_for, waited in graphs:
            names = [name for name, _ in ours]
            assert len(names) >= 4
            assert waits_for == [None, *names[:-1]]
            # The last operator of the chain is a side effect, so no compiler can drop the chain on a rank that needs
            # none of the results.
            assert waited == names[-1:]
        computed = [[operator for _, operator in ours if "attention" in operator] for ours, *_ in graphs]
        # Nothing of the forward is computed again.
        assert computed == [["para_core::attention_to_learn"] * 2, ["para_core::attention_backward"] * 2]


def test_without_gradients_nothing_is_saved(rank_pool):
    for [(ours, *_)] in rank_pool.run(trace, 2, 1, 2, backward=False):
        assert [operator for _, operator in ours if "attention" in operator] == ["para_core::attention"] * 2
