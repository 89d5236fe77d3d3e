"""The ranks that share weights, as a mesh of one dim with a process group of its own."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from para_core.mesh import MeshDim, SequenceMesh, find_or_make_group, host_group

WEIGHTS_DIM = "weights"


def sequence_ranks(mesh: SequenceMesh) -> list[int]:
    """Global ranks of the sequence ranks of ``mesh``, in their order. Every one of them calls this."""
    ranks = _ranks_of(mesh.ulysses)
    if mesh.ring.group is None:
        return ranks
    parts: list[Any] = [None] * mesh.ring.size
    dist.all_gather_object(parts, ranks, group=host_group(mesh.ring))
    return list(chain.from_iterable(parts))


def _ranks_of(dim: MeshDim) -> list[int]:
    return [dist.get_rank()] if dim.group is None else dist.get_process_group_ranks(dim.group)


def weights_mesh(ranks: list[int], device_type: str) -> DeviceMesh:
    """A mesh of one dim, ``"weights"``, over ``ranks``; made once, and found again.

    Its group is not that of attention: NCCL orders what one communicator does, and the weights of the next block would wait for
    the exchange of this one's tokens.
    """
    # The system's default backend, which serves the devices that the user's groups serve.
    group = find_or_make_group(f"para_core: weights of ranks {ranks}", ranks)
    mesh: DeviceMesh = DeviceMesh.from_group(group, device_type, mesh=ranks, mesh_dim_names=(WEIGHTS_DIM,))
    return mesh
