"""What parallelize_pipe and parallelize_unet have applied to an object, as the rooms below them need to know it."""

from __future__ import annotations

from typing import Any

from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance_patching import wrapper
from para_core.plans.region import mesh_of_plan

# Under these keys the handlers, whose attribute ``mesh`` is a GuidedMesh, are around ``__call__``.
PARALLEL_PIPE = "parallel"
PARALLEL_UNET = "parallel_unet"


def mesh_of(pipe: Any) -> GuidedMesh | None:
    """Return the ranks that run ``pipe``; None if it is not parallel."""
    return _mesh_of_handler(pipe, PARALLEL_PIPE)


def applied_mesh(module: Any) -> SequenceMesh | None:
    """Return the ranks that share the tokens, or the rows, of what ``module`` computes; None if none do."""
    unet = _mesh_of_handler(module, PARALLEL_UNET)
    return mesh_of_plan(module) or (None if unet is None else unet.sequence)


def _mesh_of_handler(instance: Any, key: str) -> GuidedMesh | None:
    handler = getattr(wrapper(instance, "__call__", key), "__self__", None)
    mesh = getattr(handler, "mesh", None)
    return mesh if isinstance(mesh, GuidedMesh) else None
