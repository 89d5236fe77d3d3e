"""Make one process group of the ranks over which rows are sharded: those of all dims of a mesh, or the first of them.

The mode (:mod:`.mode`), the autoencoders and the UNets call it. Tests: tests/spatial/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.distributed.agree import exchange
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.mesh import GuidedMesh, MeshDim, dim_of_group, guided_mesh
from para_core.torch_internals import group_timeout


def one_group(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> MeshDim:
    """Return one mesh dim with the ranks of all dims of ``mesh``, in the order of the global ranks if there
    are several dims. Collective: every rank of the mesh must call this function.
    """
    if isinstance(mesh, ProcessGroup):
        return dim_of_group("rows", mesh)
    guided = mesh
    if not isinstance(guided, GuidedMesh):
        guided = guided_mesh(guided)
    groups = dim_groups(guided)
    if len(groups) < 2:
        return dim_of_group("rows", next(iter(groups), None))
    members: list[int] = [record["rank"] for record in exchange({"rank": dist.get_rank()}, guided)]
    return first_ranks(members, len(members), like=groups[0])


def dim_groups(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> list[ProcessGroup]:
    """Return the process group of each dim of ``mesh`` that has several ranks."""
    if isinstance(mesh, ProcessGroup):
        return [mesh]
    if not isinstance(mesh, GuidedMesh):
        mesh = guided_mesh(mesh)
    return [dim.group for dim in mesh.dims if dim.group is not None]


def first_ranks(
    members: list[int], count: int, *, like: ProcessGroup, groups: Sequence[ProcessGroup] = ()
) -> MeshDim:
    """Return a mesh dim of the first ``count`` of the global ranks ``members``, in the order of their numbers,
    as in every process group. Collective over these ``count`` ranks; only they may call this function.

    One of ``groups`` is reused if it has the same ranks and backend, because an NCCL communicator takes GPU
    memory. Otherwise a group with the backend and timeout of ``like`` is created at the first call, and
    reused by later calls.
    """
    chosen, backend = sorted(members[:count]), dist.get_backend(like)
    for group in groups:
        if dist.get_process_group_ranks(group) == chosen and dist.get_backend(group) == backend:
            return dim_of_group("rows", group)
    description = f"rows over ranks {chosen} by {backend}"
    group = find_or_make_group(description, chosen, backend=backend, timeout=group_timeout(like))
    return dim_of_group("rows", group)
