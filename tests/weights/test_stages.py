"""Blocks in stages along ``pipe`` give the same bits as all blocks on one rank, and each rank holds only its own."""

from contextlib import nullcontext
from dataclasses import make_dataclass
from math import prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import fake_group
from benchmarks.pipelines.weights import build, call
from para_core import PipeFusion, init_context_parallel_mesh, reset_cache
from para_core.adapters import apply_cache_on_transformer, parallelize_pipe, parallelize_transformer
from para_core.adapters.inspect.block_stack import stack_of
from para_core.distributed import point_to_point
from para_core.distributed.mesh import guided_mesh
from para_core.distributed.point_to_point import Links
from para_core.torch_internals import is_registered
from para_core.weights.stack import StackedBlock, stages_of
from para_core.weights.stages import Stages, free_other_blocks
from tests.tiny import flux_pipe
from tests.weights.pipes import generate, make

DIMS = ("pipe", "batch", "ring", "ulysses")
Output = make_dataclass("Output", ["sample"])


def held(module):
    return sum(x.nbytes for x in module.parameters() if not x.is_meta)


def outputs_of(transformer, name, cache):
    """Return the output, or those of three calls of a cached model. The second is skipped, the third computed."""
    if not cache:
        return [call(transformer, name)]
    apply_cache_on_transformer(transformer, residual_diff_threshold=10.0, max_consecutive_hits=1)
    reset_cache(transformer)
    return [call(transformer, name, change) for change in (0.0, 0.01, 0.02)]


