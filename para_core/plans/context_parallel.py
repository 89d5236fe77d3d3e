"""Plans under the names that diffusers and MindONE gave them: ``apply_context_parallel(module, config, plan)``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.options import AttnOptions, RotateMethod
from para_core.distributed.create_mesh import init_context_parallel_mesh, require_own_gpus
from para_core.distributed.mesh import SequenceMesh, one_rank, require_process_group, sequence_mesh
from para_core.plans.plan import Plan
from para_core.plans.region import apply_plan, remove_plan


@dataclass(frozen=True)
class ContextParallelConfig:
    """Sizes of the ring and of Ulysses, and how a ring passes keys on.

    Args:
        ring_degree, ulysses_degree: ranks along each mesh dim, 1 if left out. Without ``mesh`` their product is the
            number of all ranks.
        convert_to_fp32: of the partial results of a ring, which are merged in float32 here, whatever this says.
        rotate_method: ``"alltoall"`` passes keys and values on round the ring, ``"allgather"`` gathers them at once,
            ``"2d"`` gathers queries along rows of ranks and keys along columns.
        mesh: with a ``ring`` and a ``ulysses`` dim of these sizes (or of any, where no degree is given).
    """

    ring_degree: int | None = None
    ulysses_degree: int | None = None
    convert_to_fp32: bool = True
    rotate_method: RotateMethod = "alltoall"
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class ParallelConfig:
    """Holds a :class:`ContextParallelConfig`."""

    context_parallel_config: ContextParallelConfig


def apply_context_parallel(module: nn.Module, parallel_config: Any, plan: Plan | Mapping[str, Any]) -> None:
    """Run this one module over several ranks, split and gathered as ``plan`` says, from now on.

    Args:
        parallel_config: a :class:`ContextParallelConfig`, or a :class:`ParallelConfig` that holds one; those of
            diffusers too. Their ``ulysses_anything`` and ``ring_anything`` are always on here.
        plan: ours, or a diffusers ``_cp_plan``.

    Raises:
        TypeError: ``parallel_config`` is something else.
        ValueError: it asks for tensor parallelism, its degrees do not fit the ranks, or the plan does not fit the
            module.
        RuntimeError: several ranks, and no process group; or two of them have the same GPU, which NCCL refuses.
    """
    if getattr(parallel_config, "tensor_parallel_config", None) is not None:
        raise ValueError(
            "parallel_config holds a tensor_parallel_config; sequences are sharded here, not weights. Pass a "
            "ContextParallelConfig(ring_degree=..., ulysses_degree=...)."
        )
    config = getattr(parallel_config, "context_parallel_config", parallel_config)
    if not (hasattr(config, "ring_degree") and hasattr(config, "ulysses_degree")):
        raise TypeError(
            f"parallel_config is {parallel_config!r}; expected a ContextParallelConfig, or a ParallelConfig that "
            "holds one."
        )
    rotate_method: Any = getattr(config, "rotate_method", "alltoall")
    options = AttnOptions(rotate_method=rotate_method)
    apply_plan(module, plan, _mesh_of(config, module), options=options)


def remove_context_parallel(module: nn.Module, plan: Plan | Mapping[str, Any] | None = None) -> None:
    """Give ``module`` back as it was before :func:`apply_context_parallel`; ``plan`` need not be said again."""
    remove_plan(module)


def _mesh_of(config: Any, module: nn.Module) -> SequenceMesh:
    for name in ("ring_degree", "ulysses_degree"):
        degree = getattr(config, name)
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise ValueError(f"{name} is {degree!r}; expected a positive integer, or None for 1.")
    mesh = getattr(config, "mesh", None)
    if mesh is not None:
        found = sequence_mesh(
            mesh["ring", "ulysses"] if {"ring", "ulysses"} <= {*(mesh.mesh_dim_names or ())} else mesh
        )
        given = {"ring": config.ring_degree, "ulysses": config.ulysses_degree}
        if any(degree not in (None, 1, getattr(found, name).size) for name, degree in given.items()):
            raise ValueError(
                f"the mesh has ring × ulysses = {found.ring.size} × {found.ulysses.size}, but the degrees say "
                f"{config.ring_degree} × {config.ulysses_degree}. Leave one of both out."
            )
        require_own_gpus(mesh, found)
        return found
    ring, ulysses = config.ring_degree or 1, config.ulysses_degree or 1
    device_type = next((x.device.type for x in module.parameters()), "cpu")
    if ring * ulysses == 1:
        return one_rank(device_type)
    require_process_group("apply_context_parallel")
    if ring * ulysses != dist.get_world_size():
        raise ValueError(
            f"ring_degree × ulysses_degree is {ring} × {ulysses} = {ring * ulysses}, but there are "
            f"{dist.get_world_size()} "
            "ranks. Change the degrees, or pass mesh= a slice of a larger mesh."
        )
    return sequence_mesh(init_context_parallel_mesh(device_type, max_ring_dim_size=ring, max_ulysses_dim_size=ulysses))
