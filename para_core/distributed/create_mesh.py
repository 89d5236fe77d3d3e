"""Create a mesh: choose its shape, create its process groups, and check that no two ranks use the same GPU.

The sizes are chosen in :mod:`.mesh_shape`; a mesh that exists is read by :mod:`.mesh`. Users call
:func:`init_context_parallel_mesh`; modes, plans and ``adapters/default_mesh.py`` call
:func:`check_distinct_gpus` on a user's mesh. The latter also calls :func:`ranks_per_host`, for a mesh that it
chooses. Tests: tests/distributed/test_mesh.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from math import gcd

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from para_core.distributed.agree import agree, exchange
from para_core.distributed.groups import find_or_make_group, nccl_device
from para_core.distributed.mesh import (
    MESH_DIMS,
    PIPE_DIM,
    TENSOR_DIM,
    AnyMesh,
    all_ranks,
    check_process_group,
    guided_mesh,
)
from para_core.distributed.mesh_shape import check_maximum, mesh_sizes
from para_core.distributed.records import Record, describe_differences
from para_core.torch_internals import group_devices

# Words of the error of check_no_shared_gpu, by which doctor.py recognises it.
SHARED_GPU = "all have the current device"


def ranks_per_host() -> int | None:
    """Return a group size n: ranks i * n … i * n + n - 1 are on one host, for every i. Collective.

    It divides the length of each run of consecutive ranks with the same host name, and what torchrun or Slurm
    tells, because several hosts may have one name. Neither is enough: a launcher may tell nothing (Ray, or
    processes started by hand), tell some ranks only, or have hosts with different numbers of ranks. Return
    None on PyTorch's fake backend, whose ranks cannot compare host names, if the launcher tells nothing.
    """
    of_launcher = ranks_per_host_of_launcher()
    if dist.get_backend() == "fake":
        return of_launcher
    records = exchange((of_launcher, socket.gethostname()), all_ranks())
    runs = [len(list(run)) for _, run in groupby(name for _, name in records)]
    return gcd(*runs, *[size for size, _ in records if size is not None])


def ranks_per_host_of_launcher() -> int | None:
    """Return the number of ranks on each host by the environment variables of torchrun or Slurm.

    Return None if the variables are not set, do not describe this job, or tell hosts that do not divide the
    ranks. A job of 6 and 2 ranks reads as one of 4 and 4.
    """
    ranks = dist.get_world_size()
    # LOCAL_WORLD_SIZE tells the ranks of this host only. torchrun's agents and Slurm's nodes are hosts.
    for ranks_named, hosts_named in (("WORLD_SIZE", "GROUP_WORLD_SIZE"), ("SLURM_NTASKS", "SLURM_NNODES")):
        hosts = os.environ.get(hosts_named, "")
        # If the number of ranks differs, the variables describe an outer job, whose processes have started
        # these ranks. Ignore such variables.
        if os.environ.get(ranks_named) == str(ranks) and hosts.isdigit() and int(hosts) > 0:
            if ranks % int(hosts) != 0:
                return None
            return ranks // int(hosts)
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
    """Create a ``DeviceMesh`` of all ranks with the dims ``("batch", "ring", "ulysses")``.

    Every rank calls this function with the same arguments. In the order tensor, pipe, batch, ring, ulysses,
    each dim with a maximum gets the largest size up to this maximum that divides the number of remaining
    ranks. All other ranks go to ``ulysses``, or to ``ring`` if only ``ulysses`` has a maximum. On several
    hosts and without a maximum for ring and ulysses, each Ulysses group stays on one host and the ring
    connects the hosts (docs/several_nodes.md).

    Ranks along the last dim are neighbours. To use only some of the ranks, create a mesh of all ranks and
    pass a slice of it, such as ``mesh["ring", "ulysses"]``. A dim of size 1 needs no NCCL communicator.

    Args:
        device_type (`str`, *optional*): ``"cuda"``, ``"cpu"``, and so on. Defaults to the accelerator of this
            machine if the process group has a backend for it, else to the CPU.
        max_batch_dim_size (`int`, *optional*): Maximum number of ranks for CFG branches or samples. Defaults
            to 1.
        max_ring_dim_size (`int`, *optional*): Maximum number of ranks of a ring, which pass keys and values
            on to each other.
        max_ulysses_dim_size (`int`, *optional*): Maximum number of ranks of a Ulysses group, which exchange
            tokens for heads.
        max_tensor_dim_size (`int`, *optional*): Maximum number of ranks that share the heads of a
            tensor-parallel model (``weights="tensor"``). If it is given, the mesh has a last dim
            ``"tensor"``.
        max_pipe_dim_size (`int`, *optional*): Maximum number of pipeline stages, each of which holds
            consecutive transformer blocks. If it is given, the mesh has a first dim ``"pipe"``.

    Returns:
        The mesh.

    Raises:
        RuntimeError: No process group is initialised, or two ranks have the same GPU, which NCCL refuses.
        TypeError, ValueError: ``device_type`` is no type of a device, such as ``"cuda:0"``; a maximum is not
            a positive integer; ranks are left over; or, on every rank, the arguments differ between ranks.

    Example::

        mesh = init_context_parallel_mesh("cuda", max_ring_dim_size=2)  # on 8 ranks: ring 2 × ulysses 4
    """
    check_process_group("init_context_parallel_mesh")
    if device_type is None:
        device_type = _default_device_type()
    maxima = {
        "batch": max_batch_dim_size,
        "ring": max_ring_dim_size,
        "ulysses": max_ulysses_dim_size,
        "tensor": max_tensor_dim_size,
        "pipe": max_pipe_dim_size,
    }
    arguments = {f"max_{name}_dim_size": maximum for name, maximum in maxima.items()}
    _agree_on_arguments(device_type=device_type, **arguments)
    _check_device_type(device_type)
    for name, maximum in arguments.items():
        check_maximum(name, maximum)
    on_host = None
    if max_ring_dim_size is None and max_ulysses_dim_size is None:
        on_host = ranks_per_host()
    sizes = mesh_sizes(dist.get_world_size(), maxima, ranks_per_host=on_host)
    names: tuple[str, ...] = MESH_DIMS
    if max_tensor_dim_size is not None:
        names = (*names, TENSOR_DIM)
    if max_pipe_dim_size is not None:
        names = (PIPE_DIM, *names)
    mesh = _mesh_of_shape(device_type, tuple(sizes.get(name, 1) for name in names), names)
    # Check this last, because init_device_mesh sets the current GPU of a rank that has not used a GPU before.
    check_distinct_gpus(mesh, guided_mesh(mesh))
    return mesh


def _default_device_type() -> str:
    """Return the type of this machine's accelerator if the process group can send its tensors, else "cpu"."""
    # Without check_available=True, a CUDA build of torch returns "cuda" on a machine without a GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    types: set[str] = set()
    if dist.group.WORLD is not None:
        types = {device.type for device in group_devices(dist.group.WORLD)}
    if accelerator is not None and accelerator.type in types:
        return accelerator.type
    # Also on a Mac with the backend "gloo", which sends no tensors of its device, mps.
    return "cpu"


