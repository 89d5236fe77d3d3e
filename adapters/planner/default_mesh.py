"""Choose the mesh of a pipeline or model if the user gives none.

If all ranks are CUDA devices of one host, the mesh is the one that the planner predicts to be fastest at the pipeline's
default sizes; rank 0 predicts for all ranks, and logs the mesh and its reason at level INFO. Otherwise, and for a
device or model that the planner does not know, :func:`choose_mesh` chooses by a fixed rule.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.denoisers import other_denoisers_of
from para_core.adapters.planner.count import UnknownModelError
from para_core.adapters.planner.inputs import default_guidance, number_of_heads
from para_core.adapters.planner.plan_mesh import plan_mesh, workload
from para_core.adapters.registry import transformers_of
from para_core.distributed.create_mesh import init_context_parallel_mesh, ranks_per_host, require_own_gpus
from para_core.distributed.mesh import GuidedMesh, find_or_make_group, guided_mesh, one_guided_rank
from para_core.option_values import RotateMethod
from para_core.planner.hardware import gpu_at_hand
from para_core.planner.traffic import MeshShape

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
    """Return the dims of ``mesh`` and the position of this rank on them. None stands for the default mesh of all ranks.

    ``owner`` is the pipeline or model that the mesh is for, and ``weights`` how its weights will be sharded on it.
    Raises ``TypeError`` or ``ValueError`` if ``mesh`` is not a mesh of para_core, and ``RuntimeError`` if there are
    several ranks but no process group, or if two NCCL ranks use the same GPU.
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
    if guided.sequence.device_type == "meta":
        raise ValueError(
            "mesh is of device type 'meta', whose tensors hold no data, and the model is on "
            f"{getattr(owner, 'device', 'cpu')}. Pass a mesh of the device on which the ranks will compute, such as "
            "init_context_parallel_mesh('cpu'). The model may be moved there later."
        )
    require_own_gpus(mesh, guided)
    return guided, "alltoall"


def _planned(device_type: str, owner: Any, weights: str | None = None) -> MeshChoice | str:
    """Return the planner's choice, or why there is none. A collective call: rank 0 predicts for all ranks."""
    if isinstance(owner, nn.Module):
        return "there is no pipeline"
    if device_type != "cuda" or dist.get_backend() == "fake":
        return f"the planner predicts for cuda devices, and this one is {device_type}"
    predicted: list[Any] = [None]
    if dist.get_rank() == 0:
        predicted = [fastest_mesh(owner, dist.get_world_size(), weights)]
    # All ranks use the prediction of rank 0, because other ranks may have other devices and would predict differently.
    dist.broadcast_object_list(predicted, src=0, group=_cpu_group())
    choice: MeshChoice | str = predicted[0]
    return choice


def _cpu_group() -> ProcessGroup:
    """Return a gloo group of all ranks, for CPU tensors. Every rank must call this function."""
    return find_or_make_group("para_core: choice of a mesh", list(range(dist.get_world_size())), backend="gloo")


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


def _chosen_mesh(device_type: str, owner: Any, weights: str | None = None) -> tuple[DeviceMesh, RotateMethod]:
    """Create the default mesh over all ranks. Return it with the default ``rotate_method`` for it."""
    transformer, guidance = owner, None
    if not isinstance(owner, nn.Module):
        transformer = next(iter((transformers_of(owner) or other_denoisers_of(owner)).values()), None)
        guidance = default_guidance(owner, transformer)
    on_host = _ranks_per_host()
    # The planner does not predict meshes over several hosts, because it does not know the network between them.
    # choose_mesh is used instead and keeps Ulysses within a host.
    one_host = on_host == dist.get_world_size()
    predicted = _planned(device_type, owner, weights) if one_host else "the ranks are on several hosts"
    if isinstance(predicted, MeshChoice):
        choice = predicted
    else:
        choice = choose_mesh(dist.get_world_size(), number_of_heads(transformer), guidance, on_host, weights)
        choice = replace(choice, reason=f"{choice.reason}; not predicted: {predicted}")
    if dist.get_rank() == 0:
        dims = ["batch", "ring", "ulysses", *["tensor"] * (choice.tensor > 1)]
        sizes = {name: getattr(choice, name) for name in dims}
        logger.info(
            "parallelize_pipe: no mesh given, using %s = %s%s (%s); mesh=init_context_parallel_mesh(%r, %s) overrides "
            "it.",
            " × ".join(dims),
            " × ".join(map(str, sizes.values())),
            "" if choice.rotate_method == "alltoall" else f", rotate_method={choice.rotate_method!r}",
            choice.reason,
            device_type,
            ", ".join(f"max_{name}_dim_size={size}" for name, size in sizes.items() if name != "ulysses"),
        )
    mesh = init_context_parallel_mesh(
        device_type,
        max_batch_dim_size=choice.batch,
        max_ring_dim_size=choice.ring,
        max_ulysses_dim_size=choice.ulysses,
        max_tensor_dim_size=choice.tensor if choice.tensor > 1 else None,
    )
    return mesh, choice.rotate_method


