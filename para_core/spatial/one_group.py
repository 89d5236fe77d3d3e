"""Combine the ranks of all dims of a mesh into one mesh dim, because rows are sharded over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.distributed.consistency import exchange
from para_core.distributed.mesh import GuidedMesh, MeshDim, dim_of_group, find_or_make_group, guided_mesh
from para_core.torch_internals import group_timeout


def one_group(mesh: DeviceMesh | ProcessGroup | GuidedMesh) -> MeshDim:
    """Return one mesh dim with the ranks of all dims of ``mesh``. Every rank of the mesh must call this function."""
    guided = mesh if isinstance(mesh, (ProcessGroup, GuidedMesh)) else guided_mesh(mesh)
    groups = dim_groups(guided)
    if isinstance(guided, ProcessGroup) or len(groups) < 2:
        return dim_of_group("rows", groups[0] if groups else None)
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
            return dim_of_group("rows", group)
    options: dict[str, Any] = {"backend": dist.get_backend(like), "timeout": group_timeout(like)}
    return dim_of_group("rows", find_or_make_group(f"para_core: rows over ranks {chosen}", chosen, **options))
