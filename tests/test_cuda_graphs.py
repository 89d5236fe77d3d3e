"""Compiled models under CUDA graphs: where graphs are split, and which tensors must not be in their memory."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode, init_context_parallel_mesh

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def import_everything():
    """Import every module that may define an operator."""
    for folder, package in (("para_core", "para_core"), ("kernels", "para_core.kernels")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "LIBRARY" in file.read_text() or "define_collective(" in file.read_text():
                parts = file.relative_to(ROOT / folder).with_suffix("").parts
                import_module(".".join([package, *[part for part in parts if part != "__init__"]]))


def overloads():
    """Return every operator that is registered by para_core."""
    import_everything()
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("para_core::")]
    return [getattr(torch.ops.para_core, name.split("::")[1].partition(".")[0]).default for name in names]


def test_every_operator_ends_a_cuda_graph():
    operators = overloads()
    names = {operator._schema.name.removeprefix("para_core::") for operator in operators}
    assert {"all_to_all", "all_gather", "attention", "pack", "merge_", "triton_attention", "residual_change"} <= names
    untagged = [str(operator) for operator in operators if torch.Tag.cudagraph_unsafe not in operator.tags]
    assert untagged == []


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)])
def test_inductor_cuts_a_parallel_model_at_its_operators(ring, ulysses):
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    def attend(x):
        with mode:
            return torch.nn.functional.scaled_dot_product_attention(x + 1, x, x) * 2

    torch._dynamo.reset()
    with fake_group(2), torch.no_grad():
        mode = UnifiedAttnMode(init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses))
        backend = aot_autograd(fw_compiler=keep)
        torch.compile(attend, fullgraph=True, backend=backend)(torch.randn(1, 2, 8, 16))
    own = [node for graph in graphs for node in graph.graph.nodes if str(node.target).startswith("para_core.")]
    assert own
    first = get_first_incompatible_cudagraph_node(graphs[0])
    assert first is own[0]
