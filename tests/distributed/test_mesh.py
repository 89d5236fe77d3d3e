"""The shape of the mesh, and the objects that are accepted as a mesh."""

import os
import re
from functools import partial
from math import prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from para_core import (
    BatchParallelAttnMode,
    ContextParallelConfig,
    RingAttnMode,
    UlyssesAttnMode,
    UnifiedAttnMode,
    apply_context_parallel,
    init_context_parallel_mesh,
    unified_attention,
)
from para_core.distributed.agree import exchange
from para_core.distributed.create_mesh import check_no_shared_gpu, ranks_per_host_of_launcher
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.mesh import sequence_mesh
from para_core.distributed.mesh_shape import MESH_NAMES, mesh_sizes
from para_core.weights.group import sequence_ranks, weights_mesh
from tests.attention.one_device import make_qkv, relative_error
from tests.modes.outcomes import outcome
from tests.tiny import cpu_mesh, flux_transformer


@given(st.integers(1, 64), st.fixed_dictionaries({name: st.none() | st.integers(1, 12) for name in MESH_NAMES}))
def test_each_dim_is_largest_divisor_left_or_the_error_names_sizes_that_fit(num_ranks, limits):
    left, expected = num_ranks, {}
    for name in ("tensor", "pipe", "batch", "ring", "ulysses"):
        expected[name] = max(n for n in range(1, (limits[name] or 1) + 1) if left % n == 0)
        left //= expected[name]
    if limits["ulysses"] is None:
        expected["ulysses"], left = left, 1
    elif limits["ring"] is None:
        expected["ring"], left = left, 1
    if left == 1:
        assert {"tensor": 1, "pipe": 1, **mesh_sizes(num_ranks, limits)} == expected
        return
    with pytest.raises(ValueError, match=rf"^mesh is .* {num_ranks} ranks: batch .*ring .*ulysses ") as error:
        mesh_sizes(num_ranks, limits)
    fitting = re.findall(r"(\w+)=(\d+)", str(error.value).partition("The largest sizes")[2])
    assert {name for name, _ in fitting} == {"batch", "ring", "ulysses"}
    for name, size in fitting:
        assert prod(mesh_sizes(num_ranks, {**limits, name: int(size)}).values()) == num_ranks


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mesh_sizes(4, {"ring": 0}), ValueError, r"ring.* 0;.* 1"),
        (lambda: mesh_sizes(4, {"batch": -1}), ValueError, r"batch.* -1;.* 1"),
        *[(partial(mesh_sizes, 4, {"ulysses": n}), TypeError, f"ulysses.* {n!r}") for n in (2.0, "2", True)],
        (lambda: mesh_sizes(4, {"rings": 2}), ValueError, r"'rings'.* ring"),
        (lambda: mesh_sizes(0, {}), ValueError, r"0 ranks.* at least 1"),
        (lambda: mesh_sizes(9, {"ring": 8, "ulysses": 2}), ValueError, r"not fit 9 ranks.* ring 3 .* 3 of them"),
        (lambda: init_context_parallel_mesh("cpu"), RuntimeError, "init_process_group"),
        (lambda: UnifiedAttnMode("cuda"), TypeError, r"mesh.* str.* DeviceMesh .*ProcessGroup"),
    ],
)
def test_what_is_no_mesh_is_an_error(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_ranks_that_share_a_gpu_are_named():
    check_no_shared_gpu(dict(enumerate([("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")])))
    with pytest.raises(RuntimeError, match=r"ranks \[5, 6, 7\] on host a .*device 0.*get_node_local_rank\(\)"):
        check_no_shared_gpu({4: ("b", "1"), 5: ("a", "0"), 6: ("a", "0"), 7: ("a", "0")})
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] on host a .*device 1.*GPUs"):
        check_no_shared_gpu({0: ("a", "0"), 1: ("a", "1"), 2: ("a", "1")})


