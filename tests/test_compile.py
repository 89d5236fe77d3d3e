"""Modes around and inside torch.compile(fullgraph=True): numbers, graphs, recompiles, warnings, refusals."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from para_core import UnifiedAttnMode, ring_attention, ulysses_attention, unified_attention
from tests.attention.one_device import make_qkv
from tests.modes.test_unified import Attention
from tests.rank_pool import RankPoolError
from tests.tiny import cpu_mesh, fill, relative_error


def make_model():
    return fill(Attention(width=12, heads=3), seed=1)


def tokens(S, batch=2):
    return torch.randn(batch, S, 12, generator=torch.Generator().manual_seed(S))


def run_in_form(form, meshes, lengths, backend):
    """Return each output of the compiled model, and the number of graphs after it."""
    model, counter, outs, graphs = make_model(), CompileCounterWithBackend(backend), [], []
    meshes = [cpu_mesh(*mesh) for mesh in meshes]
    outside = UnifiedAttnMode(meshes[0])

    def made_inside(x):
        with UnifiedAttnMode(meshes[0]) as cp:
            sequence = cp.sequence(x.shape[1])
            return cp.gather(model(cp.shard(x, dim=1, sequence=sequence)), dim=1, sequence=sequence)

    def made_outside(x):
        sequence = outside.sequence(x.shape[1])
        with outside:
            return outside.gather(model(outside.shard(x, dim=1, sequence=sequence)), dim=1, sequence=sequence)

    function = {"around": model, "made inside": made_inside, "made outside": made_outside}[form]
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    with torch.no_grad():
        for S in lengths:
            for mesh in meshes:
                if form == "around":
                    with UnifiedAttnMode(mesh) as cp:
                        outs.append(cp.gather(compiled(cp.shard(tokens(S), dim=1)), dim=1))
                else:
                    outs.append(compiled(tokens(S)))
                graphs.append(counter.frame_count)
    return outs, graphs


LENGTHS = [12, 12, 13, 7, 9, 30, 12]


@pytest.mark.parametrize(
    ("form", "meshes", "lengths", "backend"),
    [
        ("around", [(2, 1)], LENGTHS[:5], "aot_eager"),
        ("around", [(1, 2), (2, 1)], LENGTHS[1:4], "eager"),
        ("made inside", [(1, 2)], LENGTHS, "eager"),
        ("made outside", [(2, 1)], LENGTHS, "eager"),
        ("around", [(2, 1)], [12, 12], "inductor"),
    ],
)
def test_lengths_and_meshes_are_right_and_cost_few_graphs(rank_pool, form, meshes, lengths, backend):
    ranks = torch.Size(meshes[0]).numel()
    expected = [make_model()(tokens(S)) for S in lengths for _ in meshes]
    for rank, (outs, graphs) in enumerate(rank_pool.run(run_in_form, ranks, form, meshes, lengths, backend)):
        for index, (out, whole) in enumerate(zip(outs, expected, strict=True)):
            assert relative_error(out, whole) < 1e-5, f"call {index}, rank {rank}"
        # The second length equals the first, and all lengths together need few graphs more.
        assert graphs[1] == len(meshes) and graphs[-1] <= 4 * len(meshes)


def warn_and_refuse():
    mode = UnifiedAttnMode(cpu_mesh(1, 2))

    def shard(x):
        with mode:
            return mode.shard(x, dim=1)

    with pytest.raises(Exception, match=r"sequence=.* cp\.sequence"):
        torch.compile(shard, fullgraph=True, backend="eager")(tokens(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
            torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")(cp.shard(tokens(4), dim=1))
    assert any("intercepted no scaled_dot_product_attention" in str(warning.message) for warning in caught)
    region = torch.compiler.nested_compile_region(lambda x: F.scaled_dot_product_attention(x, x, x))
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(1, 2), assume_equal=True):
        torch.compile(lambda x: region(x) + 1, fullgraph=True, backend="eager")(torch.randn(1, 2, 4, 8))


def test_missing_sequence_unused_mode_and_nested_region_are_reported(rank_pool):
    # Dynamo of torch 2.11 shows the line that raises, not its message.
    refused = r"RuntimeError: .*nested_compile_region|in intercept\n    raise RuntimeError"
    with pytest.raises(RankPoolError, match=refused):
        rank_pool.run(warn_and_refuse, 2)


def graphs_of_aten(inside):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(make_model(), fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    with torch.no_grad():
        if inside:
            with UnifiedAttnMode(cpu_mesh(1, 1)) as cp:
                cp.gather(compiled(cp.shard(tokens(7), dim=1)), dim=1)
        else:
            compiled(tokens(7))
    return graphs


def test_on_one_rank_the_graph_is_the_unmodified_models(rank_pool):
    (plain,), (inside,) = rank_pool.run(graphs_of_aten, 1, False)[0], rank_pool.run(graphs_of_aten, 1, True)[0]
    assert "aten" in plain
    assert inside == plain


def call_functional_forms():
    parts = [x.chunk(2, dim=-2)[dist.get_rank()] for x in make_qkv(12, 4)]
    results = []
    for attention, shape in ((ring_attention, (2, 1)), (ulysses_attention, (1, 2)), (unified_attention, (1, 2))):
        for mesh in (dist.group.WORLD, cpu_mesh(*shape)):
            counter = CompileCounterWithBackend("eager")
            compiled = torch.compile(attention, fullgraph=True, backend=counter)
            outs = [compiled(*parts, mesh=mesh, is_causal=True) for _ in range(2)]
            results.append((outs, counter.frame_count))
    return results


def test_functional_forms_with_group_or_mesh_are_one_graph(rank_pool):
    expected = F.scaled_dot_product_attention(*make_qkv(12, 4), is_causal=True).chunk(2, dim=-2)
    for rank, results in enumerate(rank_pool.run(call_functional_forms, 2)):
        for index, (outs, graphs) in enumerate(results):
            assert graphs == 1
            assert max(relative_error(out, expected[rank]) for out in outs) < 1e-5, (index, rank)


def learn_through_checkpoint(inside):
    """Run a compiled training step whose backward recomputes attention, with the mode inside or outside of it."""
    mesh, counter = cpu_mesh(2, 1), CompileCounterWithBackend("aot_eager")
    qkv = [x.tensor_split(2, dim=2)[mesh.get_rank()].clone().requires_grad_() for x in make_qkv(16, 4)]
    mode = UnifiedAttnMode(mesh, assume_equal=True)

    def run(q, k, v):
        return checkpoint(lambda q: F.scaled_dot_product_attention(q * 2, k, v).sin(), q, use_reentrant=False)

    def run_inside(q, k, v):
        with mode:
            return run(q, k, v)

    if inside:
        out = torch.compile(run_inside, fullgraph=True, backend=counter)(*qkv)
    else:
        with mode:
            out = torch.compile(run, fullgraph=True, backend=counter)(*qkv)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in qkv)], counter.frame_count


@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpointing_in_a_compiled_function_is_parallel(rank_pool, inside):
    q, k, v = (x.requires_grad_() for x in make_qkv(16, 4))
    out = F.scaled_dot_product_attention(q * 2, k, v).sin()
    out.square().sum().backward()
    for rank, (parts, graphs) in enumerate(rank_pool.run(learn_through_checkpoint, 2, inside)):
        assert graphs == 1
        for part, whole in zip(parts, (out.detach(), q.grad, k.grad, v.grad), strict=True):
            assert relative_error(part, whole.tensor_split(2, dim=2)[rank]) < 1e-5


def guide(batch, ulysses, compiled):
    model, mesh = make_model(), cpu_mesh(1, ulysses, batch=batch)

    def step(x):
        sequence = cp.sequence(x.shape[1])
        branches = cp.split_branches(x.mT.contiguous().mT)
        assert branches.shape[0] == x.shape[0] // batch and branches.is_contiguous() == (batch > 1)
        own = model(cp.shard(branches, dim=1, sequence=sequence))
        return cp.merge_branches(cp.gather(own, dim=1, sequence=sequence))

    if compiled:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        if batch == 2:
            with pytest.raises(ValueError, match=r"\[3, 11, 12\], .*2 ranks .*'batch'"):
                cp.split_branches(tokens(11, 3))
        return [step(tokens(11, count)) for count in (2, 4)]


@pytest.mark.parametrize(("batch", "ulysses", "compiled"), [(2, 2, False), (1, 2, False), (2, 1, True)])
def test_branches_and_tokens_are_shared_out_together(rank_pool, batch, ulysses, compiled):
    for outs in rank_pool.run(guide, batch * ulysses, batch, ulysses, compiled):
        for out, count in zip(outs, (2, 4), strict=True):
            assert relative_error(out, make_model()(tokens(11, count))) < 1e-5
