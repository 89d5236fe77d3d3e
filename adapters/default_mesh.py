"""The mesh on which a pipeline or model runs: the one that the user gives, or a default one over all ranks."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.features import feature
from para_core.distributed.create_mesh import check_distinct_gpus, init_context_parallel_mesh, ranks_per_host
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.mesh import GuidedMesh, guided_mesh, one_guided_rank
from para_core.option_values import RotateMethod

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | ProcessGroup


@dataclass(frozen=True)
class MeshChoice:
    """Number of ranks along each mesh dim, the reason for the choice, and the ``rotate_method`` of the ring."""

    batch: int
    ring: int
    ulysses: int
    reason: str
    rotate_method: RotateMethod = "alltoall"
    tensor: int = 1


def guided_mesh_for(mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None) -> GuidedMesh:
    """Return the dims of ``mesh`` and the position of this rank on them. None stands for the default mesh of
    all ranks.

    ``owner`` is the pipeline or model that the mesh is for, and ``weights`` how its weights will be sharded
    on it. Without a mesh this is a collective call.

    Raises:
        TypeError, ValueError: ``mesh`` is not a mesh of para_core.
        RuntimeError: There are several ranks but no process group, or two NCCL ranks use the same GPU.
    """
    return mesh_and_method(mesh, owner, weights)[0]


def mesh_and_method(
    mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None
) -> tuple[GuidedMesh, RotateMethod]:
    """Return the mesh as :func:`guided_mesh_for` does, and the default ``rotate_method`` for it."""
    if isinstance(mesh, GuidedMesh):
        return mesh, "alltoall"
    if mesh is None:
        device_type = torch.device(getattr(owner, "_execution_device", None) or owner.device).type
        if not (dist.is_available() and dist.is_initialized()):
            world_size = os.environ.get("WORLD_SIZE", "1")
            if world_size != "1":
                raise RuntimeError(
                    f"WORLD_SIZE is {world_size}, but no process group is initialised. Call "
                    "torch.distributed.init_process_group() before parallelize_pipe(pipe)."
                )
            return one_guided_rank(device_type), "alltoall"
        choice = _choose_default_mesh(device_type, owner, weights)
        return guided_mesh(_create_mesh_of(device_type, choice)), choice.rotate_method
    guided = guided_mesh(mesh)
    if guided.sequence.device_type == "meta":
        raise ValueError(
            "mesh is of device type 'meta', whose tensors hold no data, and the model is on "
            f"{getattr(owner, 'device', 'cpu')}. Pass a mesh of the device on which the ranks will compute, such as "
            "init_context_parallel_mesh('cpu'). The model may be moved there later."
        )
    check_distinct_gpus(mesh, guided)
    return guided, "alltoall"


def _choose_default_mesh(device_type: str, owner: Any, weights: str | None) -> MeshChoice:
    """Return the sizes of the default mesh. A collective call."""
    choose, ranks = feature("choose_default_mesh"), dist.get_world_size()
    if choose is None:
        return MeshChoice(1, 1, ranks, "nothing predicts another mesh: all ranks are on ulysses")
    on_host, shares = _ranks_per_host(), device_type == "cuda" and dist.get_backend() != "fake"
    chosen: list[Any] = [None]
    if dist.get_rank() == 0 or not shares:
        try:
            chosen = [choose(owner, ranks, device_type, on_host, weights)]
        except Exception as error:
            # The pipeline's class may be the user's own. The error is raised on all ranks.
            chosen = [error]
    if shares:
        # All ranks use the choice of rank 0, because other ranks may have other devices and would predict
        # differently.
        dist.broadcast_object_list(chosen, src=0, group=_cpu_group())
    choice: MeshChoice | Exception = chosen[0]
    if isinstance(choice, Exception):
        raise choice
    return choice


def _cpu_group() -> ProcessGroup:
    """Return a gloo group of all ranks, for CPU tensors. Every rank must call this function."""
    return find_or_make_group(
        "para_core: choice of a mesh", list(range(dist.get_world_size())), backend="gloo"
    )


def _ranks_per_host() -> int | None:
    """Return a group size n: ranks i * n … i * n + n - 1 are on one host, for every i. None if it is unknown.

    Without a launcher that tells it (Ray, or processes started by hand) this is a collective call.
    """
    on_host = ranks_per_host()
    ranks = dist.get_world_size()
    if on_host is not None or ranks == 1 or dist.get_backend() == "fake":
        return on_host
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, socket.gethostname(), group=_cpu_group())
    # Groups whose size divides the number of ranks of every host never span two hosts.
    return gcd(*[len(list(run)) for _, run in groupby(names)])


def _create_mesh_of(device_type: str, choice: MeshChoice) -> DeviceMesh:
    """Create the mesh of ``choice`` over all ranks. Rank 0 logs it."""
    sizes = {"batch": choice.batch, "ring": choice.ring, "ulysses": choice.ulysses}
    if choice.tensor > 1:
        sizes["tensor"] = choice.tensor
    method = ""
    if choice.rotate_method != "alltoall":
        method = f", rotate_method={choice.rotate_method!r}"
    if dist.get_rank() == 0:
        logger.info(
            "parallelize_pipe: no mesh given, using %s = %s%s (%s); mesh=init_context_parallel_mesh(%r, %s) overrides "
            "it.",
            " × ".join(sizes),
            " × ".join(map(str, sizes.values())),
            method,
            choice.reason,
            device_type,
            ", ".join(f"max_{name}_dim_size={size}" for name, size in sizes.items() if name != "ulysses"),
        )
    return init_context_parallel_mesh(
        device_type, **{f"max_{name}_dim_size": size for name, size in sizes.items()}
    )