def say_which_share(gpus, backend="nccl", device_type="cuda"):
    """Return the error and the number of exchanges of all that accepts a user's mesh, while torch reports that each
    rank is on its entry of ``gpus``, and that ``backend`` serves the GPUs of every group.
    """
    flux, parts, world = flux_transformer(), [x.chunk(4, dim=2)[0] for x in make_qkv(12, 4)], dist.group.WORLD
    makers = {
        "mode": lambda: UnifiedAttnMode(square),
        "mode of one dim": lambda: RingAttnMode(square["ring"]),
        "group": lambda: UnifiedAttnMode(world),
        "in batch": lambda: BatchParallelAttnMode(line),
        "plan": lambda: apply_context_parallel(flux, ContextParallelConfig(mesh=square), flux._cp_plan),
        "init_context_parallel_mesh": lambda: init_context_parallel_mesh(device_type, max_ring_dim_size=2),
        "assume_equal": lambda: (
            UnifiedAttnMode(square, assume_equal=True),
            BatchParallelAttnMode(world, assume_equal=True),
            unified_attention(*parts, mesh=world, assume_equal=True),
        ),
    }
    get_backend, gpu = dist.ProcessGroup._get_backend, gpus[dist.get_rank()]

    def named(group, device):
        return mock.Mock(**{"name.return_value": backend}) if device.type == "cuda" else get_backend(group, device)

    results, properties = {}, mock.Mock(uuid=gpu)
    with (
        mock.patch.object(dist.ProcessGroup, "_get_backend", named),
        mock.patch.object(torch.cuda, "is_initialized", return_value=gpu is not None),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        # Creating a mesh for CUDA sets the device.
        square = init_device_mesh(device_type, (2, 2), mesh_dim_names=("ring", "ulysses"))
        line = init_device_mesh(device_type, (4,), mesh_dim_names=("batch",))
        for name, make in makers.items():
            with mock.patch("para_core.distributed.create_mesh.exchange", wraps=exchange) as exchanged:
                results[name] = error_of(make), exchanged.call_count
    return results


def all_shares():
    silent = [say_which_share("ABCD"), say_which_share(["A", None, None, "B"])]
    unasked = [say_which_share("AAAA", "gloo"), say_which_share("AAAA", device_type="cpu")]
    return say_which_share("ABCA"), silent, unasked


def test_shared_gpu_raises_on_its_ranks(rank_pool):
    for rank, (shared, silent, unasked) in enumerate(rank_pool.run(all_shares, 4)):
        # Ranks 0 and 3 have no mesh dim in common, and ranks 1 and 2 have no fault to report.
        for name, (message, exchanges) in shared.items():
            is_checked = name not in ("mode of one dim", "assume_equal")
            expected = "RuntimeError: ranks [0, 3] on host" if is_checked else "no error"
            assert message.startswith(expected), f"{name}, rank {rank}: {message}"
            assert exchanges == (name != "assume_equal"), name
        assert {message for results in silent for message, _ in results.values()} == {"no error"}
        # A plain group has no device type of its own: its GPUs are compared if NCCL serves them.
        outcomes = {result for results in unasked for name, result in results.items() if name != "group"}
        assert outcomes == {("no error", 0)}


# By mesh shape (batch, ring, ulysses): sizes of new groups, and how many groups are requested of torch. A group of
# all ranks is the default group, dims of size 1 share one, and for dims of 2 torch creates both on every rank.
GROUPS = {(1, 1, 4): ([1], 1), (1, 4, 1): ([], 0), (4, 1, 1): ([], 0), (1, 2, 2): ([2, 2], 4), (2, 2, 1): ([2, 2], 4)}


def groups_made(shapes):
    c10d, counts, names = dist.distributed_c10d, {}, ("batch", "ring", "ulysses")
    for shape in shapes:
        before = set(c10d._world.pg_map)
        with mock.patch.object(c10d, "_new_process_group_helper", wraps=c10d._new_process_group_helper) as requests:
            maxima = {f"max_{name}_dim_size": size for name, size in zip(names, shape, strict=True)}
            mesh = init_context_parallel_mesh("cpu", **maxima)
            attend_chunk(UnifiedAttnMode(mesh))
        counts[shape] = sorted(group.size() for group in set(c10d._world.pg_map) - before), requests.call_count
        for name in names:
            assert mesh[name].get_group() is mesh["batch", "ring", "ulysses"].get_group(name) is mesh.get_group(name)
    return counts


def test_dims_of_size_1_share_one_group(rank_pool):
    assert rank_pool.run(groups_made, 4, list(GROUPS)) == [GROUPS] * 4
    assert rank_pool.run(groups_made, 1, [(1, 1, 1)]) == [{(1, 1, 1): ([], 0)}]


def attend_chunk(mode):
    """Attend to this rank's chunk of the tokens and return this rank's part of the result."""
    q, k, v = (x.chunk(mode._mesh.ranks, dim=-2)[mode._mesh.rank] for x in make_qkv(12, 4))
    with mode:
        return F.scaled_dot_product_attention(q, k, v)


def attend_in_every_kind_of_mesh():
    both = cpu_mesh(2, 2)
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    replicas = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))["ring", "ulysses"]
    modes = {
        "both": UnifiedAttnMode(both),
        "swapped": UnifiedAttnMode(swapped),
        "ring": UnifiedAttnMode(both["ring"]),
        "ring mode": RingAttnMode(both["ring"]),
        "ulysses mode": UlyssesAttnMode(both["ulysses"]),
        "group": UnifiedAttnMode(dist.group.WORLD),
        "ring group": RingAttnMode(dist.group.WORLD),
        "ulysses group": UlyssesAttnMode(both.get_group("ulysses")),
        "batch": UnifiedAttnMode(init_context_parallel_mesh("cpu", max_batch_dim_size=2)),
    }
    outs = {name: (mode._mesh.ranks, mode._mesh.rank, attend_chunk(mode)) for name, mode in modes.items()}
    for first in (True, False):  # A replica waits for no other.
        if (dist.get_rank() < 2) == first:
            mode = UnifiedAttnMode(replicas)
            outs["replica"] = (mode._mesh.ranks, mode._mesh.rank, attend_chunk(mode))
        dist.barrier()
    return outs


