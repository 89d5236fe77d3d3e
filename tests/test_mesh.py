"""The shape of the mesh, and what is accepted as one."""

import doctest
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

import para_core.mesh
from para_core import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode, init_context_parallel_mesh
from para_core.mesh import choose_mesh_shape, sequence_mesh, shared_gpu
from tests.attention.one_device import make_qkv, relative_error

MAXIMUM = st.none() | st.integers(1, 12)


def shape(num_ranks, batch=None, ring=None, ulysses=None):
    return choose_mesh_shape(num_ranks, max_batch_dim_size=batch, max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)


def divisors(n, at_most):
    return [size for size in range(1, n + 1) if n % size == 0 and size <= at_most]


def test_the_docstrings_are_right():
    assert doctest.testmod(import_module("para_core.mesh")).failed == 0


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
        (12, {"batch": 5, "ulysses": 2}, (4, 3, 1)),  # after batch 4, three ranks: 2 does not divide them
        (6, {"ring": 3, "ulysses": 2}, (1, 3, 2)),
    ],
)
def test_mesh_dims_have_the_documented_sizes(num_ranks, maxima, expected):
    assert shape(num_ranks, **maxima) == expected


def test_ranks_left_over_are_an_error_that_names_the_sizes_that_fit():
    with pytest.raises(
        ValueError,
        match=r"8 ranks do not fit: batch 1 × ring 2 × ulysses 2 uses 4 of them\. max_ring_dim_size=4, "
        "max_ulysses_dim_size=4 or max_batch_dim_size=2 would fit",
    ):
        shape(8, ring=2, ulysses=2)
    for fitting in ({"ring": 4, "ulysses": 2}, {"ring": 2, "ulysses": 4}, {"batch": 2, "ring": 2, "ulysses": 2}):
        assert prod(shape(8, **fitting)) == 8


@given(num_ranks=st.integers(1, 64), batch=MAXIMUM, ring=MAXIMUM, ulysses=MAXIMUM)
def test_each_dim_is_the_largest_divisor_that_is_left_and_every_rank_is_used(num_ranks, batch, ring, ulysses):
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
        with pytest.raises(ValueError, match=f"{num_ranks} ranks do not fit"):
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
    with pytest.raises(ValueError, match=f"max_ring_dim_size is {maximum}; expected at least 1"):
        shape(4, ring=maximum)


@pytest.mark.parametrize("maximum", [2.0, "2", True])
def test_a_maximum_that_is_no_integer_is_an_error(maximum):
    with pytest.raises(TypeError, match=r"max_ulysses_dim_size is .*; expected a positive integer"):
        shape(4, ulysses=maximum)


def test_without_a_process_group_the_error_says_how_to_start_one():
    with pytest.raises(RuntimeError, match=r"needs a process group, and none is initialised.*torchrun"):
        init_context_parallel_mesh("cpu")


def test_what_is_no_mesh_is_an_error():
    with pytest.raises(TypeError, match="mesh is a str; expected a DeviceMesh or a ProcessGroup"):
        UnifiedAttnMode("cuda")


def test_ranks_with_a_gpu_of_their_own_on_any_host_are_fine():
    assert shared_gpu([("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]) is None


def test_ranks_of_a_host_that_are_all_on_one_gpu_are_told_of_set_device():
    message = shared_gpu([("b", "1"), ("a", "0"), ("a", "0"), ("a", "0")])
    assert "ranks [1, 2, 3] on host a all have the current device 0" in message
    assert "set_device was not called" in message
    assert "Call torch.cuda.set_device(torch.distributed.get_node_local_rank())" in message


def test_two_ranks_that_share_one_gpu_of_several_are_named():
    message = shared_gpu([("a", "0"), ("a", "1"), ("a", "1")])
    assert "ranks [1, 2] on host a all have the current device 1" in message
    assert "more ranks than GPUs" in message


def on_gpus(name_of_backend, gpus):
    """What _require_own_gpus says on each rank, where torch says that these are the GPUs, and NCCL their backend."""
    backend = mock.Mock()
    backend.name.return_value = name_of_backend
    group = dist.group.WORLD
    # A group that takes the CPU, so that the exchange needs no other one.
    fake = mock.Mock(
        wraps=group, _device_types=[torch.device("cuda"), torch.device("cpu")], group_name=group.group_name
    )
    fake._get_backend = lambda device: backend
    properties = mock.Mock(uuid=gpus[dist.get_rank()])
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(para_core.mesh, "host_group", return_value=group),
    ):
        return message_of(lambda: para_core.mesh._require_own_gpus(fake))


def test_ranks_that_share_a_gpu_are_an_error_on_all_of_them_under_nccl_alone(rank_pool):
    for message in rank_pool.run(on_gpus, 2, "nccl", ["A", "A"]):
        assert message.startswith("RuntimeError: ranks [0, 1] on host")
    assert rank_pool.run(on_gpus, 2, "nccl", ["A", "B"]) == ["no error"] * 2
    assert rank_pool.run(on_gpus, 2, "gloo", ["A", "A"]) == ["no error"] * 2


# -- on ranks


def describe(mesh):
    return tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type, tuple(mesh.get_coordinate())


def build_meshes():
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
    found = sequence_mesh(mesh)
    default = init_context_parallel_mesh()
    return describe(mesh), (found.rank, found.ring.index, found.ulysses.index), describe(default)[:2]


def test_the_sequence_rank_is_ring_index_times_ulysses_size_plus_ulysses_index(rank_pool):
    for rank, (mesh, indices, default) in enumerate(rank_pool.run(build_meshes, 4)):
        assert mesh == ((1, 2, 2), ("batch", "ring", "ulysses"), "cpu", (0, rank // 2, rank % 2))
        assert indices == (rank, rank // 2, rank % 2)
        assert default == ((1, 1, 4), ("batch", "ring", "ulysses"))


def attend_chunk(mode, seed=0):
    """Attention over tokens that this rank cut alone, as plain PyTorch would; this rank's part of the result."""
    q, k, v = (x.chunk(mode._mesh.ranks, dim=-2)[mode._mesh.rank] for x in make_qkv(12, 4, seed=seed))
    with mode:
        return F.scaled_dot_product_attention(q, k, v)


def attend_in_replicas(only=None):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))["ring", "ulysses"]
    replica = dist.get_rank() // 2
    if only is not None and replica != only:
        return None
    return attend_chunk(UnifiedAttnMode(mesh), seed=replica)


def test_slices_of_a_larger_mesh_are_replicas_with_data_of_their_own(rank_pool):
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
        assert "ValueError: RingAttnMode got a mesh whose 'ulysses' dim has 2 ranks; expected 1" in messages["ring"]
        assert "ValueError: UlyssesAttnMode got a mesh whose 'ring' dim has 2 ranks; expected 1" in messages["ulysses"]
        assert "ValueError: mesh has dims ('dp', 'tp'); expected a dim named 'ring'" in messages["names"]
        assert "ValueError: mesh has 1 unnamed dim(s)" in messages["unnamed"]
        assert "['replica'] mean nothing here" in messages["replica"]
        assert "mesh['ring', 'ulysses']" in messages["replica"]
        assert "no error" not in messages["product"]
        assert "4 ranks do not fit: batch 1 × ring 2 × ulysses 1 uses 2 of them" in messages["left over"]
        if rank > 1:
            assert f"ValueError: rank {rank} is not part of the mesh" in messages["outside"]
            assert "not part of" in messages["outside group"] or "expected a DeviceMesh" in messages["outside group"]