def _check_device_type(device_type: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` if torch has no type of device of this name, which a mesh would take."""
    if not isinstance(device_type, str):
        raise TypeError(
            f"device_type is {device_type!r}; expected a string, such as 'cuda', the type of a torch.device."
        )
    try:
        is_plain_type = torch.device(device_type).type == device_type
    except RuntimeError:
        is_plain_type = False
    if not is_plain_type:
        raise ValueError(
            f"device_type is {device_type!r}; expected a type of device without an index, such as 'cuda' or 'cpu'."
        )


def _agree_on_arguments(**arguments: object) -> None:
    """Raise ``ValueError`` on every rank if ``arguments`` differ between ranks, which would make different
    groups. Collective.
    """

    def explain(records: list[Record]) -> str:
        fields = "; ".join(describe_differences(records))
        return f"the ranks must call init_context_parallel_mesh with equal arguments. {fields}."

    # Values of other types are refused later, on every rank. True would else be equal to a 1 of another rank.
    record = dict(arguments)
    for name, value in arguments.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str))):
            record[name] = f"a {type(value).__name__}"
    agree(record, all_ranks(), explain=explain)


def _mesh_of_shape(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks with this ``shape`` and these dim ``names``. Collective.

    All dims of size 1 share one process group of this rank alone, which is created once, without
    communication and without an NCCL communicator. ``init_device_mesh`` would create a group for each of
    these dims on each rank.
    """
    used = {name: size for name, size in zip(names, shape, strict=True) if size > 1}
    if not used:
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    # With PyTorch's fake backend there is no store, which gloo would need.
    backend = "fake" if dist.get_backend() == "fake" else "gloo"
    make_group_of_one = partial(find_or_make_group, "this rank alone", [dist.get_rank()], backend=backend)
    groups = [mesh.get_group(name) if name in used else make_group_of_one() for name in names]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh.mesh.view(shape), mesh_dim_names=names)


def check_distinct_gpus(mesh: DeviceMesh | ProcessGroup, ranks: AnyMesh) -> None:
    """Raise ``RuntimeError`` on every rank of ``mesh`` if two ranks have the same current GPU, which NCCL
    refuses. Collective.

    If the ranks use NCCL, the check is one small exchange between CPUs for each mesh dim. It ignores ranks
    that have not used a GPU yet. Without NCCL, and inside a compiled function, this function does nothing.

    Args:
        mesh: The mesh of the user.
        ranks: The result of :func:`~para_core.distributed.mesh.guided_mesh` or ``sequence_mesh`` for
            ``mesh``.
    """
    # A DeviceMesh has one device type, so a mesh of CPUs needs no check. A process group may support CPU and
    # GPU.
    on_cpu = isinstance(mesh, DeviceMesh) and mesh.device_type != "cuda"
    if (
        torch.compiler.is_compiling()
        or on_cpu
        or not any(dim.group is not None and nccl_device(dim.group) for dim in ranks.dims)
    ):
        return
    gpu: tuple[str, str] | None = None  # The host name and the UUID of this rank's GPU, if it has used one.
    if torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        # Use the UUID, because with CUDA_VISIBLE_DEVICES the same index may mean different GPUs on two ranks.
        gpu = socket.gethostname(), str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    gpus = sorted(exchange((dist.get_rank(), gpu), ranks))
    check_no_shared_gpu({rank: gpu for rank, gpu in gpus if gpu is not None})


def check_no_shared_gpu(gpus: Mapping[int, tuple[str, str]]) -> None:
    """Raise ``RuntimeError`` if two ranks have the same GPU, which NCCL refuses.

    Args:
        gpus: For each rank, the names of its host and of its current GPU.
    """
    ranks_on: dict[tuple[str, str], list[int]] = {}
    for rank, gpu_of_host in gpus.items():
        ranks_on.setdefault(gpu_of_host, []).append(rank)
    for (host, gpu), ranks in ranks_on.items():
        if len(ranks) == 1:
            continue
        all_on_one = sum(other == host for other, _ in ranks_on) == 1
        reason = "the host has more ranks than GPUs, or torch.cuda.set_device was called with a wrong index"
        if all_on_one:
            reason = "torch.cuda.set_device was not called, or too late, or the host has no other GPU"
        raise RuntimeError(
            f"ranks {ranks} on host {host} {SHARED_GPU} {gpu}, and NCCL takes one rank per GPU: "
            f"{reason}. Call "
            "torch.cuda.set_device(torch.distributed.get_node_local_rank()) right after init_process_group(), before "
            "anything is put on a GPU. Several ranks on one GPU run on gloo: init_process_group('gloo')."
        )