def test_every_kind_of_mesh_and_group_is_taken(rank_pool):
    expected = F.scaled_dot_product_attention(*make_qkv(12, 4))
    for rank, outs in enumerate(rank_pool.run(attend_in_every_kind_of_mesh, 4)):
        for name, (ranks, sequence_rank, out) in outs.items():
            assert ranks == (4 if name in {"both", "swapped", "group", "ring group"} else 2), name
            part = expected.chunk(ranks, dim=-2)[sequence_rank]
            assert relative_error(out, part) < 1e-5, f"{name}, rank {rank}"


def error_of(make):
    """Return the text of the error of ``make``, whose result cannot be sent."""
    return outcome(lambda: (make(), "no error")[1])


def refuse_wrong_meshes():
    """Check the error of each mesh that does not fit. The last three are of ranks outside."""
    both, rank = cpu_mesh(2, 2), dist.get_rank()
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))
    first = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("ring",))
    group, unnamed = dist.new_group([0, 1]), init_device_mesh("cpu", (4,))
    ended = sequence_mesh(dist.new_group(backend="cuda:gloo"))
    dist.destroy_process_group(ended.ulysses.group)
    wrong = [
        (lambda: RingAttnMode(both), r"ValueError: RingAttnMode .*'ulysses' .*2 .*1"),
        (lambda: UlyssesAttnMode(both), r"ValueError: UlyssesAttnMode .*'ring' .*2 .*1"),
        (lambda: UnifiedAttnMode(named), r"ValueError: .*\('dp', 'tp'\).* 'ring'"),
        (lambda: UnifiedAttnMode(unnamed), r"ValueError: mesh .*1 unnamed"),
        (lambda: UnifiedAttnMode(three), r"ValueError: .*\['replica'\].*mesh\['ring', 'ulysses'\]"),
        (lambda: exchange(rank, ended), "ValueError: the process group of mesh dim 'ulysses' was destroyed"),
        (lambda: init_context_parallel_mesh(torch.device("cpu", rank)), r"TypeError: device_type .*index=.*'cuda'"),
        (lambda: init_context_parallel_mesh(max_ring_dim_size=True if rank else 1), r"ValueError: .* a bool"),
        *[(partial(init_context_parallel_mesh, of), rf"ValueError: device_type .*'{of}'") for of in ("cpu:0", "gpu")],
    ]
    if rank > 1:
        wrong += [
            (lambda: UnifiedAttnMode(first), rf"ValueError: rank {rank} .*mesh"),
            (lambda: UnifiedAttnMode(group), rf"ValueError: rank {rank} .*group"),
            (lambda: find_or_make_group("others", [0, 1]), rf"ValueError: .*rank {rank} .*\[0, 1\]"),
        ]
    for make, pattern in wrong:
        error = error_of(make)
        assert re.match(pattern, error), (pattern, error)