def in_stages(name, shape, cache):
    """Return whether the bits equal those without stages, and this rank's share of the weights."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMS)
    transformer, whole = build(name), build(name)
    if mesh["batch", "ring", "ulysses"].size() > 1:
        parallelize_transformer(whole, mesh=mesh["batch", "ring", "ulysses"])
    everything = held(transformer)
    parallelize_transformer(transformer, mesh=mesh)
    equal = all(map(torch.equal, outputs_of(transformer, name, cache), outputs_of(whole, name, cache)))
    own = stages_of(transformer).block_range
    for index, item in enumerate(stack_of(transformer)):
        assert all(x.is_meta != (index in own) for x in item.block.parameters())
    return equal, held(transformer) / everything


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "shape", "cache"),
    [
        ("flux", (2, 1, 1, 2), False),
        ("hunyuan", (2, 1, 2, 1), False),
        ("cogvideox, rotary", (2, 2, 1, 1), False),
        ("flux", (4, 1, 1, 1), False),
        ("flux", (2, 1, 1, 1), True),
        ("wan", (2, 1, 1, 2), True),
    ],
)
def test_stages_are_bit_exact(rank_pool, name, shape, cache):
    for equal, share in rank_pool.run(in_stages, prod(shape), name, shape, cache):
        assert equal and share < 0.9


def meshes_with_stages():
    with pytest.raises(TypeError, match=r"max_pipe_dim_size .*'2'; "):
        init_context_parallel_mesh("cpu", max_pipe_dim_size="2")
    assert init_context_parallel_mesh("cpu").mesh_dim_names == DIMS[1:]
    mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=2, max_batch_dim_size=2)
    guided = guided_mesh(mesh)
    assert mesh.mesh_dim_names == DIMS
    assert (guided.ranks, guided.rank) == (4, dist.get_rank())
    alone = guided_mesh(init_context_parallel_mesh("cpu", max_pipe_dim_size=4)["pipe"])
    # A linear layer and a block without weights compute the same in stages.
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(3, 3), torch.nn.Tanh()]
    model, x = torch.nn.Sequential(*blocks), torch.randn(2, 3)
    # A dataclass is no pytree.
    model.register_forward_hook(lambda module, args, output: Output(output))
    expected = model(x).sample
    with torch.no_grad():
        stages = Stages(model, [StackedBlock(block, ("input",), 1.0) for block in blocks], guided.pipe, None)
        stages.install()
        free_other_blocks(stages)
        assert torch.equal(model(x).sample, expected)
    with pytest.raises(RuntimeError, match="Sequential in stages requires a gradient"):
        model(x.requires_grad_())
    return [guided.pipe.index, guided.batch.index, guided.sequence.ranks, alone.pipe.index, alone.ranks]


def test_ranks_of_a_stage_are_neighbours(rank_pool):
    indices = rank_pool.run(meshes_with_stages, 4)
    assert indices == [[0, 0, 1, 0, 4], [0, 1, 1, 1, 4], [1, 0, 1, 2, 4], [1, 1, 1, 3, 4]]


def test_stages_that_do_not_fit_are_refused():
    with fake_group(8):
        mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=8)
        with pytest.raises(ValueError, match=r"4 blocks, .*8 stages"):
            parallelize_pipe(flux_pipe(), mesh=mesh)
        mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
        with pytest.raises(ValueError, match=r"weights='fsdp' .*2 stages"):
            parallelize_pipe(flux_pipe(), mesh=mesh, weights="fsdp")


STEPS = 9
PIPES = {"PipeFusion": PipeFusion(3), "stages": None}


class Stop(Exception):
    """The error that the tests raise on all ranks."""


def run(pipe, **options):
    return generate(pipe, "flux", num_inference_steps=STEPS, **options)


def on_one_rank(kind):
    """Return the latents of one process, from the unmodified pipeline or with the same patches."""
    return run(make("flux") if PIPES[kind] is None else parallelize_pipe(make("flux"), pipefusion=PIPES[kind]))


def as_nccl():
    """Make links take every group for one of NCCL: a group per edge, no tags, and new groups after a failure."""
    return mock.patch.object(point_to_point, "nccl_device", lambda group: torch.device("cpu"))


# The number of messages that each rank sends, and of receives that it starts, before all ranks raise.
FAILED = [((1, 0), (0, 0)), ((0, 0), (0, 2)), ((2, 1), (1, 1)), ((3, 0), (0, 1)), ((0, 0), (0, 0))]


def failing_transfers(nccl):
    """Run generations over one edge in each direction, of which the first one fails on all ranks."""
    dim, size = guided_mesh(init_context_parallel_mesh("cpu", max_pipe_dim_size=2)).pipe, 300_000
    peer = 1 - dim.index
    with as_nccl() if nccl else nullcontext(), mock.patch.object(point_to_point, "_GRACE", 0.1):
        for sent, taken in FAILED:
            links, others = Links(dim, [(0, 1), (1, 0)]), Links(dim, [(0, 1), (1, 0)])
            links.begin()
            with mock.patch.object(dist, "irecv", wraps=dist.irecv) as started:
                for _ in range(sent[dim.index]):
                    # This is more than a socket accepts at once.
                    links.send(torch.full((size,), 1.0), peer)
                for _ in range(taken[dim.index]):
                    links.receive(torch.empty(size), peer)
                links.mark_broken()
            if nccl and taken[dim.index] > sent[peer]:
                # A receive without a sender is a kernel of NCCL that runs for ever: waiting for the device would hang.
                assert not any(is_registered(call.kwargs["group"]) for call in started.call_args_list)
            for number, each in ((2.0, links), (3.0, links), (4.0, others)):
                each.begin()
                each.send(torch.full((size,), number), peer)
                assert each.receive(torch.empty(size), peer).wait().unique().tolist() == [number]
                each.drain()
            # Other collectives on the same connections still work.
            total = torch.ones(size)
            dist.all_reduce(total)
            assert total.unique().tolist() == [2.0]


@pytest.mark.parametrize("nccl", [False, True])
def test_messages_of_failed_generation_are_dropped(rank_pool, nccl):
    rank_pool.run(failing_transfers, 2, nccl)


def fail_and_generate(kind, where, nccl):
    """Return the latents after two failed generations."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",))
    pipe, calls = parallelize_pipe(make("flux"), mesh=mesh, pipefusion=PIPES[kind], timeout=20), []
    module = {"call": pipe.transformer, "after the blocks": pipe.transformer.norm_out}.get(where)

    def fail(*_):
        calls.append(0)
        if len(calls) == 5:
            raise Stop

    with as_nccl() if nccl else nullcontext(), mock.patch.object(point_to_point, "_GRACE", 0.1):
        for _ in range(2):
            calls.clear()
            hook = None if module is None else module.register_forward_pre_hook(fail)
            with pytest.raises(Stop):
                run(pipe, **({"callback_on_step_end": lambda *_: fail() or {}} if module is None else {}))
            if hook is not None:
                hook.remove()
        return run(pipe)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "ranks", "where", "nccl"),
    [("PipeFusion", 2, "call", True), ("PipeFusion", 3, "callback", False), ("stages", 2, "after the blocks", True)],
)
def test_a_generation_after_a_failed_one_is_right(rank_pool, kind, ranks, where, nccl):
    expected = on_one_rank(kind)
    for latents in rank_pool.run(fail_and_generate, ranks, kind, where, nccl):
        assert torch.equal(latents, expected)
