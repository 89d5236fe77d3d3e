"""Make one process group of the ranks over which rows are sharded: those of all dims of a mesh, or the first of them.

The mode (:mod:`.mode`), the autoencoders and the UNets call it. In each group the ranks are sorted, so that the
first ranks have the same order in a group of their own as among all ranks. Tests: tests/spatial/test_vaes.py,
in which ``check_groups`` fails if a group of the mesh is not reused.
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
    """Return one mesh dim with the ranks of all dims of ``mesh``, sorted by their global ranks. Collective:
    every rank of the mesh must call this function.

    The group of a dim is reused if it has all these ranks in this order; otherwise a group is created.
    """
    if not isinstance(mesh, (ProcessGroup, GuidedMesh)):
        mesh = guided_mesh(mesh)
    groups = dim_groups(mesh)
    if not groups:
        return dim_of_group("rows", None)
    if isinstance(mesh, GuidedMesh) and len(groups) > 1:
        members: list[int] = [record["rank"] for record in exchange({"rank": dist.get_rank()}, mesh)]
    else:
        members = dist.get_process_group_ranks(groups[0])
    return first_ranks(members, len(members), like=groups[0], groups=groups)


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
    """Return a mesh dim of the first ``count`` of the global ranks ``members``, sorted. Collective over these
    ``count`` ranks; only they may call this function.

    One of ``groups`` is reused if it has the same ranks, in this order, and the same backend, because an NCCL
    communicator takes GPU memory. Otherwise a group with the backend and timeout of ``like`` is created at
    the first call. Later calls reuse it with the timeout that it has.
    """
    chosen, backend = sorted(members[:count]), dist.get_backend(like)
    for group in groups:
        if dist.get_process_group_ranks(group) == chosen and dist.get_backend(group) == backend:
            return dim_of_group("rows", group)
    description = f"rows over ranks {chosen} by {backend}"
    group = find_or_make_group(description, chosen, backend=backend, timeout=group_timeout(like))
    return dim_of_group("rows", group)
