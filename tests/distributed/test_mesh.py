"""The shape of the mesh, and the objects that are accepted as a mesh."""

import doctest
import os
import re
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
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
from para_core.adapters import parallelize_transformer
from para_core.distributed.create_mesh import ranks_per_host, shared_gpu
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.mesh import sequence_mesh
from para_core.distributed.mesh_shape import choose_mesh_shape
from para_core.torch_internals import _nccl_options_without_split
from tests.attention.one_device import make_qkv, relative_error
from tests.tiny import flux_transformer

MAXIMUM = st.none() | st.integers(1, 12)


def shape(num_ranks, batch=None, ring=None, ulysses=None):
    return choose_mesh_shape(num_ranks, max_batch_dim_size=batch, max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)


def divisors(n, at_most):
    return [size for size in range(1, n + 1) if n % size == 0 and size <= at_most]


def test_the_docstrings_are_right():
    assert doctest.testmod(import_module("para_core.distributed.create_mesh")).failed == 0


@pytest.mark.parametrize(
    ("num_ranks", "maxima", "expected"),
    [
        (8, {}, (1, 1, 8)),
        (8, {"batch": 2}, (2, 1, 4)),
        (8, {"ring": 2}, (1, 2, 4)),
        (8, {"ulysses": 2}, (1, 4, 2)),
        (6, {"ring": 4}, (1, 3, 2)),
        (1, {}, (1, 1, 1)),
        (1, {"batch": 2, "ring": 2, "ulysses": 2}, (1, 1, 1)),
        (8, {"batch": 2, "ring": 2, "ulysses": 2}, (2, 2, 2)),
        (8, {"batch": 100}, (8, 1, 1)),
        (7, {"ring": 6}, (1, 1, 7)),
        (12, {"batch": 5, "ulysses": 2}, (4, 3, 1)),  # After batch 4 there are three ranks, which 2 does not divide.
        (6, {"ring": 3, "ulysses": 2}, (1, 3, 2)),
    ],
)
def test_mesh_dims_have_the_documented_sizes(num_ranks, maxima, expected):
    assert shape(num_ranks, **maxima) == expected


def test_leftover_ranks_name_sizes_that_fit():
    with pytest.raises(
        ValueError,
        match=r"^8 ranks.* batch 1 × ring 2 × ulysses 2 .*4 .*max_ring_dim_size=4, max_ulysses_dim_size=4 ",
    ):
        shape(8, ring=2, ulysses=2)
    for fitting in ({"ring": 4, "ulysses": 2}, {"ring": 2, "ulysses": 4}, {"batch": 2, "ring": 2, "ulysses": 2}):
        assert prod(shape(8, **fitting)) == 8


@given(num_ranks=st.integers(1, 64), batch=MAXIMUM, ring=MAXIMUM, ulysses=MAXIMUM)
def test_each_dim_is_largest_divisor_left(num_ranks, batch, ring, ulysses):
    left = num_ranks
    expected = []
    for maximum in (batch or 1, ring, ulysses):
        size = 1 if maximum is None else divisors(left, maximum)[-1]
        expected.append(size)
        left //= size
    if ulysses is None:
        expected[2], left = left, 1
    elif ring is None:
        expected[1], left = left, 1
    if left > 1:
        with pytest.raises(ValueError, match=rf"^{num_ranks} ranks .*batch .*ring .*ulysses "):
            shape(num_ranks, batch, ring, ulysses)
    else:
        assert shape(num_ranks, batch, ring, ulysses) == tuple(expected)


