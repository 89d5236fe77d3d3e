"""Running a UNet of diffusers on several ranks: each holds rows of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from para_core.adapters.compatibility import CompatibilityContext, When, reason_against, refuse
from para_core.adapters.consistency.arguments import require_same_inputs
from para_core.adapters.models.unets import unet_adapter
from para_core.adapters.planner.mesh_choice import Mesh, guided_mesh_for
from para_core.adapters.rows.unet_rows import UnetRun, unshard_unet
from para_core.distributed.consistency import raising_on_all
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import original_class, restored_on_failure, uncompiled

Unet = TypeVar("Unet", bound=nn.Module)


def parallelize_unet(
    unet: Unet, *, mesh: Mesh | GuidedMesh | None = None, assume_equal: bool = False, batched: bool = True
) -> Unet:
    """Run this one UNet, or ControlNet, over ``mesh``: every rank gives it the same input and gets the whole output.

    For a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments alike on all ranks. Ranks
    along ``ring`` and ``ulysses`` share the rows of the image (columns where it is wider than high), those along ``batch`` the
    samples. Nothing is computed for a gradient. Calling this again with another mesh takes effect. If it is refused or fails on a rank, the
    UNet stays as it was on every rank.

    Args:
        unet: a supported UNet of diffusers (docs/vae.md lists them).
        mesh, assume_equal: as for :func:`parallelize_transformer`.
        batched: False: all ranks compute all samples, for what the model makes of one depends on its place in the batch.

    Returns:
        ``unet``.

    Raises:
        TypeError: an unknown class.
    """
    module: Any = uncompiled(unet)
    refuse(When.PARALLELIZE, CompatibilityContext(module, module, "unet"))
    guided = guided_mesh_for(mesh, module)
    with (
        restored_on_failure([module]),
        raising_on_all(guided, f"this {original_class(module).__name__} cannot run in rows"),
    ):
        resolve_unet(module, guided, assume_equal=assume_equal, batched=batched).apply()
    return unet


def resolve_unet(module: nn.Module, mesh: GuidedMesh, *, assume_equal: bool, batched: bool) -> UnetRun:
    """Return what runs ``module`` in rows over ``mesh``. Changes nothing.

    Raises:
        TypeError, ValueError: The UNet is not supported, or the mesh does not fit.
    """
    refuse(When.PARALLELIZE, CompatibilityContext(module, module, "unet", mesh=mesh))
    adapter: Any = unet_adapter(module)

    def require_equal(kwargs: Mapping[str, Any]) -> None:
        mesh.check_alive()
        problem = reason_against(When.PARALLEL_CALL, CompatibilityContext(module, module, mesh=mesh))
        if not assume_equal:
            require_same_inputs(kwargs, mesh, f"this {original_class(module).__name__}", problem)
        elif problem is not None:
            raise RuntimeError(problem)

    return UnetRun(module, adapter, mesh, batched, require_equal)


def unparallelize_unet(unet: Unet) -> Unet:
    """Undo :func:`parallelize_unet`; returns ``unet``, which is then what it was before."""
    unshard_unet(uncompiled(unet))
    return unet
