"""Making a mesh: its shape, its groups, and one GPU per rank. Reading what a user gives as one: :mod:`para_core.distributed.mesh`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from para_core.distributed.mesh import (
    MESH_DIMS,
    PIPE_DIM,
    TENSOR_DIM,
    GuidedMesh,
    SequenceMesh,
    find_or_make_group,
    guided_mesh,
    host_group,
    require_process_group,
)
from para_core.torch_internals import backend_of, group_devices


def _largest_divisor(ranks: int, at_most: int) -> int:
    return next(size for size in range(min(ranks, at_most), 0, -1) if ranks % size == 0)


def choose_mesh_shape(
    num_ranks: int,
    *,
    max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None,
    max_ulysses_dim_size: int | None = None,
    ranks_per_host: int | None = None,
) -> tuple[int, int, int]:
    """Sizes of the mesh dims ``(batch, ring, ulysses)`` for ``num_ranks`` ranks.

    Each dim with a maximum takes the largest divisor of the ranks that are left and is not above it, in the order
    batch, ring, ulysses. Batch is 1 unless asked for; of ring and ulysses, one that is left open takes the rest
    (ulysses first; but where both are open, no more than keeps each Ulysses group on one host of ``ranks_per_host``).

    >>> choose_mesh_shape(8)
    (1, 1, 8)
    >>> choose_mesh_shape(8, max_batch_dim_size=2)
    (2, 1, 4)
    >>> choose_mesh_shape(8, max_ulysses_dim_size=2)
    (1, 4, 2)
    >>> choose_mesh_shape(6, max_ring_dim_size=4)
    (1, 3, 2)
    >>> choose_mesh_shape(16, ranks_per_host=8)
    (1, 2, 8)

    Raises:
        TypeError, ValueError: a maximum is no positive integer, or ranks are left over.
    """
    maxima = {
        "max_batch_dim_size": max_batch_dim_size,
        "max_ring_dim_size": max_ring_dim_size,
        "max_ulysses_dim_size": max_ulysses_dim_size,
    }
    for name, maximum in maxima.items():
        _require_maximum(name, maximum)

    batch = _largest_divisor(num_ranks, max_batch_dim_size or 1)
    left = num_ranks // batch
    if max_ring_dim_size is None and max_ulysses_dim_size is None and ranks_per_host is not None:
        # Groups of neighbours stay on a host if their size divides its ranks.
        max_ulysses_dim_size = gcd(left, ranks_per_host)
    ring = _largest_divisor(left, max_ring_dim_size) if max_ring_dim_size else 1
    left //= ring
    ulysses = _largest_divisor(left, max_ulysses_dim_size) if max_ulysses_dim_size else left
    left //= ulysses
    if max_ring_dim_size is None:
        ring, left = ring * left, 1
    if left > 1:
        raise ValueError(
            f"{num_ranks} ranks do not fit: batch {batch} × ring {ring} × ulysses {ulysses} uses {num_ranks // left} of them. "
            f"max_ring_dim_size={ring * left}, max_ulysses_dim_size={ulysses * left} or max_batch_dim_size={batch * left} "
            "would fit; or leave one of ring and ulysses open (None): it takes what remains."
        )
    return batch, ring, ulysses


def _require_maximum(name: str, maximum: int | None) -> None:
    if maximum is not None and (isinstance(maximum, bool) or not isinstance(maximum, int)):
        raise TypeError(f"{name} is {maximum!r}; expected a positive integer, or None to leave it open.")
    if maximum is not None and maximum < 1:
        raise ValueError(f"{name} is {maximum}; expected at least 1, or None to leave it open.")


def ranks_per_host() -> int | None:
    """Of how many neighbouring ranks each host consists, as torchrun or Slurm tells all ranks alike; None where neither does.

    Ranks are neighbours on a host under torchrun, and under Slurm unless ``--distribution=cyclic`` is given.
    """
    ranks = dist.get_world_size()
    # Not LOCAL_WORLD_SIZE: where hosts have unequal numbers of ranks, each would choose another mesh.
    for ranks_named, hosts_named in (("WORLD_SIZE", "GROUP_WORLD_SIZE"), ("SLURM_NTASKS", "SLURM_NNODES")):
        hosts = os.environ.get(hosts_named, "")
        # Of another size: they tell of what started this program, and it made its ranks itself.
        if os.environ.get(ranks_named) == str(ranks) and hosts.isdigit() and int(hosts) > 0:
            return ranks // int(hosts) if ranks % int(hosts) == 0 else None
    return None


def init_context_parallel_mesh(
    device_type: str | None = None,
    *,
    max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None,
    max_ulysses_dim_size: int | None = None,
    max_tensor_dim_size: int | None = None,
    max_pipe_dim_size: int | None = None,
) -> DeviceMesh:
    """A ``DeviceMesh`` with dims ``("batch", "ring", "ulysses")`` over all ranks; see :func:`choose_mesh_shape`.

    Neighbours along ``ulysses`` are neighbouring ranks, then come ``ring`` and ``batch``. Started on several hosts by torchrun or Slurm and with
    neither maximum given, Ulysses is inside the hosts and the ring between them (docs/several_nodes.md).

    With ``max_tensor_dim_size``, the dim ``"tensor"`` is behind these, of the largest size that divides the ranks: of neighbours, for
    they exchange most (``shard_weights(pipe, mesh, method="tensor")``). With ``max_pipe_dim_size``, the dim ``"pipe"`` is in front of
    them, likewise: of ranks that hold consecutive blocks (``parallelize_pipe``), and exchange least.

    Every rank calls it with the same arguments. To use only some of the ranks, build a larger mesh and pass a slice
    of it (``mesh["ring", "ulysses"]``) wherever a mesh is taken. A dim of size 1 costs no communicator: its group is one gloo
    group of this rank alone, which all such dims share.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, …; the accelerator that is present, else the CPU, if left out.

    Raises:
        RuntimeError: no process group is initialised; or two ranks have the same GPU, which NCCL refuses.
        TypeError, ValueError: see :func:`choose_mesh_shape`.
    """
    require_process_group("init_context_parallel_mesh")
    if device_type is None:
        # Without the check a CUDA build of torch answers "cuda" on a machine that has no GPU.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = accelerator.type if accelerator is not None else "cpu"
    _require_maximum("max_tensor_dim_size", max_tensor_dim_size)
    _require_maximum("max_pipe_dim_size", max_pipe_dim_size)
    tensor = _largest_divisor(dist.get_world_size(), max_tensor_dim_size or 1)
    on_host = ranks_per_host()
    pipe = _largest_divisor(dist.get_world_size() // tensor, max_pipe_dim_size or 1)
    shape: tuple[int, ...] = choose_mesh_shape(
        dist.get_world_size() // (tensor * pipe),
        max_batch_dim_size=max_batch_dim_size,
        max_ring_dim_size=max_ring_dim_size,
        max_ulysses_dim_size=max_ulysses_dim_size,
        ranks_per_host=None if on_host is None else max(1, on_host // tensor),
    )
    names: tuple[str, ...] = MESH_DIMS
    if max_tensor_dim_size is not None:
        shape, names = (*shape, tensor), (*MESH_DIMS, TENSOR_DIM)
    if max_pipe_dim_size is not None:
        shape, names = (pipe, *shape), (PIPE_DIM, *names)
    mesh = _mesh_of_shape(device_type, shape, names)
    # Only now: where nothing was put on a GPU yet, init_device_mesh chooses this rank's.
    require_own_gpus(mesh, guided_mesh(mesh))
    return mesh


def _mesh_of_shape(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks in ``shape``. Of dims of size 1 no groups are made: ``init_device_mesh`` would make one per rank and dim."""
    used = {name: size for name, size in zip(names, shape, strict=True) if size > 1}
    if not used:
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    groups = [mesh.get_group(name) if name in used else _group_of_this_rank() for name in names]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh.mesh.view(shape), mesh_dim_names=names)


