"""Collectives of one graph run in program order on every rank: each operator waits for the token of the one before."""

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from para_core import UnifiedAttnMode
from tests.tiny import cpu_mesh

# Independent attention calls, as [1, heads, tokens, width]. Inductor ordered them by memory, which ranks differ in.
SHAPES = [(1, 10, 65, 8), (1, 25, 26, 8)]


def trace():
    """Return the para_core operators of each forward and backward graph that a compiler gets, the token that each one
    waits for, and the tokens that are waited for at the end.
    """
    mode, graphs = UnifiedAttnMode(cpu_mesh(2, 1)), []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def attend_to_all(*inputs):
        total = 0
        with mode:
            for x in inputs:
                tokens = mode.sequence(x.shape[2])
                part = mode.shard(x, 2, sequence=tokens)
                with mode.using(tokens):
                    out = F.scaled_dot_product_attention(part * 2, part + 1, part - 1)
                total = total + mode.gather(out, 2, sequence=tokens).square().sum()
        return total

    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    # The graph cache on disk may hold a trace of an earlier version of the code.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        call = torch.compile(attend_to_all, fullgraph=True, backend=compiler, dynamic=False)
        call(*[torch.randn(shape, requires_grad=True) for shape in SHAPES]).backward()
    operators = []
    for graph in graphs:
        ours = [node for node in graph.nodes if "para_core." in str(node.target)]
        after = [node.args[len(node.target._schema.arguments) - 1] for node in ours]
        # The token is the last entry of the tuple that the previous operator returned.
        waits_for = [None if token is None or token.op == "placeholder" else token.args[0].name for token in after]
        waited = [node.args[0].args[0].name for node in graph.nodes if "wait_tensor" in str(node.target)]
        operators.append(([(node.name, node.target.name()) for node in ours], waits_for, waited))
    return operators


def test_collectives_of_a_graph_are_ordered_by_tokens(rank_pool):
    for graphs in rank_pool.run(trace, 2):
        assert len(graphs) == 2
        for ours, waits_for, waited in graphs:
            names = [name for name, _ in ours]
            assert len(names) >= 4
            assert waits_for == [None, *names[:-1]]
            # The last operator of the chain is a side effect, so no compiler can drop it on a rank that needs none.
            assert waited == names[-1:]
        computed = [[operator for _, operator in ours if "attention" in operator] for ours, *_ in graphs]
        # Nothing of the forward is computed again.
        assert computed == [["para_core::attention_to_learn"] * 2, ["para_core::attention_backward"] * 2]