@given(num_ranks=st.integers(1, 64), batch=MAXIMUM, ring=st.integers(1, 12), ulysses=st.integers(1, 12))
def test_the_sizes_that_the_error_names_do_fit(num_ranks, batch, ring, ulysses):
    try:
        shape(num_ranks, batch, ring, ulysses)
    except ValueError as error:
        words = str(error).replace(",", " ").replace(";", " ").split()
        named = dict(word.split("_dim_size=") for word in words if "_dim_size=" in word)
        assert set(named) == {"max_batch", "max_ring", "max_ulysses"}
        assert prod(shape(num_ranks, batch, int(named["max_ring"]), ulysses)) == num_ranks
        assert prod(shape(num_ranks, batch, ring, int(named["max_ulysses"]))) == num_ranks
        assert prod(shape(num_ranks, int(named["max_batch"]), ring, ulysses)) == num_ranks


@pytest.mark.parametrize("maximum", [0, -1])
def test_a_maximum_below_one_is_an_error(maximum):
    with pytest.raises(ValueError, match=rf"max_ring_dim_size.* {maximum};.* 1"):
        shape(4, ring=maximum)


@pytest.mark.parametrize("maximum", [2.0, "2", True])
def test_a_maximum_that_is_no_integer_is_an_error(maximum):
    with pytest.raises(TypeError, match=rf"max_ulysses_dim_size.* {maximum!r}"):
        shape(4, ulysses=maximum)


def test_missing_process_group_names_torchrun():
    with pytest.raises(RuntimeError, match=r"init_process_group.*torchrun|torchrun.*init_process_group"):
        init_context_parallel_mesh("cpu")


def test_what_is_no_mesh_is_an_error():
    with pytest.raises(TypeError, match=r"mesh.* str.* DeviceMesh .*ProcessGroup"):
        UnifiedAttnMode("cuda")