def _group_of_this_rank() -> ProcessGroup:
    """What stands for a mesh dim of size 1: every dim of a DeviceMesh has a group. Made once, without NCCL and other ranks."""
    return find_or_make_group(
        "para_core: this rank alone",
        [dist.get_rank()],
        # Gloo cannot do without a store, and PyTorch's fake backend has none.
        backend="fake" if dist.get_backend() == "fake" else "gloo",
    )


def require_own_gpus(mesh: DeviceMesh | ProcessGroup, ranks: GuidedMesh | SequenceMesh) -> None:
    """Raise on all ``ranks``, which are how ``mesh`` was read, if two of them have one current GPU and NCCL connects them.

    One small exchange over the CPU where it is NCCL; otherwise nothing is asked. Not in a graph, where nothing is exchanged.
    """
    on_cpu = isinstance(mesh, DeviceMesh) and mesh.device_type != "cuda"  # a group may take tensors of both
    if torch.compiler.is_compiling() or on_cpu or not any(_is_nccl(dim.group) for dim in ranks.dims):
        return
    found = {dist.get_rank(): _current_gpu()}
    for dim in ranks.dims:
        if dim.group is not None:
            parts: list[Any] = [None] * dim.size
            dist.all_gather_object(parts, found, group=host_group(dim))
            found = {rank: place for part in parts for rank, place in part.items()}
    problem = shared_gpu({rank: place for rank, place in sorted(found.items()) if place is not None})
    if problem is not None:
        raise RuntimeError(problem)


def _is_nccl(group: ProcessGroup | None) -> bool:
    """Whether tensors on a GPU travel over NCCL among the ranks of ``group``."""
    if group is None or all(device.type != "cuda" for device in group_devices(group)):
        return False
    return bool(backend_of(group, torch.device("cuda")).name() == "nccl")


def _current_gpu() -> tuple[str, str] | None:
    """The names of this host and of this rank's current GPU; None where the process uses no GPU."""
    if not torch.cuda.is_initialized():
        return None
    index = torch.cuda.current_device()
    # Each rank may see other GPUs as its first one (CUDA_VISIBLE_DEVICES).
    return socket.gethostname(), str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def shared_gpu(places: Mapping[int, tuple[str, str]]) -> str | None:
    """Why NCCL cannot run on ranks that are at ``places`` (of each, name of the host and of the GPU); None if it can.

    >>> print(shared_gpu({0: ("a", "0"), 1: ("a", "1"), 2: ("b", "0")}))
    None
    """
    ranks_at: dict[tuple[str, str], list[int]] = {}
    for rank, place in places.items():
        ranks_at.setdefault(place, []).append(rank)
    for (host, gpu), ranks in ranks_at.items():
        if len(ranks) == 1:
            continue
        all_on_one = len([one for one, _ in ranks_at if one == host]) == 1
        reason = (
            "torch.cuda.set_device was not called, or too late, or the host has no other GPU"
            if all_on_one
            else "there are more ranks than GPUs on that host, or torch.cuda.set_device got the wrong one"
        )
        return (
            f"ranks {ranks} on host {host} all have the current device {gpu}, and NCCL takes one rank per GPU: {reason}. Call "
            "torch.cuda.set_device(torch.distributed.get_node_local_rank()) right after init_process_group(), before "
            "anything is put on a GPU. Several ranks on one GPU run on gloo: init_process_group('gloo')."
        )
    return None
