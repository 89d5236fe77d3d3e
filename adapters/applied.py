"""Queries of what parallelize_pipe and parallelize_unet applied to an object."""

from __future__ import annotations

from typing import Any

from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance_patching import wrapper
from para_core.plans.region import mesh_of_plan

# Keys of the wrappers of ``__call__``. Their handlers have an attribute ``mesh``, a GuidedMesh.
PARALLEL_PIPE = "parallel"
PARALLEL_UNET = "parallel_unet"


def mesh_of(pipe: Any) -> GuidedMesh | None:
    """Return the mesh on which ``pipe`` runs; None if it is not parallel."""
    return _mesh_of_handler(pipe, PARALLEL_PIPE)


def applied_mesh(module: Any) -> SequenceMesh | None:
    """Return the ranks over which the tokens or rows of ``module`` are sharded; None if they are not."""
    unet = _mesh_of_handler(module, PARALLEL_UNET)
    return mesh_of_plan(module) or (None if unet is None else unet.sequence)


def _mesh_of_handler(instance: Any, key: str) -> GuidedMesh | None:
    handler = getattr(wrapper(instance, "__call__", key), "__self__", None)
    mesh = getattr(handler, "mesh", None)
    return mesh if isinstance(mesh, GuidedMesh) else None
