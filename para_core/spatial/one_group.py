"""Combine the ranks of all dims of a mesh into one mesh dim with one process group, because rows are sharded over all
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.distributed.consistency import exchange
from para_core.distributed.mesh import GuidedMesh, MeshDim, find_or_make_group, guided_mesh
from para_core.torch_internals import group_timeout


def one_group(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> MeshDim:
    """Return one mesh dim with the ranks of all dims of ``mesh``. Every rank of the mesh must call this function."""
    if isinstance(mesh, ProcessGroup):
        return of_group(mesh)
    guided = mesh if isinstance(mesh, GuidedMesh) else guided_mesh(mesh)
    groups = [dim.group for dim in guided.dims if dim.group is not None]
    if not groups:
        return of_group(None)
    if len(groups) == 1:
        return of_group(groups[0])
    members: list[int] = [record["rank"] for record in exchange({"rank": dist.get_rank()}, guided)]
    return first_ranks(members, len(members), like=groups[0])


def dim_groups(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> list[ProcessGroup]:
    """Return the process group of each dim of ``mesh`` that has several ranks."""
    if isinstance(mesh, ProcessGroup):
        return [mesh]
    guided = mesh if isinstance(mesh, GuidedMesh) else guided_mesh(mesh)
    return [dim.group for dim in guided.dims if dim.group is not None]


def first_ranks(members: list[int], count: int, *, like: ProcessGroup, groups: Sequence[ProcessGroup] = ()) -> MeshDim:
    """Return a mesh dim of the first ``count`` of the global ranks ``members``. Only these ``count`` ranks may call
    this function.

    One of ``groups`` is reused if it has the same ranks and backend, because an NCCL communicator takes GPU memory.
    Otherwise a group with the backend and timeout of ``like`` is created at the first call, and reused by later calls.
    """
    chosen = sorted(members)[:count] if count == len(members) else members[:count]
    for group in groups:
        if dist.get_process_group_ranks(group) == sorted(chosen) and dist.get_backend(group) == dist.get_backend(like):
            return of_group(group)
    options: dict[str, Any] = {"backend": dist.get_backend(like), "timeout": group_timeout(like)}
    return of_group(find_or_make_group(f"para_core: rows over ranks {chosen}", chosen, **options))


def of_group(group: ProcessGroup | None) -> MeshDim:
    """Return a mesh dim with the ranks of ``group``; for None a dim of size 1."""
    if group is None or group.size() == 1:
        return MeshDim("rows", 1, 0, "", None)
    return MeshDim("rows", group.size(), group.rank(), group.group_name, group)
