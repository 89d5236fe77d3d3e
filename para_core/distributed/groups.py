"""Process groups: those of CPU tensors beside a mesh dim's own, and those that this package creates and finds again."""

from __future__ import annotations

from collections.abc import Collection
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
    new_process_group,
    process_groups,
)

# Descriptions (group_desc) of process groups that this package creates begin with this prefix, by which they
# are found.
_OURS = "para_core: "


def nccl_device(group: ProcessGroup) -> torch.device | None:
    """Return the device whose tensors ``group`` sends over NCCL; None if it uses NCCL for none of its devices."""
    devices = [device for device in group_devices(group) if device.type == "cuda"]
    return next((device for device in devices if backend_of(group, device).name() == "nccl"), None)


def host_group(dim: MeshDim) -> ProcessGroup:
    """Return a process group for CPU tensors among the ranks of ``dim``: the dim's own group, or a gloo
    group.

    A gloo group is used if the group of ``dim`` only has NCCL, which would copy CPU tensors to the device and
    wait for its work. It is created at the first use, so every rank of ``dim`` must call this function.
    torch.distributed owns it: it is looked up by its description, and ``destroy_process_group()`` destroys
    it.

    Raises:
        ValueError: ``dim`` has one rank.
    """
    group = dim.group
    if group is None:
        raise ValueError(f"mesh dim {dim.name!r} has one rank, and so no group.")
    devices = group_devices(group)
    if any(device.type == "cpu" for device in devices):
        return group
    return find_or_make_group(
        f"para_core: CPU tensors beside group {dim.group_name}",
        dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=group_timeout(group, devices[0]),
    )


def groups_among(ranks: Collection[int]) -> list[ProcessGroup]:
    """Return the groups of this rank that :func:`find_or_make_group` created and whose members are all in ``ranks``."""
    ours = [group for group in process_groups() if group.group_desc.startswith(_OURS)]
    return [group for group in ours if set(dist.get_process_group_ranks(group)) <= set(ranks)]


def find_or_make_group(
    description: str, ranks: list[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Return the process group with this ``description``; create it if it does not exist.

    Unlike ``dist.new_group``, this function is only called by the member ``ranks``, which may have created
    different numbers of groups before.
    """
    for group in process_groups():
        if group.group_desc == description:
            return group
    name = blake2b(f"{description} {ranks}".encode(), digest_size=20).hexdigest()
    return new_process_group(name, ranks, description=description, backend=backend, timeout=timeout)
