"""Point-to-point transfers between stages: the order of first uses, and failed generations."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, parallelize_vae
from para_core.distributed import point_to_point
from para_core.distributed.mesh import guided_mesh
from para_core.distributed.point_to_point import Links
from para_core.torch_internals import is_registered
from tests.spatial.test_unets import predict
from tests.tiny import flux_call, flux_pipe, relative_error
from tests.weights.links import as_nccl, blocking_transfers
from zoo.tiny.vaes import TINY_VAES, random_image

STEPS = 9
PIPES = {
    "PipeFusion": PipeFusion(3),
    "stages": None,
}


class Stop(Exception):
    """The error that the tests raise on all ranks."""


def flux_in_stages(kind, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",))
    return parallelize_pipe(flux_pipe(shared_parts=False), mesh=mesh, pipefusion=PIPES[kind], **options)


def generate(pipe, **options):
    return pipe(**flux_call(num_inference_steps=STEPS, **options))[0]


def on_one_rank(kind):
    """Return the latents of one process, from the unmodified pipeline or with the same patches."""
    pipe = flux_pipe(shared_parts=False)
    return generate(pipe if PIPES[kind] is None else parallelize_pipe(pipe, pipefusion=PIPES[kind]))


# -- The first use of an edge.


def with_blocking_transfers(kind, always, nccl):
    with blocking_transfers(always=always):
        if not nccl:
            return generate(flux_in_stages(kind))
        with as_nccl():
            return generate(flux_in_stages(kind))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "world_size", "always", "nccl"),
    [
        ("PipeFusion", 2, False, False),
        ("PipeFusion", 2, True, True),
        ("PipeFusion", 3, True, False),
        ("stages", 2, True, False),
        pytest.param("PipeFusion", 3, False, True, marks=pytest.mark.long),
        pytest.param("PipeFusion", 4, True, True, marks=pytest.mark.long),
        pytest.param("stages", 3, True, True, marks=pytest.mark.long),
    ],
)
def test_blocking_transfers_do_not_deadlock(rank_pool, kind, world_size, always, nccl):
    expected = on_one_rank(kind)
    for latents in rank_pool.run(with_blocking_transfers, world_size, kind, always, nccl):
        assert torch.equal(latents, expected)


@torch.no_grad()
def rows_with_blocking_transfers():
    """Return the errors of decoding, encoding and a prediction with distributed rows, each relative to one rank."""
    tiny = TINY_VAES["KL"]
    alone, vae = tiny.make(), tiny.make()
    latents, pixels = random_image(tiny.latents), random_image(tiny.pixels)
    expected = tiny.decode(alone, latents), tiny.encode(alone, pixels), predict("Stable Diffusion 1.5", 18, 10, False)
    with blocking_transfers(always=True):
        parallelize_vae(vae, mesh=init_context_parallel_mesh("cpu"))
        outs = tiny.decode(vae, latents), tiny.encode(vae, pixels), predict("Stable Diffusion 1.5", 18, 10, True)
    return [relative_error(out, reference) for out, reference in zip(outs, expected, strict=True)]


def test_blocking_halos_do_not_deadlock(rank_pool):
    for errors in rank_pool.run(rows_with_blocking_transfers, 3):
        assert max(errors) < 1e-5


# -- Failed generations.


# The number of messages that each rank sends, and of receives that it starts, before all ranks raise.
FAILED = [((1, 0), (0, 0)), ((0, 0), (0, 2)), ((2, 1), (1, 1)), ((3, 0), (0, 1)), ((0, 0), (0, 0))]


def all_failing_transfers(nccl):
    return [failing_transfers(nccl, *counts) for counts in FAILED]


def failing_transfers(nccl, sent_by, taken):
    """Run two generations over one edge in each direction. In the first one ``sent_by`` sends 1.0, ``taken`` receives
    start, and all ranks raise.
    """
    dim = guided_mesh(init_context_parallel_mesh("cpu", max_pipe_dim_size=2)).pipe
    with as_nccl() if nccl else torch.no_grad(), mock.patch.object(point_to_point, "_GRACE", 0.3):
        links, others = Links(dim, [(0, 1), (1, 0)]), Links(dim, [(0, 1), (1, 0)])
        size = 300_000  # This is more than a socket accepts at once.
        results = []
        for number in (1.0, 2.0, 3.0):
            links.begin()
            try:
                peer = 1 - dim.index
                if number == 1.0:
                    for _ in range(sent_by[dim.index]):
                        links.send(torch.full((size,), 1.0), peer)
                    for _ in range(taken[dim.index]):
                        links.receive(torch.empty(size), peer)
                    raise Stop
                links.send(torch.full((size,), number), peer)
                results.append(links.receive(torch.empty(size), peer).wait().unique().tolist())
                links.drain()
            except Stop:
                links.mark_broken()
        others.begin()
        others.send(torch.full((3,), 4.0), peer)
        results.append(others.receive(torch.empty(3), peer).wait().unique().tolist())
        others.drain()
        # Other collectives on the same connections still work.
        total = torch.ones(size)
        dist.all_reduce(total)
        return results, total.unique().tolist()


@pytest.mark.parametrize("nccl", [False, True])
def test_messages_of_failed_generation_are_dropped(rank_pool, nccl):
    for outcomes in rank_pool.run(all_failing_transfers, 2, nccl):
        assert outcomes == [([[2.0], [3.0], [4.0]], [2.0])] * len(FAILED)


def fail_and_generate(kind, where, nccl, calls):
    """Generate after a failed generation, and after another one."""
    if nccl:
        with as_nccl(), mock.patch.object(point_to_point, "_GRACE", 0.3):
            return fail_and_generate(kind, where, False, calls)
    pipe = flux_in_stages(kind, timeout=20)
    transformer, numbers = pipe.transformer, []
    forward = type(transformer).forward

    def raise_at_call(module, args, kwargs):
        numbers.append(0)
        if len(numbers) == calls:
            raise Stop

    def raise_at_step(pipe, step, time, tensors):
        if step == calls - 1:
            raise Stop
        return {}

    hook = None
    for _ in range(2):
        numbers.clear()
        if where == "call":
            hook = transformer.register_forward_pre_hook(raise_at_call, with_kwargs=True)
        with pytest.raises(Stop):
            generate(pipe, **({"callback_on_step_end": raise_at_step} if where == "callback" else {}))
        if hook is not None:
            hook.remove()
    assert type(transformer).forward is forward
    latents = generate(pipe)
    with pytest.raises(Stop):
        generate(pipe, callback_on_step_end=lambda *_: (_ for _ in ()).throw(Stop))
    return latents, generate(pipe)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "world_size", "where", "nccl", "calls"),
    [
        ("PipeFusion", 2, "call", False, 5),
        ("PipeFusion", 3, "call", False, 5),
        ("PipeFusion", 3, "callback", False, 4),
        ("PipeFusion", 2, "callback", False, 5),
        ("PipeFusion", 2, "call", True, 5),
        ("stages", 2, "call", False, 5),
        pytest.param("PipeFusion", 2, "callback", False, STEPS, marks=pytest.mark.long),
        pytest.param("PipeFusion", 3, "callback", True, 5, marks=pytest.mark.long),
        pytest.param("PipeFusion", 4, "call", False, 7, marks=pytest.mark.long),
        pytest.param("stages", 3, "callback", True, 2, marks=pytest.mark.long),
    ],
)
def test_a_generation_after_a_failed_one_is_right(rank_pool, kind, world_size, where, nccl, calls):
    expected = on_one_rank(kind)
    for outs in rank_pool.run(fail_and_generate, world_size, kind, where, nccl, calls):
        assert all(torch.equal(latents, expected) for latents in outs)


def transfers_after_failure(kind):
    """Return how many transfers a generation started that fails after the blocks, and how many still run when its error
    is caught.
    """
    transfers, calls = [], []

    def recorded(start):
        def start_and_record(*args, group=None, **kwargs):
            transfers.append((start(*args, group=group, **kwargs), group))
            return transfers[-1][0]

        return start_and_record

    def raise_at_fifth(module, args):
        calls.append(0)
        if len(calls) == 5:
            raise Stop

    with as_nccl(), mock.patch.object(point_to_point, "_GRACE", 0.1):
        pipe = flux_in_stages(kind)
        pipe.transformer.norm_out.register_forward_pre_hook(raise_at_fifth)
        with (
            mock.patch.object(dist, "isend", recorded(dist.isend)),
            mock.patch.object(dist, "irecv", recorded(dist.irecv)),
            pytest.raises(Stop),
        ):
            generate(pipe)
        return len(transfers), sum(not work.is_completed() and is_registered(group) for work, group in transfers)


@pytest.mark.parametrize("kind", PIPES)
def test_failed_generation_leaves_no_transfer_on_nccl(rank_pool, kind):
    # A receive without a sender is a kernel that runs for ever. A call that waits for the device, such as
    # torch.cuda.empty_cache(), would hang.
    for started, running in rank_pool.run(transfers_after_failure, 2, kind):
        assert started > 0
        assert running == 0
