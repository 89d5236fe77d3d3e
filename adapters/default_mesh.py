"""The mesh on which a pipeline or model runs: the one that the user gives, or a default one over all ranks.

The functions of ``adapters/parallel`` and ``adapters/weights/shard.py`` call it. How the default is predicted
is in ``adapters/planner/default_mesh.py``, which may be deleted. Tests: tests/planner/test_default_mesh.py.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.features import feature
from para_core.distributed.agree import agree
from para_core.distributed.create_mesh import check_distinct_gpus, init_context_parallel_mesh, ranks_per_host
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.mesh import GuidedMesh, all_ranks, guided_mesh, one_guided_rank
from para_core.instance.modules import instances_in
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


class ChooseDefaultMesh(Protocol):
    """The signature of the feature ``choose_default_mesh``, which predicts a mesh.

    The arguments and errors are those of
    :func:`~para_core.adapters.planner.default_mesh.choose_default_mesh`.
    """

    def __call__(
        self,
        owner: Any,
        ranks: int,
        device_type: str,
        on_host: int | None = None,
        weights: str | None = None,
    ) -> MeshChoice: ...


def guided_mesh_for(mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None) -> GuidedMesh:
    """Return the dims of ``mesh`` and the position of this rank on them. None stands for the default mesh of
    all ranks.

    ``owner`` is the pipeline or model that the mesh is for, and ``weights`` how its weights will be sharded
    on it. Without a mesh this is a collective call.

    Raises:
        TypeError, ValueError: ``mesh`` is not a mesh of para_core.
        RuntimeError: There are several ranks but no process group, two NCCL ranks use the same GPU, or rank 0
            could not choose a mesh.
    """
    return mesh_and_method(mesh, owner, weights)[0]


def mesh_and_method(
    mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None
) -> tuple[GuidedMesh, RotateMethod]:
    """Return the mesh as :func:`guided_mesh_for` does, and the default ``rotate_method`` for it. Without a
    mesh this is a collective call.
    """
    if isinstance(mesh, GuidedMesh):
        return mesh, "alltoall"
    if mesh is None:
        return _default_mesh(owner, weights)
    guided = guided_mesh(mesh)
    _check_holds_data(guided.sequence.device_type)
    check_distinct_gpus(mesh, guided)
    return guided, "alltoall"


def _default_mesh(owner: Any, weights: str | None) -> tuple[GuidedMesh, RotateMethod]:
    """Return the default mesh of all ranks, and the ``rotate_method`` that goes with it. A collective call."""
    device_type = _device_type_of(owner)
    if dist.is_available() and dist.is_initialized():
        # Ranks on devices of other types would choose in another way, and so make other exchanges.
        agree({"the type of the model's device": device_type}, all_ranks())
        _check_holds_data(device_type)
        choice = _choose_default_mesh(device_type, owner, weights)
        return guided_mesh(_create_mesh_of(device_type, choice)), choice.rotate_method
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise RuntimeError(
            f"WORLD_SIZE is {world_size}, but no process group is initialised. Call "
            "torch.distributed.init_process_group() first."
        )
    return one_guided_rank(device_type), "alltoall"


def _check_holds_data(device_type: str) -> None:
    """Raise ``ValueError`` if the ranks of a mesh of ``device_type`` could not compute."""
    if device_type == "meta":
        raise ValueError(
            "mesh is of device type 'meta', whose tensors hold no data. Pass a mesh of the device on which the ranks "
            "will compute, such as init_context_parallel_mesh('cpu'). The model may be moved there later."
        )


def _device_type_of(owner: Any) -> str:
    """Return the type of the device on which ``owner``, a pipeline or model, computes; "cpu" if nothing tells it."""
    device = getattr(owner, "_execution_device", None) or getattr(owner, "device", None)
    if device is None:
        # The owner is not of diffusers: a module of torch, or a pipeline of the user's own.
        parts = [part for part in instances_in(owner) if isinstance(part, nn.Module)]
        device = next((x.device for part in parts for x in part.parameters()), "cpu")
    return torch.device(device).type


def _choose_default_mesh(device_type: str, owner: Any, weights: str | None) -> MeshChoice:
    """Return the sizes of the default mesh. A collective call."""
    choose: ChooseDefaultMesh | None = feature("choose_default_mesh")
    ranks = dist.get_world_size()
    if choose is None:
        return MeshChoice(1, 1, ranks, "nothing predicts another mesh: all ranks are on ulysses")
    on_host = ranks_per_host()
    # Ranks may have different GPUs, and would predict differently. On other devices the choice follows from
    # the arguments alone, so each rank makes it by itself, and ``choose`` must be deterministic. The ranks of
    # PyTorch's fake backend, which has one process, can send nothing.
    rank_0_chooses = device_type == "cuda" and dist.get_backend() != "fake"
    if not rank_0_chooses:
        return choose(owner, ranks, device_type, on_host, weights)
    # The choice, and the error in words: an exception of a user's class may not pickle.
    message: list[Any] = [None, ""]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            message[0] = choose(owner, ranks, device_type, on_host, weights)
        except Exception as error:
            cause = error
            message[1] = f"{type(error).__name__}: {error}"
    # A group for CPU tensors: the choice is pickled in host memory.
    group = find_or_make_group("choice of a mesh", list(range(ranks)), backend="gloo")
    dist.broadcast_object_list(message, src=0, group=group)
    choice: MeshChoice | None = message[0]
    if choice is None:
        raise RuntimeError(
            f"rank 0 could not choose a mesh: {message[1]}. Pass one: mesh=init_context_parallel_mesh()."
        ) from cause
    return choice


def _create_mesh_of(device_type: str, choice: MeshChoice) -> DeviceMesh:
    """Create the mesh of ``choice`` over all ranks. Rank 0 logs it. A collective call."""
    sizes = {"batch": choice.batch, "ring": choice.ring, "ulysses": choice.ulysses}
    if choice.tensor > 1:
        sizes["tensor"] = choice.tensor
    method = ""
    if choice.rotate_method != "alltoall":
        method = f", rotate_method={choice.rotate_method!r}"
    if dist.get_rank() == 0:
        logger.info(
            "no mesh given, using %s = %s%s (%s); mesh=init_context_parallel_mesh(%r, %s) overrides it.",
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