def fastest_mesh(pipe: Any, ranks: int, weights: str | None = None) -> MeshChoice | str:
    """Return the mesh of ``ranks`` GPUs of this host that :func:`plan_mesh` predicts to be fastest, or why it cannot.

    With ``weights`` ``"fsdp"`` or ``"tensor"``, only meshes on which weights can be sharded in this way count.
    """
    if hasattr(pipe, "pag_applied_layers"):
        return "the planner does not count perturbed attention guidance"
    try:
        device = gpu_at_hand()
    except ValueError as error:
        return str(error)
    try:
        sharing: Any = (weights,) if weights in ("fsdp", "tensor") else ()
        # By default parallelize_pipe places the weights of text encoders in the same way.
        placed: Any = "fsdp" if sharing else "replicate"
        plan = plan_mesh(
            workload(pipe, ends=False),
            ranks=ranks,
            device=device,
            ranks_per_host=ranks,
            # Predict for eager code, because it is unknown whether the pipeline will be compiled later.
            compiled=False,
            weights=sharing,
            text_encoders=placed,
            vae_placement="replicate",
            offload=False,
        )
    except UnknownModelError as error:
        return str(error)
    except Exception as error:
        # Catch everything: the pipeline's class or config may be the user's own, so counting may raise anything. Warn,
        # because a later version may choose another mesh.
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "the mesh could not be predicted (%s), so it follows from the number of heads and of ranks. Pass mesh= to "
            "choose one.",
            reason,
        )
        return reason
    best = next((row for row in plan.rows if _shards(row.shape, weights)), plan.best)
    if best.problem is not None or not _shards(best.shape, weights):
        return best.problem or f"no mesh has ranks to shard weights by {weights!r}"
    shape, method = best.shape, best.options.get("rotate_method", "alltoall")
    reason = f"the fastest of {len(plan.rows)} by para_core.adapters.plan_mesh, at default sizes: {plan.advice}"
    return MeshChoice(shape.batch, shape.ring, shape.ulysses, reason, method, shape.tensor)


def _shards(shape: MeshShape, weights: str | None) -> bool:
    """Whether a mesh of ``shape`` can shard weights by the method ``weights``; True for None and other values."""
    if weights == "tensor":
        return shape.tensor > 1
    return weights != "fsdp" or (shape.tensor == 1 and shape.sequence > 1)


def choose_mesh(
    num_ranks: int,
    num_heads: int | None,
    guidance: str | None,
    ranks_per_host: int | None = None,
    weights: str | None = None,
) -> MeshChoice:
    """Return the sizes of a mesh of ``num_ranks`` ranks by a fixed rule.

    With guidance, each of the two CFG branches gets half of the ranks. The ranks of a branch go to Ulysses, as many as
    the key heads and one host allow, and the rest to the ring. Sharded weights come first: ``"tensor"`` takes the
    fewest ranks (at least two) that divide the heads; ``"fsdp"`` keeps at least two ranks per branch.

    Args:
        num_heads: Number of key heads; None if unknown, which sets no limit.
        guidance: Reason to expect two CFG branches, such as ``"guidance_scale is 6.0 by default"``, or None.
        ranks_per_host: Number of ranks on each host; None if all are on one host, or if it is unknown.
        weights: ``"fsdp"`` or ``"tensor"``; with any other value every rank holds all weights.

    >>> def sizes(*args, **options):
    ...     choice = choose_mesh(*args, **options)
    ...     return choice.batch, choice.ring, choice.ulysses
    >>> sizes(8, 24, None), sizes(8, 2, "guidance_scale is 6.0 by default"), sizes(16, 24, None, ranks_per_host=8)
    ((1, 1, 8), (2, 2, 2), (1, 2, 8))
    >>> choose_mesh(2, 24, "guidance_scale is 5.0 by default", weights="fsdp").reason
    "weights='fsdp', guidance_scale is 5.0 by default, 24 heads"
    """
    on_host = gcd(num_ranks, ranks_per_host or num_ranks)
    sizes = [size for size in range(2, on_host + 1) if on_host % size == 0 and (num_heads or size) % size == 0]
    tensor = sizes[0] if weights == "tensor" and sizes else 1
    left = num_ranks // tensor
    # FSDP2 shards weights over the ranks of one branch, so a branch needs at least two.
    batch = 2 if guidance is not None and left % 2 == 0 and (weights != "fsdp" or left > 2) else 1
    left //= batch
    # A group of consecutive ranks is on one host if its size divides the number of ranks on the host.
    neighbours = gcd(left, max((ranks_per_host or num_ranks) // tensor, 1))
    heads_left = left if num_heads is None else num_heads // tensor
    ulysses = next(size for size in range(min(neighbours, heads_left), 0, -1) if neighbours % size == 0)
    heads = "heads not known" if num_heads is None else f"{num_heads} heads"
    hosts = "" if ranks_per_host in (None, num_ranks) else f", {ranks_per_host} ranks on a host"
    sharded = f"weights={weights!r}, " if weights in ("fsdp", "tensor") else ""
    reason = f"{sharded}{guidance or 'no guidance by default'}, {heads}{hosts}"
    return MeshChoice(batch, left // ulysses, ulysses, reason, tensor=tensor)