def test_ranks_with_own_gpus_are_accepted():
    assert shared_gpu(dict(enumerate([("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]))) is None


def test_ranks_on_first_gpu_are_told_of_set_device():
    message = shared_gpu({4: ("b", "1"), 5: ("a", "0"), 6: ("a", "0"), 7: ("a", "0")})
    assert re.search(r"ranks \[5, 6, 7\] on host a .*device 0", message)
    assert "Call torch.cuda.set_device(torch.distributed.get_node_local_rank())" in message


def test_two_ranks_sharing_a_gpu_are_named():
    message = shared_gpu({0: ("a", "0"), 1: ("a", "1"), 2: ("a", "1")})
    assert re.search(r"ranks \[1, 2\] on host a .*device 1", message)
    assert "GPUs" in message


# -- On ranks.


@contextmanager
def on_gpus(gpus, backend="nccl", counting=None):
    """Make torch report, in this context, that each rank is on its entry of ``gpus``, and that ``backend`` serves the
    GPUs of every group.
    """
    get_backend, gather = dist.ProcessGroup._get_backend, dist.all_gather_object

    def named(group, device):
        return mock.Mock(**{"name.return_value": backend}) if device.type == "cuda" else get_backend(group, device)

    def counted(*args, **kwargs):
        (counting if counting is not None else []).append("exchange")
        return gather(*args, **kwargs)

    gpu = gpus[dist.get_rank()]
    properties = mock.Mock(uuid=gpu)
    with (
        mock.patch.object(dist.ProcessGroup, "_get_backend", named),
        mock.patch.object(dist, "all_gather_object", counted),
        mock.patch.object(torch.cuda, "is_initialized", return_value=gpu is not None),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        yield


def make_all_kinds(device_type):
    """Return makers, by name, of all functions that accept a user's mesh. A maker has no arguments."""
    square = init_device_mesh(device_type, (2, 2), mesh_dim_names=("ring", "ulysses"))
    line = init_device_mesh(device_type, (4,), mesh_dim_names=("batch",))
    flux = flux_transformer()
    return {
        "mode": lambda: UnifiedAttnMode(square),
        "mode of one dim": lambda: RingAttnMode(square["ring"]),
        "in batch": lambda: BatchParallelAttnMode(line),
        "transformer": lambda: parallelize_transformer(flux, mesh=square),
        "plan": lambda: apply_context_parallel(flux, ContextParallelConfig(mesh=square), flux._cp_plan),
        "init_context_parallel_mesh": lambda: init_context_parallel_mesh(device_type, max_ring_dim_size=2),
    }


def say_which_share(gpus, backend, device_type):
    with on_gpus(gpus, backend, counting := []):
        results = {}
        for name, make in make_all_kinds(device_type).items():
            counting.clear()
            results[name] = message_of(make), len(counting)
        return results


def test_shared_gpu_raises_on_its_ranks(rank_pool):
    # Ranks 0 and 3 have no mesh dim in common, and ranks 1 and 2 have no fault to report.
    for rank, results in enumerate(rank_pool.run(say_which_share, 4, ["A", "B", "C", "A"], "nccl", "cuda")):
        for name, (message, exchanges) in results.items():
            alone = name == "mode of one dim"
            expected = "no error" if alone else "RuntimeError: ranks [0, 3] on host"
            assert message.startswith(expected), f"{name}, rank {rank}: {message}"
            assert exchanges == (1 if alone or name == "in batch" else 2), name  # There is one exchange per mesh dim.


def test_unshared_gpus_raise_nothing(rank_pool):
    for gpus in (["A", "B", "C", "D"], [None] * 4, ["A", None, None, "B"]):
        for results in rank_pool.run(say_which_share, 4, gpus, "nccl", "cuda"):
            assert {message for message, _ in results.values()} == {"no error"}, gpus


@pytest.mark.parametrize(("backend", "device_type"), [("gloo", "cuda"), ("nccl", "cpu")])
def test_gpus_are_not_compared_without_nccl(rank_pool, backend, device_type):
    for results in rank_pool.run(say_which_share, 4, ["A"] * 4, backend, device_type):
        assert set(results.values()) == {("no error", 0)}


def make_in_other_ways(gpus):
    with on_gpus(gpus, counting=(counting := [])):
        square = init_device_mesh("cuda", (2, 2), mesh_dim_names=("ring", "ulysses"))
        result = [message_of(lambda: UnifiedAttnMode(dist.group.WORLD)), len(counting)]
        counting.clear()
        UnifiedAttnMode(square, assume_equal=True)
        BatchParallelAttnMode(dist.group.WORLD, assume_equal=True)
        unified_attention(*(x.chunk(4, dim=2)[0] for x in make_qkv(12, 4)), mesh=dist.group.WORLD, assume_equal=True)
        return *result, len(counting)


def test_group_is_checked_like_a_mesh(rank_pool):
    for message, exchanges, others in rank_pool.run(make_in_other_ways, 4, ["A", "A", "B", "C"]):
        assert message.startswith("RuntimeError: ranks [0, 1] on host") and (exchanges, others) == (1, 0)


def describe(mesh):
    return tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type, tuple(mesh.get_coordinate())


def build_meshes():
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    sequence = sequence_mesh(mesh)
    default = init_context_parallel_mesh()
    return describe(mesh), (sequence.rank, sequence.ring.index, sequence.ulysses.index), describe(default)[:2]


def test_sequence_rank_is_ring_major(rank_pool):
    for rank, (mesh, indices, default) in enumerate(rank_pool.run(build_meshes, 4)):
        assert mesh == ((1, 2, 2), ("batch", "ring", "ulysses"), "cpu", (0, rank // 2, rank % 2))
        assert indices == (rank, rank // 2, rank % 2)
        assert default == ((1, 1, 4), ("batch", "ring", "ulysses"))


def groups_made(shapes):
    """Return, by mesh shape (batch, ring, ulysses), the sizes of new groups and how many groups were requested."""
    c10d, counts = dist.distributed_c10d, {}
    create, groups = c10d._new_process_group_helper, c10d._world.pg_map
    names, world = ("batch", "ring", "ulysses"), dist.get_world_size()
    for shape in shapes:
        before, requests = set(groups), []

        def counted(*args, requests=requests, **kwargs):
            requests.append(kwargs["group_desc"])
            return create(*args, **kwargs)

        with mock.patch.object(c10d, "_new_process_group_helper", counted):
            maxima = {f"max_{name}_dim_size": size for name, size in zip(names, shape, strict=True)}
            mesh = init_context_parallel_mesh("cpu", **maxima)
            attend_chunk(UnifiedAttnMode(mesh))
        counts[shape] = sorted(group.size() for group in set(groups) - before), len(requests)
        assert mesh == init_device_mesh("cpu", shape, mesh_dim_names=names)
        whole = torch.arange(world).view(shape)
        for dim, name in enumerate(names):
            group = mesh.get_group(name)
            assert mesh[name].get_group() is mesh["batch", "ring", "ulysses"].get_group(name) is group
            row = next(row for row in whole.movedim(dim, -1).flatten(0, 1).tolist() if dist.get_rank() in row)
            assert dist.get_process_group_ranks(group) == row, name
    return counts


def test_dims_of_size_1_share_one_group(rank_pool):
    shapes = [(1, 1, 4), (1, 4, 1), (4, 1, 1), (1, 2, 2), (2, 2, 1)]
    for counts in rank_pool.run(groups_made, 4, shapes):
        # A group of all ranks is the default group. For dims of 2, torch creates both groups on every rank.
        assert counts == {
            (1, 1, 4): ([1], 1),
            (1, 4, 1): ([], 0),
            (4, 1, 1): ([], 0),
            (1, 2, 2): ([2, 2], 4),
            (2, 2, 1): ([2, 2], 4),
        }
    assert rank_pool.run(groups_made, 1, [(1, 1, 1)]) == [{(1, 1, 1): ([], 0)}]


def attend_chunk(mode, seed=0):
    """Attend to this rank's chunk of the tokens and return this rank's part of the result."""
    q, k, v = (x.chunk(mode._mesh.ranks, dim=-2)[mode._mesh.rank] for x in make_qkv(12, 4, seed=seed))
    with mode:
        return F.scaled_dot_product_attention(q, k, v)


def attend_in_replicas(only=None):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))["ring", "ulysses"]
    replica = dist.get_rank() // 2
    if only is not None and replica != only:
        return None
    return attend_chunk(UnifiedAttnMode(mesh), seed=replica)


def test_slices_of_a_mesh_are_replicas(rank_pool):
    for rank, out in enumerate(rank_pool.run(attend_in_replicas, 4)):
        expected = F.scaled_dot_product_attention(*make_qkv(12, 4, seed=rank // 2)).chunk(2, dim=-2)[rank % 2]
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"


@pytest.mark.parametrize("only", [0, 1])
def test_a_replica_waits_for_no_other(rank_pool, only):
    for rank, out in enumerate(rank_pool.run(attend_in_replicas, 4, only=only)):
        if rank // 2 != only:
            assert out is None
            continue
        expected = F.scaled_dot_product_attention(*make_qkv(12, 4, seed=only)).chunk(2, dim=-2)[rank % 2]
        assert relative_error(out, expected) < 1e-5, f"rank {rank}"


def attend_in_every_kind_of_mesh():
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    outs = {}
    for name, mode in {
        "both": UnifiedAttnMode(both),
        "swapped": UnifiedAttnMode(swapped),
        "ring": UnifiedAttnMode(both["ring"]),
        "ring mode": RingAttnMode(both["ring"]),
        "ulysses": UnifiedAttnMode(both["ulysses"]),
        "ulysses mode": UlyssesAttnMode(both["ulysses"]),
        "group": UnifiedAttnMode(dist.group.WORLD),
        "ring group": RingAttnMode(dist.group.WORLD),
        "ulysses group": UlyssesAttnMode(both.get_group("ulysses")),
        "batch": UnifiedAttnMode(init_context_parallel_mesh("cpu", max_batch_dim_size=2)),
    }.items():
        outs[name] = (mode._mesh.ranks, mode._mesh.rank, attend_chunk(mode))
    return outs


def test_every_kind_of_mesh_and_group_is_taken(rank_pool):
    expected = F.scaled_dot_product_attention(*make_qkv(12, 4, seed=0))
    for rank, outs in enumerate(rank_pool.run(attend_in_every_kind_of_mesh, 4)):
        for name, (ranks, sequence_rank, out) in outs.items():
            assert ranks == (4 if name in {"both", "swapped", "group", "ring group"} else 2), name
            part = expected.chunk(ranks, dim=-2)[sequence_rank]
            assert relative_error(out, part) < 1e-5, f"{name}, rank {rank}"


def message_of(make):
    try:
        make()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrong_meshes():
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))
    first = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("ring",))
    group = dist.new_group([0, 1])
    return {
        "ring": message_of(lambda: RingAttnMode(both)),
        "ulysses": message_of(lambda: UlyssesAttnMode(both)),
        "names": message_of(lambda: UnifiedAttnMode(named)),
        "unnamed": message_of(lambda: UnifiedAttnMode(init_device_mesh("cpu", (4,)))),
        "replica": message_of(lambda: UnifiedAttnMode(three)),
        "product": message_of(lambda: init_device_mesh("cpu", (2, 3), mesh_dim_names=("ring", "ulysses"))),
        "left over": message_of(lambda: init_context_parallel_mesh("cpu", max_ring_dim_size=2, max_ulysses_dim_size=1)),
        "outside": message_of(lambda: UnifiedAttnMode(first)) if dist.get_rank() > 1 else None,
        "outside group": message_of(lambda: UnifiedAttnMode(group)) if dist.get_rank() > 1 else None,
    }


def test_meshes_that_do_not_fit_are_errors(rank_pool):
    for rank, messages in enumerate(rank_pool.run(wrong_meshes, 4)):
        assert re.match(r"ValueError: RingAttnMode .*'ulysses' .*2 .*1", messages["ring"])
        assert re.match(r"ValueError: UlyssesAttnMode .*'ring' .*2 .*1", messages["ulysses"])
        assert re.match(r"ValueError: .*\('dp', 'tp'\).* 'ring'", messages["names"])
        assert re.match(r"ValueError: mesh .*1 unnamed", messages["unnamed"])
        assert "['replica']" in messages["replica"]
        assert "mesh['ring', 'ulysses']" in messages["replica"]
        assert "no error" not in messages["product"]
        assert re.search(r"4 ranks .*batch 1 × ring 2 × ulysses 1 .*2 ", messages["left over"])
        if rank > 1:
            assert re.match(rf"ValueError: rank {rank} .*mesh", messages["outside"])
            assert re.match(rf"ValueError: rank {rank} .*group", messages["outside group"])


def sixteen_ranks(**environment):
    """Return ``ranks_per_host()`` of 16 ranks in this environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GROUP_WORLD"))}
    with (
        mock.patch.dict(os.environ, {**clean, **environment}, clear=True),
        mock.patch.object(dist, "get_world_size", return_value=16),
    ):
        return ranks_per_host()


def test_launchers_tell_ranks_per_host():
    assert sixteen_ranks(WORLD_SIZE="16", GROUP_WORLD_SIZE="2") == 8
    assert sixteen_ranks(SLURM_NTASKS="16", SLURM_NNODES="4") == 4
    # There is one task per node, which is torchrun.
    assert sixteen_ranks(WORLD_SIZE="16", GROUP_WORLD_SIZE="2", SLURM_NTASKS="2", SLURM_NNODES="2") == 8
    assert sixteen_ranks(WORLD_SIZE="16") is None
    # The hosts are unequal. In the second case a program was started on one rank and created 16 ranks itself.
    assert sixteen_ranks(WORLD_SIZE="16", GROUP_WORLD_SIZE="3") is None
    assert sixteen_ranks(WORLD_SIZE="1", GROUP_WORLD_SIZE="1") is None


@pytest.mark.parametrize(
    ("ranks", "on_host", "maxima", "expected"),
    [
        (16, 8, {}, (1, 2, 8)),
        (6, 2, {}, (1, 3, 2)),
        (4, 2, {"batch": 2}, (2, 1, 2)),
        (12, 6, {"batch": 4}, (4, 1, 3)),
        (12, 4, {"batch": 2}, (2, 3, 2)),
        (16, 8, {"ring": 1}, (1, 1, 16)),  # This is the requested shape.
        (16, 8, {"ulysses": 4}, (1, 4, 4)),
        (8, 8, {}, (1, 1, 8)),
    ],
)
def test_ulysses_groups_stay_on_a_host(ranks, on_host, maxima, expected):
    limits = {f"max_{name}_dim_size": maximum for name, maximum in maxima.items()}
    mesh_shape = choose_mesh_shape(ranks, ranks_per_host=on_host, **limits)
    assert mesh_shape == expected
    if not {"ring", "ulysses"} & set(maxima):
        starts = range(0, ranks, mesh_shape[2])
        assert all(start // on_host == (start + mesh_shape[2] - 1) // on_host for start in starts)


def sum_of_each_pair():
    """Sum over the pairs of ranks to which this rank belongs. Before the second pair, ranks differ in the number of
    groups that they created.
    """
    rank, sums = dist.get_rank(), {}
    for pair in ((0, 1), (1, 2), (0, 2)):
        if rank in pair:
            group = find_or_make_group(f"the pair {pair}", list(pair), timeout=timedelta(seconds=20))
            x = torch.tensor(10.0**rank)
            dist.all_reduce(x, group=group)
            sums[pair] = x.item()
    return sums


def test_ranks_with_different_group_counts_create_one_together(rank_pool):
    for rank, sums in enumerate(rank_pool.run(sum_of_each_pair, 3, timeout=60)):
        expected = {pair: sum(10**member for member in pair) for pair in ((0, 1), (1, 2), (0, 2)) if rank in pair}
        assert sums == expected


def device_type_with_a_cuda_build():
    def of_the_build(check_available=False):
        return None if check_available else torch.device("cuda")

    with mock.patch.object(torch.accelerator, "current_accelerator", of_the_build):
        return init_context_parallel_mesh().device_type


def test_cuda_build_without_gpu_uses_cpu(rank_pool):
    assert rank_pool.run(device_type_with_a_cuda_build, 2) == ["cpu", "cpu"]


def device_types_of_groups(is_available):
    """Return the device types of meshes of three groups: for CPU and CUDA, for CUDA and CPU, and for CUDA only."""
    with mock.patch.object(torch.cuda, "is_available", lambda: is_available):
        groups = [dist.new_group(backend=names) for names in ("cpu:gloo,cuda:gloo", "cuda:gloo,cpu:gloo", "cuda:gloo")]
        return [sequence_mesh(group).device_type for group in groups]


@pytest.mark.parametrize("is_available", [False, True])
def test_mixed_group_uses_cuda_if_available(rank_pool, is_available):
    mixed = "cuda" if is_available else "cpu"
    for device_types in rank_pool.run(device_types_of_groups, 2, is_available):
        assert device_types == [mixed, mixed, "cuda"]


def register_watching_backend(states, fails):
    """Register a backend that appends the state of the process to ``states`` when it creates a group."""
    c10d = dist.distributed_c10d

    def create(store, rank, size, timeout):
        states.append((c10d._hash_ranks_to_str, dist.group.WORLD.bound_device_id))
        if fails:
            raise RuntimeError("no connection")
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    # The pool keeps its workers, so each test needs a name of its own.
    name = f"watching{len(dist.Backend.backend_list)}"
    dist.Backend.register_backend(name, create, devices=["cpu"])
    return f"cpu:{name}"


def process_while_making_a_group(fails):
    """Create a group of all ranks except the first. Return whether torch's function and device are unchanged meanwhile,
    and the device and sum of the group.
    """
    world, states, members = dist.group.WORLD, [], list(range(1, dist.get_world_size()))
    of_torch = dist.distributed_c10d._hash_ranks_to_str
    backend = register_watching_backend(states, fails)
    if dist.get_rank() not in members:
        return None
    world.bound_device_id = torch.device("cuda", 3)
    before = set(dist.distributed_c10d._world.pg_map)
    try:
        if fails:
            with pytest.raises(RuntimeError, match="no connection"):
                find_or_make_group("all but the first", members, backend=backend)
            result = set(dist.distributed_c10d._world.pg_map) - before
        else:
            group = find_or_make_group("all but the first", members, backend=backend)
            dist.all_reduce(x := torch.ones(()), group=group)
            result = (group.bound_device_id, dist.get_process_group_ranks(group), x.item())
        return [(function is of_torch, device) for function, device in states], result, world.bound_device_id
    finally:
        world.bound_device_id = None


@pytest.mark.parametrize("fails", [False, True])
def test_creating_a_group_does_not_affect_other_threads(rank_pool, fails):
    first, *others = rank_pool.run(process_while_making_a_group, 3, fails, timeout=60)
    assert first is None
    for states, result, bound in others:
        assert states == [(True, torch.device("cuda", 3))]
        assert bound == torch.device("cuda", 3)
        assert result == (set() if fails else (None, [1, 2], 2))


def nccl_options_of_a_group(has_lazy_init):
    """Return the options and the device that torch's function gets for an NCCL group, after torch assigned a group to
    split.
    """
    c10d, calls = dist.distributed_c10d, []
    assigned = {"split_from": "of C++"}

    class Options:
        split_from = property(
            lambda self: assigned["split_from"], lambda self, group: assigned.update(split_from=group)
        )
        lazy_init = False

    if not has_lazy_init:
        del Options.lazy_init

    def record(*args, **kwargs):
        kwargs["backend_options"].split_from = "the default group"
        calls.append(kwargs)
        return mock.Mock(), None

    with (
        mock.patch.object(dist, "ProcessGroupNCCL", mock.Mock(Options=Options), create=True),
        mock.patch.object(c10d, "_new_process_group_helper", record),
        mock.patch.object(
            c10d, "_world", mock.Mock(pg_map=c10d._world.pg_map, default_pg=dist.group.WORLD, pg_group_ranks={})
        ),
    ):
        find_or_make_group("of NCCL", [dist.get_rank()], backend="cpu:gloo,cuda:nccl", timeout=timedelta(seconds=7))
    options = calls[0]["backend_options"]
    return (
        isinstance(options, Options),
        assigned["split_from"],
        getattr(options, "lazy_init", None),
        options._timeout,
        calls[0].get("device_id"),
    )


@pytest.mark.parametrize("has_lazy_init", [False, True])
def test_partial_nccl_group_is_not_split_from_default(rank_pool, has_lazy_init):
    lazy = True if has_lazy_init else None
    for result in rank_pool.run(nccl_options_of_a_group, 2, has_lazy_init):
        assert result == (True, "of C++", lazy, timedelta(seconds=7), None)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_the_options_of_torch_keep_no_group_to_split():
    options = _nccl_options_without_split("nccl", timedelta(seconds=7))
    options.split_from = mock.Mock()
    assert isinstance(options, dist.ProcessGroupNCCL.Options)
    assert dist.ProcessGroupNCCL.Options.split_from.__get__(options) is None


def make_a_group_of_others():
    with pytest.raises(ValueError, match=r"rank 0 .*\[1\]"):
        find_or_make_group("others", [1])


def test_a_rank_outside_of_the_group_cannot_make_it(rank_pool):
    rank_pool.run(make_a_group_of_others, 1)
