"""Blocks in stages along ``pipe`` give the same bits as all blocks on one rank, and each rank holds only its own."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import fake_group
from benchmarks.pipelines.weights import NAMES, build, call
from para_core import init_context_parallel_mesh, reset_cache
from para_core.adapters import (
    apply_cache_on_transformer,
    parallelize_pipe,
    parallelize_transformer,
)
from para_core.adapters.inspect.components import cost_of, stack_of
from para_core.distributed.mesh import guided_mesh
from para_core.weights.balance import balanced
from para_core.weights.stack import StackedBlock, stages_of
from para_core.weights.stages import Stages, free_other_blocks
from tests.tiny import flux_pipe, flux_transformer

DIMS = ("pipe", "batch", "ring", "ulysses")


def held(module):
    return sum(x.nbytes for x in module.parameters() if not x.is_meta)


# -- Which blocks a stage has.


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=9), num_stages=st.integers(1, 5))
def test_the_slowest_stage_costs_the_least_that_is_possible(costs, num_stages):
    if num_stages > len(costs):
        with pytest.raises(ValueError, match=rf"{len(costs)} blocks, .*{num_stages} stages.*max_pipe_dim_size"):
            balanced(costs, num_stages)
        return
    stages = balanced(costs, num_stages)
    assert [index for own in stages for index in own] == list(range(len(costs)))
    assert all(stages)
    places = itertools.combinations(range(1, len(costs)), num_stages - 1)
    ways = [[0, *inner, len(costs)] for inner in places]
    least = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(way)) for way in ways)
    assert max(sum(costs[index] for index in own) for own in stages) == least


def test_flux_double_block_costs_as_much_as_single():
    transformer = flux_transformer()
    double, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    assert held(double) > 2 * held(single)
    assert 0.8 < cost_of(double) / cost_of(single) < 1.25
    assert [item.block for item in stack_of(transformer)] == [
        *transformer.transformer_blocks,
        *transformer.single_transformer_blocks,
    ]


# -- The mesh.


def shapes_of_meshes():
    with pytest.raises(TypeError, match=r"max_pipe_dim_size .*'2'; "):
        init_context_parallel_mesh("cpu", max_pipe_dim_size="2")
    mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=2, max_batch_dim_size=2)
    assert mesh.mesh_dim_names == DIMS
    guided = guided_mesh(mesh)
    assert (guided.ranks, guided.rank) == (4, dist.get_rank())
    assert init_context_parallel_mesh("cpu").mesh_dim_names == DIMS[1:]
    alone = guided_mesh(init_context_parallel_mesh("cpu", max_pipe_dim_size=4)["pipe"])
    return [guided.pipe.index, guided.batch.index, guided.sequence.ranks, alone.pipe.index, alone.ranks]


def test_ranks_of_a_stage_are_neighbours(rank_pool):
    assert rank_pool.run(shapes_of_meshes, 4) == [[0, 0, 1, 0, 4], [0, 1, 1, 1, 4], [1, 0, 1, 2, 4], [1, 1, 1, 3, 4]]


# -- Exactness.


def cached(transformer, name):
    """Return the outputs of three calls of a cached model. The second is skipped, and the third is computed."""
    apply_cache_on_transformer(transformer, residual_diff_threshold=10.0, max_consecutive_hits=1)
    reset_cache(transformer)
    return [call(transformer, name, change) for change in (0.0, 0.01, 0.02)]


def in_stages(names, shape, cache=False):
    """Return, for each model, whether the bits equal those without stages, and this rank's share of the weights."""
    mesh, results = init_device_mesh("cpu", shape, mesh_dim_names=DIMS), {}
    for name in names:
        transformer, whole = build(name), build(name)
        if mesh["batch", "ring", "ulysses"].size() > 1:
            parallelize_transformer(whole, mesh=mesh["batch", "ring", "ulysses"])
        everything = held(transformer)
        parallelize_transformer(transformer, mesh=mesh)
        outs = [cached(each, name) if cache else [call(each, name)] for each in (transformer, whole)]
        own = stages_of(transformer).own
        assert all(
            x.is_meta != (index in own)
            for index, item in enumerate(stack_of(transformer))
            for x in item.block.parameters()
        )
        results[name] = all(map(torch.equal, *outs)), held(transformer) / everything
    return results


ALL = list(NAMES.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("names", "shape", "cache"),
    [
        (["flux"], (2, 1, 1, 2), False),
        (["hunyuan"], (2, 1, 2, 1), False),
        (["cogvideox, rotary"], (2, 2, 1, 1), False),
        (["flux"], (4, 1, 1, 1), False),
        (["flux", "wan"], (2, 1, 1, 1), True),
        *[pytest.param(ALL, (2, *rest), False, marks=pytest.mark.long) for rest in ((1, 2, 1), (2, 1, 1))],
        *[pytest.param(ALL, (2, 1, 1, size), True, marks=pytest.mark.long) for size in (1, 2)],
    ],
)
def test_stages_are_bit_exact(rank_pool, names, shape, cache):
    for results in rank_pool.run(in_stages, torch.Size(shape).numel(), names, shape, cache=cache):
        assert all(equal for equal, _ in results.values()), results
        assert all(share < 0.9 for _, share in results.values()), results


def stages_without_weights():
    """Return whether a linear layer and a block without weights compute the same in stages."""
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(3, 3), torch.nn.Tanh()]
    model, x = torch.nn.Sequential(*blocks), torch.randn(2, 3)
    expected = model(x)
    mesh = guided_mesh(init_context_parallel_mesh("cpu", max_pipe_dim_size=2))
    with torch.no_grad():
        stages = Stages(model, [StackedBlock(block, ("input",), 1.0) for block in blocks], mesh.pipe, None)
        stages.install()
        free_other_blocks(stages)
        return torch.equal(model(x), expected)


def test_stage_without_weights_is_exact(rank_pool):
    assert rank_pool.run(stages_without_weights, 2) == [True, True]


def compiled_blocks():
    transformer, whole = build("flux"), build("flux")
    parallelize_transformer(transformer, mesh=init_context_parallel_mesh("cpu", max_pipe_dim_size=2))
    for each in (transformer, whole):
        each.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    outputs = call(transformer, "flux"), call(whole, "flux")
    with pytest.raises(RuntimeError, match=r"compiled .*stage"):
        call(torch.compile(transformer, backend="aot_eager", fullgraph=True), "flux")
    return outputs


@pytest.mark.long
def test_staged_blocks_compile_and_whole_does_not(rank_pool):
    for outputs in rank_pool.run(compiled_blocks, 2):
        assert torch.equal(*outputs)


def test_stages_that_do_not_fit_are_refused():
    with fake_group(8):
        mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=8)
        with pytest.raises(ValueError, match=r"4 blocks, .*8 stages"):
            parallelize_pipe(flux_pipe(), mesh=mesh)
        mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
        with pytest.raises(ValueError, match=r"weights='fsdp' .*2 stages"):
            parallelize_pipe(flux_pipe(), mesh=mesh, weights="fsdp")
