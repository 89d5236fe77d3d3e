"""Bytes of the host, exchanged between the ranks of a mesh while its devices go on.

:mod:`.agree` compares records by it; adapters and the fleet broadcast random states, the shapes of outputs and
whether a request was cancelled. Tensors of devices travel by :mod:`.collectives`.

Tests: tests/distributed/test_agree.py and test_late_ranks.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from para_core.distributed.collectives import all_gather_into
from para_core.distributed.groups import host_group
from para_core.distributed.late_ranks import PATIENCE, wait_for_late_ranks
from para_core.distributed.mesh import GuidedMesh, MeshDim, SequenceMesh


class HostGroups:
    """The process groups that send CPU tensors among the ranks of a mesh, looked up once and cached.

    A caller that often exchanges bytes passes this object in place of the mesh to the functions of
    :mod:`para_core.distributed.agree`, which look up the groups in the first exchange: ``by_dim`` is empty
    until then, and :func:`all_gather_bytes` fills it, by names of mesh dims.
    """

    def __init__(self, mesh: SequenceMesh | GuidedMesh) -> None:
        self.dims = tuple([dim for dim in mesh.dims if dim.size > 1])
        self.by_dim: dict[str, dist.ProcessGroup] = {}


def all_gather_bytes(
    x: Tensor, dim: MeshDim, by_dim: dict[str, dist.ProcessGroup] | None = None, *, call: str = "this call"
) -> Tensor:
    """Return the concatenation of ``x`` from all ranks of ``dim``, in rank order. For eager code only.
    Collective.

    ``x`` is a uint8 CPU tensor of the same length on all ranks. The host waits for the other ranks, but not
    for the device, because the group of :func:`~para_core.distributed.groups.host_group` sends the bytes
    between CPUs. The groups in ``by_dim`` (of :class:`HostGroups`) are used; a missing group is looked up and
    added. ``call`` names the user's call for the log if ranks are late.
    """
    if dim.group is None:
        return x
    group = None if by_dim is None else by_dim.get(dim.name)
    if group is None:
        group = host_group(dim)
        if by_dim is not None:
            by_dim[dim.name] = group
    gathered = x.new_empty(dim.size * x.numel())
    work = all_gather_into(gathered, x, group=group, async_op=True)
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        wait_for_late_ranks(work, error, dim, group, call)
    if group is not dim.group:
        # The ranks of a new group are sorted, while dim.group may have another order. Restore the order of
        # dim.group.
        rows = [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(dim.group)]
        gathered = gathered.view(dim.size, -1)[rows].flatten()
    return gathered


def broadcast_bytes(x: Tensor, mesh: SequenceMesh | GuidedMesh) -> Tensor:
    """Return the ``x`` of the first rank of ``mesh``. For eager code only. Collective.

    ``x`` is a uint8 CPU tensor of the same length on all ranks.
    """
    for dim in mesh.dims:
        x = all_gather_bytes(x, dim)[: x.numel()]
    return x


def tensor_bytes(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` as a 1-D uint8 tensor, in C order of the elements."""
    # Set the stride to 1, because view(uint8) refuses other strides. A dim of size 1 counts as contiguous
    # with any stride (as after t.expand(1)), and flatten() keeps its stride.
    x = x.resolve_conj().resolve_neg().contiguous().flatten()
    return x.as_strided(x.shape, (1,), x.storage_offset()).view(torch.uint8)
