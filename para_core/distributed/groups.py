"""Process groups: those of CPU tensors beside a mesh dim's own, and those that this package creates and finds again.

The groups of a mesh itself are made in :mod:`.create_mesh`. :mod:`.agree` sends the bytes of agreements over
:func:`host_group`; sharded weights, rows of images and :mod:`.point_to_point` call
:func:`find_or_make_group`. Tests: tests/distributed/test_mesh.py and tests/adapters/parallel/test_undo.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from para_core.distributed.mesh import MeshDim
from para_core.torch_internals import (
    backend_of,
    group_devices,
    group_timeout,
    is_registered,
    new_process_group,
    process_groups,
)

# find_or_make_group puts this prefix before the descriptions (group_desc) of its groups, by which they are found.
_OURS = "para_core: "


def nccl_device(group: ProcessGroup) -> torch.device | None:
    """Return the device whose tensors ``group`` sends over NCCL; None if it uses NCCL for none of its devices."""
    devices = [device for device in group_devices(group) if device.type == "cuda"]
    return next((device for device in devices if backend_of(group, device).name() == "nccl"), None)


def host_group(dim: MeshDim) -> ProcessGroup:
    """Return a process group for CPU tensors among the ranks of ``dim``: the dim's own group, or a gloo
    group, in which **the ranks are sorted**. The group of ``dim`` may have another order.

    A gloo group is used if the group of ``dim`` has no CPU backend, as with NCCL alone, which would copy CPU
    tensors to the device and wait for its work. It is created at the first use, so every rank of ``dim`` must
    call this function. torch.distributed owns it: it is looked up by its description, and
    ``destroy_process_group()`` destroys it.

    Raises:
        ValueError: ``dim`` has no group: it has one rank, or this rank is not one of its ranks. Or its group,
            which has no CPU backend, was destroyed.
    """
    group = dim.group
    if group is None:
        raise ValueError(f"mesh dim {dim.name!r} of size {dim.size} has no process group on this rank.")
    devices = group_devices(group)
    if any(device.type == "cpu" for device in devices):
        return group
    if not is_registered(group):
        raise ValueError(
            f"the process group of mesh dim {dim.name!r} was destroyed. Make the mesh again after init_process_group()."
        )
    return find_or_make_group(
        f"CPU tensors beside group {dim.group_name}",
        dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=group_timeout(group, devices[0]),
    )


def groups_among(ranks: Collection[int]) -> list[ProcessGroup]:
    """Return the groups of this rank that :func:`find_or_make_group` created and whose members are all in ``ranks``."""
    return [
        group
        for group in groups_by_description().values()
        if set(dist.get_process_group_ranks(group)) <= set(ranks)
    ]


def groups_by_description() -> Mapping[str, ProcessGroup]:
    """Return the groups of this rank that :func:`find_or_make_group` created, by their descriptions."""
    return {
        group.group_desc.removeprefix(_OURS): group
        for group in process_groups()
        if group.group_desc.startswith(_OURS)
    }


def find_or_make_group(
    description: str, ranks: list[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Return the process group with this ``description``; create it if it does not exist.

    Unlike ``dist.new_group``, this function is only called by the member ``ranks``, which may have created
    different numbers of groups before. In the group the ranks are sorted. All members must call it, with the
    same arguments, before one of them uses the group.

    Only the description identifies a group, so it must differ for different ranks or backends. ``backend``
    and ``timeout`` are those of a new group: a group that exists keeps its own.

    Args:
        description: Description of the group, without the prefix of this package.
        ranks: Global ranks in any order, including this one.
        backend, timeout: As in ``new_group``.

    Raises:
        ValueError: The group with this description has other ranks, or ``ranks`` lack this rank.
    """
    members = sorted(ranks)
    group = groups_by_description().get(description)
    if group is not None:
        existing = dist.get_process_group_ranks(group)
        if existing != members:
            raise ValueError(f"the group {description!r} has the ranks {existing}; asked for were {members}.")
        return group
    name = blake2b(f"{description} {members}".encode(), digest_size=20).hexdigest()
    return new_process_group(
        name, members, description=f"{_OURS}{description}", backend=backend, timeout=timeout
    )