def test_meshes_that_do_not_fit_are_errors(rank_pool):
    rank_pool.run(refuse_wrong_meshes, 4)


def ranks_of_unsorted_group():
    group = dist.new_group([1, 0], backend="cuda:gloo", sort_ranks=False)
    mesh = sequence_mesh(group, group_dim="ring")
    ranks = sequence_ranks(mesh)
    find_or_make_group("of one rank", [dist.get_rank()])
    with pytest.raises(ValueError, match=rf"'of one rank'.* \[{dist.get_rank()}\].* \[0, 1\]"):
        find_or_make_group("of one rank", [1, 0])
    return ranks, exchange(dist.get_rank(), mesh), weights_mesh(ranks, "cpu").get_local_rank()


def test_sequence_ranks_have_the_order_of_the_group_and_shards_that_of_ranks(rank_pool):
    assert rank_pool.run(ranks_of_unsorted_group, 2) == [([1, 0], [1, 0], 0), ([1, 0], [1, 0], 1)]


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "4"}, 4),
        # There is one task per node, which is torchrun.
        ({"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}, 8),
        ({"WORLD_SIZE": "16"}, None),
        # The hosts are unequal. In the second case a program was started on one rank and created 16 ranks itself.
        ({"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "3"}, None),
        ({"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, None),
    ],
)
def test_launchers_tell_ranks_per_host(environment, ranks):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GROUP_WORLD"))}
    of_torchrun = mock.patch.dict(os.environ, {**clean, **environment}, clear=True)
    with of_torchrun, mock.patch.object(dist, "get_world_size", return_value=16):
        assert ranks_per_host_of_launcher() == ranks


@pytest.mark.parametrize(
    ("ranks", "on_host", "maxima", "expected"),
    [
        (12, 4, {"batch": 2}, (2, 3, 2)),
        (16, 8, {"ring": 1}, (1, 1, 16)),  # This is the requested shape.
        (16, 8, {"tensor": 2}, (1, 2, 4, 2)),
        (24, 8, {"tensor": 3}, (1, 8, 1, 3)),  # Ranks 6 to 8 are on two hosts already.
    ],
)
def test_ulysses_groups_stay_on_a_host(ranks, on_host, maxima, expected):
    assert tuple(mesh_sizes(ranks, maxima, ranks_per_host=on_host).values()) == expected


def device_types():
    """Return the device types of meshes on a Mac, of a build for CUDA without a GPU, and of a mixed group."""
    types = []
    for device, at_hand in (("mps", True), ("cuda", False)):

        def accelerator(check_available=False, device=device, at_hand=at_hand):
            return torch.device(device) if at_hand or not check_available else None

        with mock.patch.object(torch.accelerator, "current_accelerator", accelerator):
            types.append(init_context_parallel_mesh().device_type)
    return [*types, sequence_mesh(dist.new_group(backend="cuda:gloo,cpu:gloo")).device_type]


def test_mesh_without_an_accelerator_of_its_group_is_of_cpu(rank_pool):
    assert rank_pool.run(device_types, 2) == [["cpu"] * 3] * 2
