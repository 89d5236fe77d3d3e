"""Create the mesh over which weights are sharded: one dim, with its own process group.

Called by ``adapters/parallel/resolve.py`` and ``adapters/weights/``. Groups themselves are made in
:mod:`para_core.distributed.groups`. Tests: tests/distributed/test_mesh.py.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from para_core.distributed.groups import find_or_make_group, host_group
from para_core.distributed.mesh import AnyMesh, SequenceMesh, mesh_of_groups, sequence_mesh
from para_core.torch_internals import group_timeout, set_group_timeout


def timeout_of(mesh: AnyMesh) -> timedelta | None:
    """Return the timeout of the first process group of ``mesh``; None for a mesh of one rank, which has no
    group.
    """
    return next((group_timeout(dim.group) for dim in mesh.dims if dim.group is not None), None)


def as_ranks(mesh: DeviceMesh) -> SequenceMesh:
    """Return a mesh for FSDP2 as a :class:`SequenceMesh`.

    Raise ``ValueError`` if ``mesh`` has more than two dims, or this rank is not part of it.
    """
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dims of sizes {tuple(mesh.shape)}; FSDP2 takes one, or two, replicate × "
            "shard. Give a slice of it, or that of parallelize_pipe, with dims 'ring' and 'ulysses'."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of the mesh of {mesh.size()} ranks; only its members use it."
        )
    if mesh.ndim == 1:
        return sequence_mesh(mesh.get_group())
    return mesh_of_groups(mesh.get_group(0), mesh.get_group(1), mesh.device_type)


def sequence_ranks(mesh: SequenceMesh) -> list[int]:
    """Return the global rank of each sequence rank of ``mesh``, in the order of sequence ranks.

    Collective on a mesh with ``ring``.
    """
    group = mesh.ulysses.group
    ranks = [dist.get_rank()]
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
    if mesh.ring.group is None:
        return ranks
    # The host group may have another order of ranks than the group of ``ring``, so each rank sends its index.
    parts: list[Any] = [None] * mesh.ring.size
    dist.all_gather_object(parts, (mesh.ring.index, ranks), group=host_group(mesh.ring))
    return list(chain.from_iterable(ranks for _, ranks in sorted(parts)))


def weights_mesh(ranks: list[int], device_type: str, *, timeout: timedelta | None = None) -> DeviceMesh:
    """Return a mesh with one dim, named ``"weights"``, over the sorted global ranks ``ranks``.

    Collective: all of these ranks must call this. Its process group is created at the first call and then
    reused. A ``timeout`` becomes that of the group, for all that is sharded over these ranks; None leaves the
    timeout as it is. Attention does not use this group, because NCCL runs the collectives of one communicator
    in order: gathering the weights of the next block would wait for the attention of the current block.
    """
    # DeviceMesh refuses another order than that of the group. FSDP2 may have any, as the parts are gathered.
    ranks = sorted(ranks)
    # Pass no backend, because the default backend supports the same devices as the user's groups.
    group = find_or_make_group(f"weights of ranks {ranks}", ranks)
    if timeout is not None:
        set_group_timeout(group, timeout)
    mesh: DeviceMesh = DeviceMesh.from_group(group, device_type, mesh=ranks, mesh_dim_names=("weights",))
    return mesh
