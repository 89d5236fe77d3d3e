"""Choose the mesh of a pipeline or model if the user gives none.

If all ranks are CUDA devices of one host, the mesh is the one that the planner predicts to be fastest at the pipeline's
default sizes; rank 0 predicts for all ranks. Otherwise :func:`choose_mesh` chooses by a fixed rule, from the number of
ranks, heads and hosts, ``weights=``, and whether the pipeline uses guidance by default. The fixed rule applies on other
devices, on several hosts, to a transformer or UNet without a pipeline, and to a device or model that the planner does
not know.

Rank 0 logs the mesh and its reason at level INFO. If the planner raises an error that it does not document, which is a
defect, rank 0 also logs a warning with the error, because a later version may choose another mesh.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from itertools import groupby
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.planner.fastest_mesh import fastest_mesh
from para_core.adapters.planner.mesh_choice import MeshChoice, Unpredicted, choose_mesh
from para_core.adapters.planner.pipeline_defaults import default_guidance, number_of_heads
from para_core.adapters.registry import transformers_of, unets_of
from para_core.attention.attention_options import RotateMethod
from para_core.distributed.create_mesh import init_context_parallel_mesh, ranks_per_host, require_own_gpus
from para_core.distributed.mesh import GuidedMesh, find_or_make_group, guided_mesh, one_guided_rank

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | ProcessGroup


def guided_mesh_for(mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None) -> GuidedMesh:
    """Return the dims of ``mesh`` and the position of this rank on them. None stands for the default mesh of all ranks.

    Args:
        mesh: The mesh that the user gave.
        owner: Pipeline or model that the mesh is for.
        weights: How weights will be sharded on the mesh; None if they are not.

    Raises:
        TypeError, ValueError: If ``mesh`` is not a mesh of para_core.
        RuntimeError: If there are several ranks but no process group, or if two NCCL ranks use the same GPU.
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
        chosen, method = _chosen_mesh(device_type, owner, weights)
        return guided_mesh(chosen), method
    guided = guided_mesh(mesh)
    require_own_gpus(mesh, guided)
    return guided, "alltoall"


def _planned(device_type: str, owner: Any, weights: str | None = None) -> MeshChoice | Unpredicted:
    """Return the planner's choice, or why there is none. A collective call: rank 0 predicts for all ranks."""
    if isinstance(owner, nn.Module):
        return Unpredicted("there is no pipeline")
    if device_type != "cuda" or dist.get_backend() == "fake":
        return Unpredicted(f"the planner predicts for cuda devices, and this one is {device_type}")
    predicted: list[Any] = [None]
    if dist.get_rank() == 0:
        predicted = [fastest_mesh(owner, dist.get_world_size(), weights)]
    # All ranks use the prediction of rank 0, because other ranks may have other devices and would predict differently.
    dist.broadcast_object_list(predicted, src=0, group=_cpu_group())
    choice: MeshChoice | Unpredicted = predicted[0]
    return choice


def _cpu_group() -> ProcessGroup:
    """Return a gloo group of all ranks, for CPU tensors. Every rank must call this function."""
    return find_or_make_group("para_core: choice of a mesh", list(range(dist.get_world_size())), backend="gloo")


def _ranks_per_host() -> int | None:
    """Return a group size n: ranks i * n … i * n + n - 1 are on one host, for every i. None if it is unknown.

    The number comes from the launcher's environment. Without a launcher (Ray, or processes started by hand) the ranks
    compare host names, which is a collective call.
    """
    on_host = ranks_per_host()
    ranks = dist.get_world_size()
    if on_host is not None or ranks == 1 or dist.get_backend() == "fake":
        return on_host
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, socket.gethostname(), group=_cpu_group())
    # Hosts may have different numbers of ranks. Groups whose size is the greatest common divisor of these numbers never
    # span two hosts.
    return gcd(*[len(list(run)) for _, run in groupby(names)])


def _chosen_mesh(device_type: str, owner: Any, weights: str | None = None) -> tuple[DeviceMesh, RotateMethod]:
    """Create the default mesh over all ranks. Return it with the default ``rotate_method`` for it."""
    transformer, guidance = owner, None
    if not isinstance(owner, nn.Module):
        transformer = next(iter((transformers_of(owner) or unets_of(owner)).values()), None)
        guidance = default_guidance(owner, transformer)
    on_host = _ranks_per_host()
    # The planner does not predict meshes over several hosts, because it does not know the network between them.
    # choose_mesh is used instead and keeps Ulysses within a host.
    one_host = on_host == dist.get_world_size()
    predicted = _planned(device_type, owner, weights) if one_host else Unpredicted("the ranks are on several hosts")
    if isinstance(predicted, MeshChoice):
        choice = predicted
    else:
        choice = choose_mesh(dist.get_world_size(), number_of_heads(transformer), guidance, on_host, weights)
        choice = replace(choice, reason=f"{choice.reason}; not predicted: {predicted.reason}")
    if dist.get_rank() == 0:
        _log_choice(choice, device_type)
        if isinstance(predicted, Unpredicted) and predicted.failed:
            logger.warning(
                "parallelize_pipe: the mesh could not be predicted (%s), so it follows from the number of heads and "
                "of ranks. Pass mesh= to choose one.",
                predicted.reason,
            )
    mesh = init_context_parallel_mesh(
        device_type,
        max_batch_dim_size=choice.batch,
        max_ring_dim_size=choice.ring,
        max_ulysses_dim_size=choice.ulysses,
        max_tensor_dim_size=choice.tensor if choice.tensor > 1 else None,
    )
    return mesh, choice.rotate_method


def _log_choice(choice: MeshChoice, device_type: str) -> None:
    tensor = choice.tensor > 1
    logger.info(
        "parallelize_pipe: no mesh given, using batch × ring × ulysses%s = %d × %d × %d%s%s (%s); "
        "mesh=init_context_parallel_mesh(%r, max_batch_dim_size=%d, max_ring_dim_size=%d%s) overrides it.",
        " × tensor" if tensor else "",
        choice.batch,
        choice.ring,
        choice.ulysses,
        f" × {choice.tensor}" if tensor else "",
        "" if choice.rotate_method == "alltoall" else f", rotate_method={choice.rotate_method!r}",
        choice.reason,
        device_type,
        choice.batch,
        choice.ring,
        f", max_tensor_dim_size={choice.tensor}" if tensor else "",
    )
